"""The forms a prompt may take.

    "Once upon a time"                                      text
    [12, 7, 93]                                             token ids
    {"prompt": "Once upon a time", "cache_salt": "alice"}   text with options
    {"prompt_token_ids": [12, 7, 93], "priority": 2}        token ids with options

Upstream: vllm/inputs/llm.py (0.23.0)
Left out: embeddings, encoder-decoder and multimodal prompts. `priority` inside a prompt is ours;
upstream takes it only as an argument of `generate` and `add_request`.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class _PromptOptions(TypedDict):
    """Keys that text and token prompts share."""

    # Prompts share cached KV blocks only with prompts of the same salt.
    cache_salt: NotRequired[str]
    # With scheduling_policy="priority": the lower, the sooner.
    priority: NotRequired[int]


class TextPrompt(_PromptOptions):
    """A prompt to be tokenized."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt already tokenized; `prompt`, if given, is only what `RequestOutput.prompt` shows."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt
