"""/tokenize and /detokenize.

Upstream: vllm/entrypoints/serve/tokenize/serving.py (0.23.0)
Left out: /tokenizer_info.
"""

from __future__ import annotations

from nanovllm.entrypoints.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from nanovllm.entrypoints.openai.serving_chat import OpenAIServingChat
from nanovllm.entrypoints.openai.serving_engine import OpenAIServing
from nanovllm.exceptions import VLLMValidationError
from nanovllm.tokenizers import decode


class OpenAIServingTokenization:
    """Answers from the tokenizer alone; the engine is not asked."""

    def __init__(self, serving_chat: OpenAIServingChat) -> None:
        self.serving_chat = serving_chat

    def create_tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a prompt, or of a conversation as the chat template puts it.

        Raises:
            VLLMValidationError: neither or both are given, or they cannot be used.
            VLLMNotFoundError: it is for another model.
        """
        serving: OpenAIServing = self.serving_chat
        serving.request_logger.log_unknown_fields(request)
        serving.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise VLLMValidationError(
                "either prompt or messages must be given.", parameter="prompt"
            )
        add_special_tokens = request.add_special_tokens
        if request.messages is not None:
            text = self.serving_chat.apply_chat_template(request, request.messages)
            token_ids = serving.encode(text, bool(add_special_tokens), "messages")
        else:
            assert request.prompt is not None
            token_ids = serving.encode(request.prompt, add_special_tokens is not False, "prompt")
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=serving.max_model_len,
            tokens=token_ids,
            token_strs=serving.token_strs(token_ids) if request.return_token_strs else None,
        )

    def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids, special tokens included.

        Raises:
            VLLMValidationError: there is no tokenizer, or one of the ids is no token's.
            VLLMNotFoundError: it is for another model.
        """
        serving: OpenAIServing = self.serving_chat
        serving.request_logger.log_unknown_fields(request)
        serving.check_model(request.model)
        tokenizer = serving.tokenizer
        if tokenizer is None:
            raise VLLMValidationError(
                "there is no tokenizer, because skip_tokenizer_init is set.", parameter="tokens"
            )
        limit = len(tokenizer)
        outside = next((t for t in request.tokens if t >= limit), None)
        if outside is not None:
            raise VLLMValidationError(
                f"tokens holds {outside}, but the tokenizer has {limit} tokens.",
                parameter="tokens",
                value=outside,
            )
        return DetokenizeResponse(prompt=decode(tokenizer, request.tokens))
