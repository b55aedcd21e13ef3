"""The engine's inner loop: schedule, run the model, take in the result.

Upstream: vllm/v1/engine/core.py (0.23.0), merged with its executor, which stands between core and
worker to spread a model over processes. Left out: data parallelism, structured output, KV
connectors, the process boundary (EngineCoreProc).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nanovllm.v1.core.kv_cache_utils import get_kv_cache_config, get_request_block_hasher
from nanovllm.v1.core.sched.async_scheduler import AsyncScheduler
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from nanovllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from nanovllm.v1.request import Request, RequestStatus
from nanovllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.trace.tracer import Tracer
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.kv_cache_interface import KVCacheConfig


class EngineCore:
    """Scheduler and worker, and the step that joins them.

    `step` is the whole engine in three lines. Everything runs in the caller's thread.
    """

    # Steps that may be planned before the oldest one's result is taken in (async scheduling).
    BATCH_QUEUE_SIZE = 2

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        """Load the model, size the KV cache, make the scheduler.

        Raises:
            VLLMValidationError: the model cannot be loaded, or the KV cache would be too small for
                one request of full length.
        """
        self.vllm_config = vllm_config
        self.model_executor = Worker(vllm_config)
        self.model_executor.init_device()
        self.model_executor.load_model()
        self.kv_cache_config = self._initialize_kv_caches()

        self.log_stats = log_stats
        self.scheduler = self._make_scheduler()
        cache_config = vllm_config.cache_config
        self.request_block_hasher = (
            get_request_block_hasher(cache_config.block_size)
            if cache_config.enable_prefix_caching
            else None
        )
        # Set while a trace is taken (nanovllm/trace), by set_tracer.
        self.tracer: Tracer | None = None
        # Steps planned and started, newest left, oldest right.
        self.batch_queue: deque[
            tuple[SchedulerOutput, ModelRunnerOutput | AsyncModelRunnerOutput]
        ] = deque()
        is_async = vllm_config.scheduler_config.async_scheduling
        self.step_fn = self.step_with_batch_queue if is_async else self.step

    def _initialize_kv_caches(self) -> KVCacheConfig:
        """Ask the worker what memory is left, and fill it with blocks."""
        vllm_config = self.vllm_config
        available_memory = 0
        if vllm_config.cache_config.num_gpu_blocks_override is None:
            available_memory = self.model_executor.determine_available_memory()
        kv_cache_config = get_kv_cache_config(
            vllm_config, self.model_executor.get_kv_cache_spec(), available_memory
        )
        vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.model_executor.initialize_from_config(kv_cache_config)
        self.model_executor.compile_or_warm_up_model()
        return kv_cache_config

    def _make_scheduler(self) -> Scheduler:
        scheduler_config = self.vllm_config.scheduler_config
        scheduler_cls = AsyncScheduler if scheduler_config.async_scheduling else Scheduler
        return scheduler_cls(scheduler_config, self.vllm_config.cache_config, self.log_stats)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Its prompt's block hashes are computed here."""
        # Its id may be that of one that has just ended, for which a step is still under way; the
        # token of that step is not for this one. (Upstream makes ids unique by a random ending.)
        for scheduler_output, _ in self.batch_queue:
            scheduler_output.num_scheduled_tokens.pop(request.request_id, None)
        self.scheduler.add_request(
            Request.from_engine_core_request(request, self.request_block_hasher)
        )

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests; unknown and finished ids are passed over. No output follows."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update.

        If the model fails, every request is ended and the error raised: all of them may have been
        in the failed batch's blocks.
        """
        if not self.scheduler.has_requests():
            return EngineCoreOutputs()
        scheduler, model_executor = self._scheduler_and_executor()
        try:
            scheduler_output = scheduler.schedule()
            model_output = model_executor.execute_model(scheduler_output)
            # (Without async scheduling the worker's output is a finished one.)
            return scheduler.update_from_output(scheduler_output, model_output)  # type: ignore[arg-type]
        except BaseException:
            self._abandon_all_requests()
            raise

    def step_with_batch_queue(self) -> EngineCoreOutputs:
        """`step`, with the next step planned before this one's result is taken in.

            schedule 1   schedule 2   update 1   schedule 3   update 2   ...
              run 1 ------->  run 2 ------------->  run 3 ------------->

        On a device that works beside the host, planning hides behind the model. A worker that
        computes on the CPU has finished when execute_model returns: then nothing overlaps, but the
        order of decisions, and so every decision, is the same.

        Returns:
            Nothing in the call that fills the queue; else the oldest step's outputs.
        """
        scheduler, model_executor = self._scheduler_and_executor()
        try:
            if self.scheduler.has_requests():
                scheduler_output = scheduler.schedule()
                model_output = model_executor.execute_model(scheduler_output)
                self.batch_queue.appendleft((scheduler_output, model_output))
                if len(self.batch_queue) < self.BATCH_QUEUE_SIZE and self.scheduler.has_requests():
                    return EngineCoreOutputs()
            if not self.batch_queue:
                return EngineCoreOutputs()
            scheduler_output, model_output = self.batch_queue.pop()
            if isinstance(model_output, AsyncModelRunnerOutput):
                model_output = model_output.get_output()  # The device is waited for here.
            return scheduler.update_from_output(scheduler_output, model_output)
        except BaseException:
            self._abandon_all_requests()
            raise

    def _scheduler_and_executor(self) -> tuple[Scheduler, Worker]:
        """The two halves of a step; while a trace is taken, the tracer in front of both."""
        if self.tracer is not None:
            return self.tracer.in_front_of(self.scheduler, self.model_executor)
        return self.scheduler, self.model_executor

    def _abandon_all_requests(self) -> None:
        """Leave a clean engine behind after a failed step.

        The step may have been left anywhere (Ctrl-C), with queues and tables half changed, and its
        blocks were published before they were filled: so nothing is mended, all begins anew.
        """
        self.scheduler = self._make_scheduler()
        self.scheduler.kv_cache_manager.enable_kv_cache_events(self.tracer is not None)
        self.batch_queue.clear()
        self.model_executor.reset()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Have every step looked at from now on; None: no longer."""
        self.tracer = tracer
        self.scheduler.kv_cache_manager.take_events()  # of an earlier trace
        self.scheduler.kv_cache_manager.enable_kv_cache_events(tracer is not None)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self.model_executor.shutdown()
