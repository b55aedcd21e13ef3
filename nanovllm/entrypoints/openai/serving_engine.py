"""What completions and chats share: from a checked request to the engine's outputs.

    _check                is it for us, and is anything asked for that is not here?
    _make_engine_input    SamplingParams; every mistake is found here, before a stream has begun
    admission.admit       is there room in the queue?
    _generate             AsyncLLM.generate, for one prompt or several at once

Upstream: vllm/entrypoints/openai/engine/serving.py and vllm/entrypoints/serve/render/serving.py
(0.23.0)
Left out: LoRA, tools, data parallelism, embeddings, trace headers. `AdmissionControl` is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.entrypoints.openai.error_response import GenerationError, QueueFullError
from nanovllm.entrypoints.openai.protocol import (
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokenUsageInfo,
    RenderResponse,
    UsageInfo,
)
from nanovllm.exceptions import VLLMNotFoundError, VLLMValidationError
from nanovllm.inputs import TokensPrompt
from nanovllm.logprobs import Logprob
from nanovllm.logprobs import PromptLogprobs as EnginePromptLogprobs
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizers import convert_ids_list_to_tokens, decode
from nanovllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from starlette.requests import Request
    from transformers import PreTrainedTokenizerBase

    from nanovllm.entrypoints.openai.request_logger import RequestLogger
    from nanovllm.v1.engine.async_llm import AsyncLLM

# JSON has no minus infinity; OpenAI's own lowest logprob.
MIN_LOGPROB = -9999.0


@dataclass
class EngineInput:
    """One prompt, ready for the engine. Its text is in `prompt["prompt"]`, if it came as text."""

    prompt: TokensPrompt
    params: SamplingParams
    request_id: str
    priority: int

    @property
    def token_ids(self) -> list[int]:
        return self.prompt["prompt_token_ids"]


class Admission:
    """A place in the queue, given back once, by whoever comes first."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None


class AdmissionControl:
    """Counts the sequences in the engine and refuses those that would wait too far behind.

    |<- max_num_seqs: they run ->|<- max_num_waiting ->| 429
    """

    def __init__(self, max_num_seqs: int, max_num_waiting: int | None) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_waiting = max_num_waiting
        self.num_admitted = 0

    def admit(self, num_seqs: int) -> Admission:
        """Places for `num_seqs` sequences, all or none.

        Raises:
            QueueFullError: there are not so many.
        """
        if self.max_num_waiting is not None:
            num_waiting = max(0, self.num_admitted + num_seqs - self.max_num_seqs)
            if num_waiting > self.max_num_waiting:
                raise QueueFullError(
                    f"the queue is full: {num_waiting} requests would wait, and "
                    f"max_num_waiting is {self.max_num_waiting}; try again later."
                )
        self.num_admitted += num_seqs

        def release() -> None:
            self.num_admitted -= num_seqs

        return Admission(release)


class EventStream:
    """Server-sent events of an admitted request. Close it, whether it was begun or not."""

    def __init__(self, events: AsyncGenerator[bytes, None], admission: Admission) -> None:
        self.events = events
        self._admission = admission

    async def aclose(self) -> None:
        try:
            await self.events.aclose()
        finally:
            self._admission.release()


class OpenAIServing:
    """The base of the handlers of requests that name a model."""

    def __init__(
        self,
        engine_client: AsyncLLM,
        admission: AdmissionControl,
        request_logger: RequestLogger,
        *,
        enable_prompt_tokens_details: bool = False,
        enable_force_include_usage: bool = False,
    ) -> None:
        self.engine_client = engine_client
        self.model_config = engine_client.model_config
        self.admission = admission
        self.request_logger = request_logger
        self.enable_prompt_tokens_details = enable_prompt_tokens_details
        self.enable_force_include_usage = enable_force_include_usage
        self.default_sampling_params = self.model_config.get_diff_sampling_param()
        self._max_token_len: int | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.engine_client.tokenizer

    @property
    def model_name(self) -> str:
        name = self.model_config.served_model_name
        assert name is not None  # EngineArgs.create_engine_config sets it
        return name

    @property
    def max_model_len(self) -> int:
        assert self.model_config.max_model_len is not None  # ModelConfig derives it
        return self.model_config.max_model_len

    # ---- checks ----

    def check_model(self, model: str | None) -> None:
        if model not in (None, "", self.model_name):
            raise VLLMNotFoundError(
                f"The model `{model}` does not exist; this server has `{self.model_name}`."
            )

    def _check(self, request: GenerationRequest) -> None:
        """All that can be told without looking at the prompt."""
        self.request_logger.log_unknown_fields(request)
        self.check_model(request.model)
        request.check()
        policy = self.engine_client.vllm_config.scheduler_config.policy
        if request.priority != 0 and policy != "priority":
            raise VLLMValidationError(
                "priority needs a server started with --scheduling-policy priority.",
                parameter="priority",
            )
        dead_error = self.engine_client.dead_error
        if dead_error is not None:
            raise EngineDeadError(*dead_error.args)

    def _request_id(self, prefix: str, request: GenerationRequest, raw_request: Request) -> str:
        """The response's id, from the client's own if it sent one."""
        given = request.request_id or raw_request.headers.get("x-request-id")
        if given is None or len(given) > 128 or not given.isprintable():
            given = uuid.uuid4().hex
        return f"{prefix}-{given}"

    @staticmethod
    def _engine_id(request_id: str, prompt_idx: int) -> str:
        """An id of the engine's own: a client may send one of its ids twice."""
        return f"{request_id}-{prompt_idx}-{uuid.uuid4().hex[:8]}"

    # ---- the prompt ----

    def encode(self, text: str, add_special_tokens: bool, parameter: str) -> list[int]:
        """Token ids; a text that is too long for the model in any case is not looked at.

        Source: TokenizeParams._text_len_check.
        """
        longest = self.max_model_len * self._longest_token()
        if len(text) > longest:
            raise VLLMValidationError(
                f"{parameter} has {len(text)} characters, more than max_model_len="
                f"{self.max_model_len} tokens can hold ({longest}).",
                parameter=parameter,
            )
        return self.engine_client.input_processor.encode(
            text, add_special_tokens=add_special_tokens
        )

    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token."""
        if self._max_token_len is None:
            tokens = () if self.tokenizer is None else self.tokenizer.get_vocab()
            self._max_token_len = max(map(len, tokens), default=1)
        return self._max_token_len

    def _make_engine_input(
        self,
        request: Any,
        token_ids: list[int],
        text: str | None,
        max_tokens: int | None,
        request_id: str,
    ) -> EngineInput:
        """Give one prompt its parameters and check the two together.

        Raises:
            VLLMValidationError: whatever is wrong with this request.
        """
        params = request.to_sampling_params(
            self._get_max_tokens(max_tokens, len(token_ids)), self.default_sampling_params
        )
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        if text is not None:
            prompt["prompt"] = text
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        # Done again when the engine gets it; but then a stream may have begun, which cannot turn
        # into a 400.
        self.engine_client.input_processor.process_inputs(
            request_id, prompt, params, priority=request.priority
        )
        return EngineInput(prompt, params, request_id, request.priority)

    def _get_max_tokens(self, max_tokens: int | None, prompt_len: int) -> int:
        """As many as were asked for, or as there is room for, up to the model's own default."""
        room = self.max_model_len - prompt_len
        if max_tokens is None:
            return max(1, min(room, self.default_sampling_params.get("max_tokens", room)))
        # A prompt that is too long by itself is told so by InputProcessor.
        if max_tokens > room > 0:
            raise VLLMValidationError(
                f"max_model_len is {self.max_model_len}, but the prompt has {prompt_len} tokens "
                f"and max_tokens asks for {max_tokens}; {room} are left.",
                parameter="max_tokens",
                value=max_tokens,
            )
        return max_tokens

    def _render_response(self, engine_input: EngineInput) -> RenderResponse:
        params = engine_input.params
        token_ids = engine_input.token_ids
        return RenderResponse(
            request_id=engine_input.request_id,
            model=self.model_name,
            prompt=engine_input.prompt.get("prompt"),
            token_ids=token_ids,
            token_strs=self.token_strs(token_ids),
            sampling_params={
                name: value
                for name, value in vars(params).items()
                if not name.startswith("_") and name not in ("output_kind", "skip_clone")
            },
        )

    def token_strs(self, token_ids: list[int]) -> list[str] | None:
        if self.tokenizer is None:
            return None
        return convert_ids_list_to_tokens(self.tokenizer, token_ids)

    # ---- the engine ----

    async def _generate(
        self, engine_inputs: list[EngineInput]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output), as they come. Closing it aborts what still runs."""
        generators = []
        for engine_input in engine_inputs:
            self.request_logger.log_inputs(
                engine_input.request_id, engine_input.prompt, engine_input.params
            )
            generators.append(
                self.engine_client.generate(
                    engine_input.prompt,
                    engine_input.params,
                    engine_input.request_id,
                    priority=engine_input.priority,
                )
            )
        async with aclosing(merge_async_iterators(generators)) as merged:
            async for index, output in merged:
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        raise GenerationError(f"request {output.request_id} failed in the engine")
                yield index, output

    async def _generate_final(self, engine_inputs: list[EngineInput]) -> list[RequestOutput]:
        """The one output of every prompt, in their order."""
        results: dict[int, RequestOutput] = {}
        async with aclosing(self._generate(engine_inputs)) as outputs:
            async for index, output in outputs:
                results[index] = output
        return [results[index] for index in range(len(engine_inputs))]

    def _usage(self, prompt_tokens: int, completion_tokens: int, cached: int = 0) -> UsageInfo:
        usage = UsageInfo(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )
        if self.enable_prompt_tokens_details:
            usage.prompt_tokens_details = PromptTokenUsageInfo(cached_tokens=cached)
        return usage

    def _include_usage(self, request: GenerationRequest) -> tuple[bool, bool]:
        include_usage, continuous = request.include_usage()
        return include_usage or self.enable_force_include_usage, continuous

    # ---- logprobs ----

    def _token(self, token_id: int, logprob: Logprob | None, as_token_id: bool | None) -> str:
        """A token as the response shows it."""
        if as_token_id or self.tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return decode(self.tokenizer, [token_id])


def clamp_prompt_logprobs(prompt_logprobs: EnginePromptLogprobs | None) -> PromptLogprobs | None:
    """The prompt's logprobs as JSON can hold them."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(
                logprob=max(logprob.logprob, MIN_LOGPROB),
                rank=logprob.rank,
                decoded_token=logprob.decoded_token,
            )
            for token_id, logprob in position.items()
        }
        for position in prompt_logprobs
    ]


async def merge_async_iterators(
    generators: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of several generators as they come, each with its generator's index.

    The first error ends all. The generators are closed in any case. None runs ahead of the reader,
    so that it is the engine's collector that holds what a slow reader has not taken.

    Upstream: vllm/utils/async_utils.py (0.23.0)
    """
    if len(generators) == 1:
        async with aclosing(generators[0]) as generator:
            async for item in generator:
                yield 0, item
        return

    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    await queue.put((index, item))
        except Exception as e:
            await queue.put((index, e))
        else:
            await queue.put((index, None))

    tasks = [asyncio.create_task(pump(*pair)) for pair in enumerate(generators)]
    try:
        num_running = len(tasks)
        while num_running:
            index, result = await queue.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                num_running -= 1
            else:
                yield index, result
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
