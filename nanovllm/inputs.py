"""The forms a prompt may take.

    "Once upon a time"                                      text
    [12, 7, 93]                                             token ids
    {"prompt": "Once upon a time", "cache_salt": "alice"}   text with options
    {"prompt_token_ids": [12, 7, 93], "priority": 2}        token ids with options
    {"prompt_embeds": tensor}                               what stands for token ids in the model

Upstream: vllm/inputs/llm.py (0.23.0)
Left out: encoder-decoder and multimodal prompts, prompts of token ids and embeddings mixed, the
switch enable_prompt_embeds. `priority` inside a prompt is ours;
upstream takes it only as an argument of `generate` and `add_request`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    import torch


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


class EmbedsPrompt(_PromptOptions):
    """A prompt given by its embeddings; `prompt` is only what `RequestOutput.prompt` shows."""

    prompt_embeds: torch.Tensor  # [num_tokens, hidden_size]
    prompt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
