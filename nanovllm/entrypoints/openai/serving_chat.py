"""/v1/chat/completions: a conversation in, the next message out.

    create_chat_completion
      _check, _make_engine_input                   the template makes one prompt of the messages
      admission.admit
      stream:  chat_completion_stream_generator    first the role, then the text as it comes
      else:    chat_completion_full_generator

Upstream: vllm/entrypoints/openai/chat_completion/serving.py (0.23.0)
Left out: tools, reasoning, harmony, images and other parts.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from nanovllm.entrypoints.chat_utils import apply_chat_template
from nanovllm.entrypoints.openai.error_response import create_error_response
from nanovllm.entrypoints.openai.protocol import (
    LAST_EVENT,
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
    DeltaMessage,
    RenderResponse,
    TokenizeRequest,
    to_event,
)
from nanovllm.entrypoints.openai.serving_engine import (
    MIN_LOGPROB,
    EngineInput,
    EventStream,
    OpenAIServing,
    clamp_prompt_logprobs,
)
from nanovllm.exceptions import VLLMValidationError
from nanovllm.logprobs import Logprob, SampleLogprobs
from nanovllm.outputs import RequestOutput

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger(__name__)


class OpenAIServingChat(OpenAIServing):
    """The handler of /v1/chat/completions."""

    def __init__(
        self,
        *args: Any,
        chat_template: str | None = None,
        trust_request_chat_template: bool = False,
        response_role: str = "assistant",
        **kwargs: Any,
    ) -> None:
        """
        Args:
            chat_template: Jinja; None: the tokenizer's own.
            args, kwargs: OpenAIServing's.
        """
        super().__init__(*args, **kwargs)
        self.chat_template = chat_template
        self.trust_request_chat_template = trust_request_chat_template
        self.response_role = response_role

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | EventStream:
        """Run a request.

        Raises:
            VLLMValidationError, VLLMNotFoundError, QueueFullError, EngineDeadError,
            EngineGenerateError, GenerationError: see error_response.py for what they become.
        """
        self._check(request)
        request_id = self._request_id("chatcmpl", request, raw_request)
        engine_input = self._preprocess_chat(request, request_id)
        admission = self.admission.admit(request.num_choices())
        created = int(time.time())
        if request.stream:
            events = self.chat_completion_stream_generator(
                request, engine_input, request_id, created
            )
            return EventStream(events, admission)
        try:
            (output,) = await self._generate_final([engine_input])
        finally:
            admission.release()
        return self.chat_completion_full_generator(
            request, engine_input, output, request_id, created
        )

    def render(self, request: ChatCompletionRequest, raw_request: Request) -> RenderResponse:
        """What the engine would be given; nothing is run."""
        self._check(request)
        request_id = self._request_id("chatcmpl", request, raw_request)
        return self._render_response(self._preprocess_chat(request, request_id))

    def _preprocess_chat(self, request: ChatCompletionRequest, request_id: str) -> EngineInput:
        text = self.apply_chat_template(request, request.messages)
        # The template has written the special tokens already.
        token_ids = self.encode(text, request.add_special_tokens, "messages")
        return self._make_engine_input(
            request,
            token_ids,
            text,
            request.requested_max_tokens(),
            self._engine_id(request_id, 0),
        )

    def apply_chat_template(
        self, request: ChatCompletionRequest | TokenizeRequest, messages: list[dict[str, Any]]
    ) -> str:
        """The conversation as one text.

        Raises:
            VLLMValidationError: the messages or what is asked of the template cannot be used.
        """
        if self.tokenizer is None:
            raise VLLMValidationError(
                "there is no chat without a tokenizer, and skip_tokenizer_init leaves none.",
                parameter="messages",
            )
        if request.chat_template is not None and not self.trust_request_chat_template:
            raise VLLMValidationError(
                "chat_template needs a server started with --trust-request-chat-template.",
                parameter="chat_template",
            )
        kwargs = request.chat_template_kwargs or {}
        reserved = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in kwargs:
            if name in reserved:
                raise VLLMValidationError(
                    f"chat_template_kwargs must not hold {name!r}, which is no variable of a "
                    "template.",
                    parameter="chat_template_kwargs",
                )
        try:
            return apply_chat_template(
                self.tokenizer,
                messages,  # type: ignore[arg-type]  # it checks them
                chat_template=request.chat_template or self.chat_template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=kwargs,
            )
        except VLLMValidationError:
            raise
        except Exception as e:
            # A template is a program run on the client's data: whatever it stumbles on is there.
            raise VLLMValidationError(
                f"the chat template fails on this request: {type(e).__name__}: {e}",
                parameter="messages",
            ) from e

    def _role_and_echo(self, request: ChatCompletionRequest) -> tuple[str, str]:
        """The role of the answer, and the text that goes before it."""
        last = request.messages[-1]
        role = self.response_role if request.add_generation_prompt else str(last["role"])
        content = last["content"]
        if not request.echo or last["role"] != role or not isinstance(content, str):
            return role, ""
        return role, content

    # ---- one response ----

    def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        engine_input: EngineInput,
        output: RequestOutput,
        request_id: str,
        created: int,
    ) -> ChatCompletionResponse:
        role, echo = self._role_and_echo(request)
        choices = [
            ChatCompletionResponseChoice(
                index=completion.index,
                message=ChatMessage(role=role, content=echo + completion.text),
                logprobs=self._create_chat_logprobs(
                    request, list(completion.token_ids), completion.logprobs
                ),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                token_ids=list(completion.token_ids) if request.return_token_ids else None,
            )
            for completion in output.outputs
        ]
        return ChatCompletionResponse(
            id=request_id,
            created=created,
            model=self.model_name,
            choices=choices,
            usage=self._usage(
                len(engine_input.token_ids),
                sum(len(completion.token_ids) for completion in output.outputs),
                output.num_cached_tokens or 0,
            ),
            prompt_logprobs=clamp_prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=engine_input.token_ids if request.return_token_ids else None,
            prompt_text=engine_input.prompt.get("prompt") if request.return_prompt_text else None,
        )

    # ---- a stream ----

    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        engine_input: EngineInput,
        request_id: str,
        created: int,
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error that comes in mid-stream is an event, too."""
        role, echo = self._role_and_echo(request)
        num_prompt_tokens = len(engine_input.token_ids)
        num_tokens = [0] * request.num_choices()
        cached = 0
        include_usage, continuous_usage = self._include_usage(request)

        def event(choice: ChatCompletionResponseStreamChoice, num_generated: int) -> bytes:
            data = ChatCompletionStreamResponse(request_id, created, self.model_name, [choice])
            if continuous_usage:
                data.usage = self._usage(num_prompt_tokens, num_generated)
            if request.return_token_ids and num_generated == 0:
                data.prompt_token_ids = engine_input.token_ids
            return to_event(data)

        try:
            is_first = True
            async with aclosing(self._generate([engine_input])) as results:
                async for _, output in results:
                    if is_first:
                        is_first = False
                        for i in range(request.num_choices()):
                            delta = DeltaMessage(echo, role)
                            yield event(ChatCompletionResponseStreamChoice(i, delta), 0)
                    cached = output.num_cached_tokens or 0
                    for completion in output.outputs:
                        i = completion.index
                        num_tokens[i] += len(completion.token_ids)
                        choice = ChatCompletionResponseStreamChoice(
                            index=i,
                            delta=DeltaMessage(completion.text),
                            logprobs=self._create_chat_logprobs(
                                request, list(completion.token_ids), completion.logprobs
                            ),
                            finish_reason=completion.finish_reason,
                        )
                        if completion.finish_reason is not None:
                            choice.stop_reason = completion.stop_reason
                        if request.return_token_ids:
                            choice.token_ids = list(completion.token_ids)
                        yield event(choice, num_tokens[i])
            if include_usage:
                usage = self._usage(num_prompt_tokens, sum(num_tokens), cached)
                yield to_event(
                    ChatCompletionStreamResponse(request_id, created, self.model_name, [], usage)
                )
        except Exception as e:
            logger.exception("Error in the stream of %s.", request_id)
            yield to_event(create_error_response(e))
        yield LAST_EVENT

    # ---- logprobs ----

    def _create_chat_logprobs(
        self,
        request: ChatCompletionRequest,
        token_ids: list[int],
        positions: SampleLogprobs | None,
    ) -> ChatCompletionLogProbs | None:
        """An entry a token, with the `top_logprobs` likeliest; None unless asked for."""
        if not request.logprobs or positions is None:
            return None
        as_token_id = request.return_tokens_as_token_ids
        num_top = request.top_logprobs or 0
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            top = sorted(position.items(), key=lambda item: item[1].rank or 0)
            if num_top != -1:
                top = top[:num_top]
            content.append(
                ChatCompletionLogProbsContent(
                    **self._chat_logprob(token_id, position[token_id], as_token_id),
                    top_logprobs=[
                        ChatCompletionLogProb(**self._chat_logprob(candidate, one, as_token_id))
                        for candidate, one in top
                    ],
                )
            )
        return ChatCompletionLogProbs(content=content)

    def _chat_logprob(
        self, token_id: int, logprob: Logprob, as_token_id: bool | None
    ) -> dict[str, Any]:
        token = self._token(token_id, logprob, as_token_id)
        return {
            "token": token,
            "logprob": max(logprob.logprob, MIN_LOGPROB),
            "bytes": list(token.encode("utf-8", errors="replace")),
        }
