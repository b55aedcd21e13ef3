"""AsyncLLM: the engine for asyncio, many requests at once, each an async generator.

    generate()                                                 one a request, in the caller's task
      InputProcessor -> OutputProcessor.add_request -> client.add_request_async
      then: RequestOutputCollector.get -> yield, until finished
    output_handler                                             one task for all requests
      client.get_output_async -> OutputProcessor.process_outputs -> the requests' collectors
                              -> client.abort_requests_async (stop strings) -> loggers

Upstream: vllm/v1/engine/async_llm.py (0.23.0)
Left out: pooling, streaming input, pausing, sleep, profiling, LoRA, data parallelism. The
in-process client is ours: upstream's AsyncLLM knows processes only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from nanovllm.engine.arg_utils import EngineArgs, UsageContext
from nanovllm.exceptions import VLLMValidationError
from nanovllm.inputs import PromptType
from nanovllm.logger import configure_logging
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine import EngineCoreRequest
from nanovllm.v1.engine.core_client import AsyncEngineCoreClient, make_async_client
from nanovllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from nanovllm.v1.engine.input_processor import InputProcessor, get_prompt_text
from nanovllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from nanovllm.v1.engine.parallel_sampling import ParentRequest, split_request
from nanovllm.v1.metrics.loggers import StatLoggerManager
from nanovllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Outputs that the output handler works off before other tasks get their turn.
OUTPUT_PROC_CHUNK_SIZE = 128


class AsyncLLM:
    """Use it from one event loop at a time.

    engine = AsyncLLM.from_engine_args(EngineArgs())
    async for output in engine.generate("Once upon a time", SamplingParams(), "request-0"):
        ...
    engine.shutdown()

    Attributes:
        logger_manager: gets every step's statistics; None with log_stats off.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        log_stats: bool = True,
        *,
        client: Literal["inproc", "mp"] = "inproc",
    ) -> None:
        """Load tokenizer and model, allocate the KV cache, start the engine's thread or process.

        Args:
            log_stats: keep the moments of requests and the loggers' statistics.
            client: where the core runs: a thread of this process, or a process of its own.

        Raises:
            VLLMValidationError: the model or the settings cannot be used.
        """
        configure_logging()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_stats = log_stats
        self.input_processor = InputProcessor(vllm_config)
        self.output_processor = OutputProcessor(self.input_processor.tokenizer, log_stats)
        self.engine_core: AsyncEngineCoreClient = make_async_client(client, vllm_config, log_stats)
        self.output_handler: asyncio.Task[None] | None = None
        # The last: it tells the size of the KV cache, which the core has chosen.
        self.logger_manager = StatLoggerManager(vllm_config) if log_stats else None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        client: Literal["inproc", "mp"] = "inproc",
        usage_context: UsageContext = UsageContext.OPENAI_API_SERVER,
    ) -> AsyncLLM:
        """An engine from a user's arguments; `usage_context` decides the batch size's defaults."""
        vllm_config = engine_args.create_engine_config(usage_context)
        return cls(vllm_config, not engine_args.disable_log_stats, client=client)

    # ---- requests ----

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt.

        Cancelling the task that iterates, or closing the generator, aborts the request.

        Args:
            prompt: see nanovllm/inputs.py.
            sampling_params: `output_kind` says what is yielded: what is new, all so far, or the end
                result alone. Not changed.
            request_id: any string no unfinished request bears.
            priority: with scheduling_policy="priority": the lower, the sooner.

        Raises:
            VLLMValidationError: the request can never run as given.
            EngineGenerateError: this request has failed; the engine goes on.
            EngineDeadError: the engine has stopped.
        """
        queue: RequestOutputCollector | None = None
        try:
            queue = await self.add_request(request_id, prompt, sampling_params, priority=priority)
            finished = False
            while not finished:
                # Without an await if possible: that spares a switch of tasks.
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        except (VLLMValidationError, EngineDeadError, EngineGenerateError):
            raise
        except Exception as error:
            raise EngineGenerateError(f"{type(error).__name__}: {error}") from error
        finally:
            # Cancelled, closed or failed: nobody will want the rest.
            if queue is not None and self.output_processor.has_collector(queue):
                await self.abort(request_id)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> RequestOutputCollector:
        """Queue a prompt; its outputs will come to the collector. See `generate`."""
        self._raise_if_dead()
        request = self.input_processor.process_inputs(
            request_id, prompt, params, arrival_time, priority
        )
        self.input_processor.assign_request_id(request)
        prompt_text = get_prompt_text(prompt)
        # Here and not in __init__, which may run before there is an event loop.
        self._run_output_handler()
        queue = RequestOutputCollector(request.sampling_params.output_kind, request_id)
        parent_req, core_requests = split_request(request)
        for index, core_request in enumerate(core_requests):
            try:
                await self._add_request(core_request, prompt_text, parent_req, index, queue)
            except BaseException:
                if index > 0:  # else the id is somebody else's
                    await self.abort(request_id)
                raise
        return queue

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        """Enter one (child) request on both sides, or the whole of it on neither."""
        self.output_processor.add_request(request, prompt_text, parent_req, index, queue)
        try:
            await self.engine_core.add_request_async(request)
        except BaseException:
            await self.abort(request.external_req_id or request.request_id)
            raise

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests; their blocks are free before the next step. Unknown ids are ignored.

        Whoever iterates over one of them gets a last output, with finish_reason "abort".
        """
        request_ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        core_request_ids = self.output_processor.abort_requests(request_ids)
        if core_request_ids and not self.errored:
            await self.engine_core.abort_requests_async(core_request_ids)

    def _run_output_handler(self) -> None:
        """Start the task, if it does not run in this event loop already."""
        loop, handler = asyncio.get_running_loop(), self.output_handler
        if handler is None or handler.done() or handler.get_loop() is not loop:
            self.output_handler = loop.create_task(self._handle_outputs())

    async def _handle_outputs(self) -> None:
        """The task that takes outputs from the core to the requests' collectors."""
        try:
            while True:
                # 1) The next step's outputs.
                outputs = await self.engine_core.get_output_async()
                iteration_stats = IterationStats() if self.log_stats and outputs.outputs else None
                for start in range(0, len(outputs.outputs), OUTPUT_PROC_CHUNK_SIZE):
                    if start > 0:
                        await asyncio.sleep(0)
                    # 2) Detokenize, look for stop strings, put RequestOutputs into the collectors.
                    processed = self.output_processor.process_outputs(
                        outputs.outputs[start : start + OUTPUT_PROC_CHUNK_SIZE],
                        outputs.timestamp,
                        iteration_stats,
                    )
                    # 3) Tell the core which requests a stop string has ended.
                    if processed.reqs_to_abort:
                        await self.engine_core.abort_requests_async(processed.reqs_to_abort)
                # 4) Loggers.
                if self.logger_manager is not None:
                    self.logger_manager.record(outputs.scheduler_stats, iteration_stats)
        except EngineDeadError as error:
            self.output_processor.propagate_error(error)
        except Exception as error:
            # Not the core's fault; but nobody takes its outputs any more.
            logger.exception("The output handler has failed.")
            dead = EngineDeadError(
                f"The output handler has failed: {type(error).__name__}: {error}"
            )
            dead.__cause__ = error
            with suppress(EngineDeadError):
                unfinished = list(self.output_processor.request_states)
                await self.engine_core.abort_requests_async(unfinished)
            self.engine_core.mark_dead(dead)
            self.output_processor.propagate_error(dead)

    # ---- the engine as a whole ----

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has stopped; None while it runs."""
        return self.engine_core.dead_error

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args) from self.dead_error.__cause__

    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._raise_if_dead()

    async def is_idle(self) -> bool:
        """True if no request is unfinished, here or in the core."""
        if self.output_processor.has_unfinished_requests():
            return False
        return not await self.engine_core.call_utility_async("has_work")

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return await self.engine_core.call_utility_async("reset_prefix_cache")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.input_processor.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            VLLMValidationError: the engine was started with skip_tokenizer_init.
        """
        return self.input_processor.get_tokenizer()

    def shutdown(self) -> None:
        """Stop the engine's thread or process, and let go of the model. Requests that are under way
        end with an EngineDeadError."""
        self.engine_core.shutdown()
