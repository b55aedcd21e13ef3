"""/v1/completions: prompts in, texts out.

    create_completion
      _check, _make_engine_inputs           mistakes end here
      admission.admit
      stream:  completion_stream_generator  one server-sent event an output
      else:    request_output_to_completion_response

Choice `i` of prompt `p` has index p * n + i.

Upstream: vllm/entrypoints/openai/completion/serving.py (0.23.0)
Left out: beam search, embeddings as prompts. `text_offset` goes on through a stream, echoed prompt
included, so that it is what an unstreamed response has; upstream's leaves the prompt out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from nanovllm.entrypoints.openai.error_response import create_error_response
from nanovllm.entrypoints.openai.protocol import (
    LAST_EVENT,
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    RenderResponse,
    to_event,
)
from nanovllm.entrypoints.openai.serving_engine import (
    MIN_LOGPROB,
    EngineInput,
    EventStream,
    OpenAIServing,
    clamp_prompt_logprobs,
)
from nanovllm.logprobs import LogprobsOnePosition
from nanovllm.logprobs import PromptLogprobs as EnginePromptLogprobs
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.tokenizers import decode

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger(__name__)


class OpenAIServingCompletion(OpenAIServing):
    """The handler of /v1/completions."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | EventStream:
        """Run a request.

        Raises:
            VLLMValidationError, VLLMNotFoundError, QueueFullError, EngineDeadError,
            EngineGenerateError, GenerationError: see error_response.py for what they become.
        """
        self._check(request)
        request_id = self._request_id("cmpl", request, raw_request)
        engine_inputs = self._make_engine_inputs(request, request_id)
        admission = self.admission.admit(len(engine_inputs) * request.num_choices())
        created = int(time.time())
        if request.stream:
            events = self.completion_stream_generator(request, engine_inputs, request_id, created)
            return EventStream(events, admission)
        try:
            outputs = await self._generate_final(engine_inputs)
        finally:
            admission.release()
        return self.request_output_to_completion_response(
            request, engine_inputs, outputs, request_id, created
        )

    def render(self, request: CompletionRequest, raw_request: Request) -> list[RenderResponse]:
        """What the engine would be given, a prompt each; nothing is run."""
        self._check(request)
        request_id = self._request_id("cmpl", request, raw_request)
        return [
            self._render_response(engine_input)
            for engine_input in self._make_engine_inputs(request, request_id)
        ]

    def _make_engine_inputs(self, request: CompletionRequest, request_id: str) -> list[EngineInput]:
        """One input a prompt; a list of int is one prompt."""
        prompt = request.prompt
        prompts: Sequence[str | list[int]]
        if isinstance(prompt, str):
            prompts = [prompt]
        elif prompt and isinstance(prompt[0], int):
            prompts = [prompt]  # type: ignore[list-item]
        else:
            prompts = prompt  # type: ignore[assignment]  # request.check() refuses None
        engine_inputs = []
        for i, one in enumerate(prompts):
            if isinstance(one, str):
                token_ids, text = self.encode(one, request.add_special_tokens, "prompt"), one
            else:
                token_ids, text = one, None
            engine_inputs.append(
                self._make_engine_input(
                    request, token_ids, text, request.max_tokens, self._engine_id(request_id, i)
                )
            )
            if text is None and request.echo and self.tokenizer is not None:
                # (After the check: an id beyond the vocabulary has no text.)
                engine_inputs[-1].prompt["prompt"] = decode(self.tokenizer, token_ids)
        return engine_inputs

    # ---- one response ----

    def request_output_to_completion_response(
        self,
        request: CompletionRequest,
        engine_inputs: list[EngineInput],
        outputs: list[RequestOutput],
        request_id: str,
        created: int,
    ) -> CompletionResponse:
        choices: list[CompletionResponseChoice] = []
        num_generated = 0
        for engine_input, output in zip(engine_inputs, outputs, strict=True):
            for completion in output.outputs:
                if request.echo_without_generation():
                    completion = _without_generation(completion)
                num_generated += len(completion.token_ids)
                text, logprobs, _ = self._text_and_logprobs(
                    request, engine_input, completion, output.prompt_logprobs, request.echo, 0
                )
                choices.append(
                    CompletionResponseChoice(
                        index=len(choices),
                        text=text,
                        logprobs=logprobs,
                        finish_reason=completion.finish_reason,
                        stop_reason=completion.stop_reason,
                        prompt_logprobs=None
                        if request.prompt_logprobs is None
                        else clamp_prompt_logprobs(output.prompt_logprobs),
                        prompt_token_ids=engine_input.token_ids
                        if request.return_token_ids
                        else None,
                        token_ids=list(completion.token_ids) if request.return_token_ids else None,
                    )
                )
        return CompletionResponse(
            id=request_id,
            created=created,
            model=self.model_name,
            choices=choices,
            usage=self._usage(
                sum(len(engine_input.token_ids) for engine_input in engine_inputs),
                num_generated,
                sum(output.num_cached_tokens or 0 for output in outputs),
            ),
        )

    # ---- a stream ----

    async def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: list[EngineInput],
        request_id: str,
        created: int,
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error that comes in mid-stream is an event, too."""
        n = request.num_choices()
        num_choices = n * len(engine_inputs)
        offsets = [0] * num_choices  # text_offset of the next token
        num_tokens = [0] * num_choices
        begun = [False] * num_choices
        prompt_logprobs: dict[int, EnginePromptLogprobs] = {}
        cached = dict.fromkeys(range(len(engine_inputs)), 0)
        include_usage, continuous_usage = self._include_usage(request)

        try:
            async with aclosing(self._generate(engine_inputs)) as results:
                async for prompt_idx, output in results:
                    engine_input = engine_inputs[prompt_idx]
                    cached[prompt_idx] = output.num_cached_tokens or 0
                    if output.prompt_logprobs:
                        # Handed out once, but every choice echoes them.
                        prompt_logprobs[prompt_idx] = output.prompt_logprobs
                    for completion in output.outputs:
                        i = prompt_idx * n + completion.index
                        if not (completion.token_ids or completion.finished()):
                            continue  # a prompt computed in part
                        if request.echo_without_generation():
                            completion = _without_generation(completion)
                        is_first = not begun[i]
                        begun[i] = True
                        text, logprobs, offsets[i] = self._text_and_logprobs(
                            request,
                            engine_input,
                            completion,
                            prompt_logprobs.get(prompt_idx),
                            request.echo and is_first,
                            offsets[i],
                        )
                        num_tokens[i] += len(completion.token_ids)
                        choice = CompletionResponseStreamChoice(
                            index=i,
                            text=text,
                            logprobs=logprobs,
                            finish_reason=completion.finish_reason,
                            stop_reason=completion.stop_reason,
                        )
                        if request.return_token_ids:
                            choice.token_ids = list(completion.token_ids)
                            choice.prompt_token_ids = engine_input.token_ids if is_first else None
                        data = CompletionStreamResponse(
                            request_id, created, self.model_name, [choice]
                        )
                        if continuous_usage:
                            data.usage = self._usage(len(engine_input.token_ids), num_tokens[i])
                        yield to_event(data)
            if include_usage:
                usage = self._usage(
                    sum(len(engine_input.token_ids) for engine_input in engine_inputs),
                    sum(num_tokens),
                    sum(cached.values()),
                )
                data = CompletionStreamResponse(request_id, created, self.model_name, [], usage)
                yield to_event(data)
        except Exception as e:
            logger.exception("Error in the stream of %s.", request_id)
            yield to_event(create_error_response(e))
        yield LAST_EVENT

    # ---- text and logprobs of one choice ----

    def _text_and_logprobs(
        self,
        request: CompletionRequest,
        engine_input: EngineInput,
        completion: CompletionOutput,
        prompt_logprobs: EnginePromptLogprobs | None,
        echo: bool | None,
        offset: int,
    ) -> tuple[str, CompletionLogProbs | None, int]:
        """What one choice shows of an output, the prompt before it with `echo`.

        Args:
            offset: where its text begins.

        Returns:
            (text, logprobs if asked for, the offset of what comes next).
        """
        text = completion.text
        token_ids: list[int] = list(completion.token_ids)
        positions: list[LogprobsOnePosition | None] = list(completion.logprobs or ())
        if echo:
            text = (engine_input.prompt.get("prompt") or "") + text
            token_ids = [*engine_input.token_ids, *token_ids]
            positions = [*(prompt_logprobs or ()), *positions]
        if request.logprobs is None:
            return text, None, offset
        logprobs = self._create_completion_logprobs(
            token_ids,
            positions,
            request.logprobs,
            offset,
            request.return_tokens_as_token_ids,
        )
        if logprobs.tokens:
            offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return text, logprobs, offset

    def _create_completion_logprobs(
        self,
        token_ids: list[int],
        positions: list[LogprobsOnePosition | None],
        num_logprobs: int,
        offset: int,
        as_token_id: bool | None,
    ) -> CompletionLogProbs:
        """OpenAI's four parallel lists. The prompt's first token has no logprob."""
        # (Given, so that they count as set: a stream leaves out what is not.)
        result = CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            logprob = None if position is None else position[token_id]
            token = self._token(token_id, logprob, as_token_id)
            result.tokens.append(token)
            result.text_offset.append(offset)
            offset += len(token)
            if position is None or logprob is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(max(logprob.logprob, MIN_LOGPROB))
            # The sampled token comes first, so that this many plus one are shown.
            shown = list(position.items())[: num_logprobs + 1]
            result.top_logprobs.append(
                {
                    self._token(candidate, one, as_token_id): max(one.logprob, MIN_LOGPROB)
                    for candidate, one in shown
                }
            )
        return result


def _without_generation(completion: CompletionOutput) -> CompletionOutput:
    """Echo with max_tokens=0: the one token that was generated is not shown."""
    return CompletionOutput(completion.index, "", [], logprobs=[], finish_reason="length")
