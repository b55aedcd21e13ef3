"""From the core's token ids to RequestOutputs.

The core knows tokens; text, stop strings, logprob dicts and the n samples of a request are made
here, one RequestState a (child) request:

    EngineCoreOutput(new_token_ids, finish_reason, logprobs)
      -> IncrementalDetokenizer.update      text; did it complete a stop string?
      -> LogprobsProcessor.update           logprob dicts
      -> ParentRequest.get_outputs          n > 1: gather the samples
      -> RequestOutput

A stop string is seen only here, one step after its last token was sampled, so the core has to be
told to abort that request (`OutputProcessorOutput.reqs_to_abort`).

With a RequestOutputCollector (AsyncLLM) a request's outputs go there; without one (LLMEngine) they
are returned.

Upstream: vllm/v1/engine/output_processor.py (0.23.0)
Left out: stream_interval, streaming input, pooling, tracing spans, LoRA. Upstream lets an error
that one request causes here end the whole engine; with a collector, it ends that request alone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.exceptions import VLLMValidationError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from nanovllm.v1.engine.detokenizer import IncrementalDetokenizer
from nanovllm.v1.engine.exceptions import EngineGenerateError
from nanovllm.v1.engine.logprobs import LogprobsProcessor
from nanovllm.v1.engine.parallel_sampling import ParentRequest
from nanovllm.v1.metrics.stats import IterationStats, RequestStateStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestOutputCollector:
    """Hands one request's outputs to the task that consumes them.

        put, put, put        ->  output (one, merged)  ->  get
        once a step              never a queue             whenever the consumer comes

    A slow consumer finds deltas joined, or of cumulative outputs the newest; so what waits for it
    is never more than the request's whole output. All n samples of a request share a collector.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.aggregate = output_kind == RequestOutputKind.DELTA
        self.request_id = request_id
        self.output: RequestOutput | Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Never waits. An error replaces what is waiting, and nothing comes after it."""
        if self.output is None or isinstance(output, Exception):
            self.output = output
            self.ready.set()
        elif isinstance(self.output, RequestOutput):
            self.output.add(output, aggregate=self.aggregate)

    async def get(self) -> RequestOutput:
        """Wait for the next output, and take it; an error is raised."""
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        """Take what is there; an error is raised."""
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


@dataclass
class OutputProcessorOutput:
    """What a step has for the user, and which requests the core still has to drop."""

    request_outputs: list[RequestOutput]
    reqs_to_abort: list[str]


class RequestState:
    """All the front end knows of one request that the core is working on."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        tokenizer: PreTrainedTokenizerBase | None,
        log_stats: bool,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        params = request.sampling_params
        if not params.detokenize:
            tokenizer = None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.parent_req = parent_req
        self.request_index = request_index
        self.output_kind = params.output_kind
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self.logprobs_processor = LogprobsProcessor.from_new_request(tokenizer, request)
        self.is_prefilling = True
        self.num_cached_tokens = 0
        self.max_tokens_param = params.max_tokens
        self.queue = queue
        self.stats = RequestStateStats(arrival_time=request.arrival_time) if log_stats else None

    def make_request_output(
        self,
        new_token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> RequestOutput | None:
        """What the user is to see of this step; None if that is nothing (yet)."""
        finished = finish_reason is not None
        if not finished and self.output_kind == RequestOutputKind.FINAL_ONLY:
            return None
        output = self._new_completion_output(new_token_ids, finish_reason, stop_reason)
        outputs = [output]
        if self.parent_req is not None:
            outputs, finished = self.parent_req.get_outputs(self.request_id, output)
            if not outputs:
                return None
        return self._new_request_output(outputs, finished)

    def _new_request_output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        if self.output_kind == RequestOutputKind.DELTA:
            prompt_logprobs = self.logprobs_processor.pop_prompt_logprobs()
        else:
            prompt_logprobs = self.logprobs_processor.prompt_logprobs
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.stats,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _new_completion_output(
        self,
        new_token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        finished = finish_reason is not None
        delta = self.output_kind == RequestOutputKind.DELTA
        token_ids = new_token_ids if delta else self.detokenizer.output_token_ids
        logprobs = self.logprobs_processor.logprobs
        if delta and logprobs is not None:
            logprobs = logprobs[len(logprobs) - len(token_ids) :]
        # Copies: the user may keep this output while the request goes on.
        return CompletionOutput(
            index=self.request_index,
            text=self.detokenizer.get_next_output_text(finished, delta),
            token_ids=list(token_ids),
            cumulative_logprob=self.logprobs_processor.cumulative_logprob,
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=str(finish_reason) if finished else None,
            stop_reason=stop_reason if finished else None,
        )


class OutputProcessor:
    """The front end's record of every unfinished request.

        external_req_ids   "x" -> ["0_x", "1_x"]     the user's id -> the core's
        request_states     "0_x" -> RequestState     one a request in the core
        parent_requests    "x" -> ParentRequest      only for n > 1

    A request is in all of them or in none: entered by add_request, removed when its last output has
    been made, or by abort_requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, log_stats: bool = True) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: defaultdict[str, list[str]] = defaultdict(list)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return len(self.request_states) > 0

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Begin to expect outputs for `request`, child `request_index` of `parent_req` if that is
        given. They will be put into `queue`, or without one returned by process_outputs.

        Raises:
            VLLMValidationError: an unfinished request bears the same id.
        """
        state = RequestState(
            request, prompt, parent_req, request_index, self.tokenizer, self.log_stats, queue
        )
        in_use = request_index == 0 and state.external_req_id in self.external_req_ids
        if in_use or state.request_id in self.request_states:
            raise VLLMValidationError(
                f"request_id {state.external_req_id!r} is taken by a request that is not finished; "
                "choose another.",
                parameter="request_id",
                value=state.external_req_id,
            )
        self.request_states[state.request_id] = state
        self.external_req_ids[state.external_req_id].append(state.request_id)
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req

    def has_collector(self, queue: RequestOutputCollector) -> bool:
        """Is a request unfinished whose outputs go to `queue`? (Its id alone may be another's.)"""
        request_ids = self.external_req_ids.get(queue.request_id, ())
        return any(self.request_states[i].queue is queue for i in request_ids)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests by the ids the user gave them; unknown (or finished) ids are ignored.

        Who waits for one of them at a collector gets a last output, with finish_reason "abort".

        Returns:
            The core's ids of what was forgotten, all unfinished children for n > 1.
        """
        aborted: list[str] = []
        for external_req_id in request_ids:
            for request_id in list(self.external_req_ids.get(external_req_id, ())):
                state = self.request_states[request_id]
                self._forget(state)
                aborted.append(request_id)
                if state.queue is not None:
                    output = state.make_request_output([], FinishReason.ABORT, None)
                    if output is not None:
                        state.queue.put(output)
        return aborted

    def propagate_error(self, error: Exception) -> None:
        """The engine is dead: forget every request, and let everyone who waits know, once."""
        for state in list(self.request_states.values()):
            self._forget(state)
            if state.queue is not None:
                # One each: a raised error collects the traceback of its raiser.
                own_error = copy(error)
                own_error.__cause__ = error.__cause__
                state.queue.put(own_error)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Turn what the core produced in one step into RequestOutputs.

        The one loop over the batch in the front end: whatever is done for each request belongs
        here.

        Args:
            engine_core_timestamp: time.monotonic() at the step's end.
            iteration_stats: filled in for the loggers; None: there are none.
        """
        if iteration_stats is None:
            iteration_stats = IterationStats()  # The requests' own moments are noted through it.
        request_outputs: list[RequestOutput] = []
        reqs_to_abort: list[str] = []
        for engine_core_output in engine_core_outputs:
            state = self.request_states.get(engine_core_output.request_id)
            if state is None:
                continue  # aborted while the step ran
            try:
                request_output, finish_reason = self._process_output(
                    state, engine_core_output, engine_core_timestamp, iteration_stats
                )
            except Exception as error:
                if state.queue is None:
                    raise
                state.queue.put(error)
                reqs_to_abort += self.abort_requests([state.external_req_id])
                continue
            if request_output is not None:
                if state.queue is not None:
                    state.queue.put(request_output)
                else:
                    request_outputs.append(request_output)
            if finish_reason is not None:
                self._forget(state)
                if not engine_core_output.finished:
                    reqs_to_abort.append(state.request_id)
                self._update_stats_from_finished(state, finish_reason, iteration_stats)
        return OutputProcessorOutput(request_outputs, reqs_to_abort)

    def _process_output(
        self,
        state: RequestState,
        engine_core_output: EngineCoreOutput,
        engine_core_timestamp: float,
        iteration_stats: IterationStats,
    ) -> tuple[RequestOutput | None, FinishReason | None]:
        """One request's part of `process_outputs`: what to show, and whether it has ended.

        Raises:
            EngineGenerateError: the core could not take the request in.
        """
        new_token_ids = engine_core_output.new_token_ids
        finish_reason = engine_core_output.finish_reason
        stop_reason = engine_core_output.stop_reason
        if finish_reason is FinishReason.ERROR:
            raise EngineGenerateError(stop_reason)

        # 1) Note its moments.
        if state.stats is not None:
            iteration_stats.update_from_output(
                engine_core_output, engine_core_timestamp, state.is_prefilling, state.stats
            )
        if state.is_prefilling:
            if engine_core_output.prefill_stats is not None:
                state.num_cached_tokens = engine_core_output.prefill_stats.num_cached_tokens
            state.is_prefilling = False

        # 2) Detokenize; does the text hold a stop string?
        stop_string = state.detokenizer.update(
            new_token_ids, stop_terminated=finish_reason == FinishReason.STOP
        )
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string

        # 3) Logprobs.
        state.logprobs_processor.update_from_output(engine_core_output)

        # 4) What the user sees of it.
        return state.make_request_output(new_token_ids, finish_reason, stop_reason), finish_reason

    @staticmethod
    def _update_stats_from_finished(
        state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats
    ) -> None:
        if state.stats is None:
            return
        iteration_stats.update_from_finished_request(
            finish_reason,
            state.external_req_id,
            len(state.prompt_token_ids),
            state.max_tokens_param,
            state.stats,
            state.num_cached_tokens,
        )
        ParentRequest.observe_finished_request(
            state.parent_req, iteration_stats, state.stats.num_generation_tokens
        )

    def _forget(self, state: RequestState) -> None:
        """Remove one request, and its parent with the last child."""
        del self.request_states[state.request_id]
        siblings = self.external_req_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
            if state.parent_req is not None:
                self.parent_requests.pop(state.parent_req.request_id, None)
