"""From a conversation to the text the model is prompted with.

Upstream: vllm/entrypoints/chat_utils.py and vllm/renderers/hf.py (0.23.0)
Left out: images, audio and video, tools, reasoning, templates that want content as a list of parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatCompletionMessageParam(TypedDict):
    """One message, as OpenAI writes it."""

    role: str
    # Text, or parts of it: [{"type": "text", "text": "..."}].
    content: str | list[dict[str, str]]
    name: NotRequired[str]


def load_chat_template(chat_template: Path | str | None) -> str | None:
    """A template given as a file, as itself, or not at all.

    Raises:
        VLLMValidationError: it is neither a file nor anything with a Jinja brace in it.
    """
    if chat_template is None or (isinstance(chat_template, str) and "{" in chat_template):
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise VLLMValidationError(
            f"chat_template {str(chat_template)!r} is neither a file nor a Jinja template.",
            parameter="chat_template",
            value=chat_template,
        )
    return path.read_text(encoding="utf-8")


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[ChatCompletionMessageParam],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The conversation as one text.

    Args:
        chat_template: Jinja; None: the tokenizer's own.
        add_generation_prompt: end with what opens the assistant's next message.
        continue_final_message: leave the last message open, to be continued.
        chat_template_kwargs: further variables for the template.

    Raises:
        VLLMValidationError: a message is malformed, there is no template, or it refuses the
            messages.
    """
    from jinja2 import TemplateError

    if continue_final_message and add_generation_prompt:
        raise VLLMValidationError(
            "continue_final_message and add_generation_prompt exclude each other: one continues "
            "the last message, the other begins a new one.",
            parameter="continue_final_message",
            value=True,
        )
    if chat_template is None and not tokenizer.chat_template:
        raise VLLMValidationError(
            "this model's tokenizer has no chat template; give chat_template or use generate.",
            parameter="chat_template",
        )
    conversation = _parse_messages(messages)
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(chat_template_kwargs or {}),
        )
        return str(text)  # a str it is already: tokenize=False
    except (TemplateError, ValueError) as e:
        raise VLLMValidationError(
            f"the chat template does not accept these messages: {e}",
            parameter="messages",
            value=messages,
        ) from e


def _parse_messages(messages: list[ChatCompletionMessageParam]) -> list[dict[str, Any]]:
    """Check the messages and join parts of text, with a line break between them as upstream."""
    if not isinstance(messages, list) or not messages:
        raise VLLMValidationError(
            f"messages must be a non-empty list of dicts, got {messages!r}.",
            parameter="messages",
            value=messages,
        )
    conversation = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise VLLMValidationError(
                f"message {i} must be a dict with a 'role' and a 'content', got {message!r}.",
                parameter="messages",
                value=message,
            )
        content: Any = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = None if None in parts else "\n".join(str(part) for part in parts)
        if not isinstance(content, str):
            raise VLLMValidationError(
                f"message {i} must have a str or a list of text parts as 'content', "
                f"got {message.get('content')!r}.",
                parameter="messages",
                value=message,
            )
        conversation.append({**message, "content": content})
    return conversation
