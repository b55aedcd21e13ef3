"""Worker: one device, its model and its memory.

Upstream: vllm/v1/worker/gpu_worker.py and cpu_worker.py (0.23.0)
Left out: distributed set-up, sleep mode, profiling, LoRA. On a CPU upstream takes
gpu_memory_utilization of the whole memory for the KV cache; here it is a share of what is free, and
no more than can be used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from nanovllm.v1.worker.async_gpu_model_runner import AsyncGPUModelRunner
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

# On a CPU: the share of the free memory that the KV cache may take.
CPU_KV_CACHE_MEMORY_SHARE = 0.5
GIB = 1 << 30


class Worker:
    """Owns the device; EngineCore drives it.

    The calls come in this order, because each needs what the one before it left in memory:

        init_device                  pick the device, note what is free
        load_model                   weights
        determine_available_memory   what is left for the KV cache
        initialize_from_config       allocate it
        compile_or_warm_up_model     CUDA graphs
        execute_model                once a step
        reset, shutdown              after a failed step, at the end
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.device: torch.device
        self.model_runner: GPUModelRunner
        self.init_free_memory = 0  # bytes of a GPU that were free at init_device
        self.requested_memory = 0  # bytes of a GPU that we may use

    def init_device(self) -> None:
        """Claim the device.

        Raises:
            VLLMValidationError: there is no such device, or gpu_memory_utilization asks for more of
                a GPU than is free.
        """
        name = self.vllm_config.device_config.device
        try:
            # A tensor's device has an index where "cuda" alone has none.
            self.device = torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as e:
            raise VLLMValidationError(
                f"device {name!r} cannot be used here: {str(e).splitlines()[0]}",
                parameter="device",
                value=name,
            ) from e
        if self.device.type == "cuda":
            self._claim_gpu_memory()
        is_async = self.vllm_config.scheduler_config.async_scheduling
        runner_cls = AsyncGPUModelRunner if is_async else GPUModelRunner
        self.model_runner = runner_cls(self.vllm_config, self.device)

    def _claim_gpu_memory(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.empty_cache()
        self.init_free_memory, total = torch.cuda.mem_get_info(self.device)
        utilization = self.cache_config.gpu_memory_utilization
        self.requested_memory = int(total * utilization)
        enough = self.init_free_memory >= self.requested_memory
        if not enough and self.cache_config.kv_cache_memory_bytes is None:
            raise VLLMValidationError(
                f"Only {self.init_free_memory / GIB:.2f} of {total / GIB:.2f} GiB of {self.device} "
                f"are free, less than gpu_memory_utilization={utilization} asks for "
                f"({self.requested_memory / GIB:.2f} GiB); lower it or free memory on the GPU.",
                parameter="gpu_memory_utilization",
                value=utilization,
            )

    def load_model(self) -> None:
        """Load the weights.

        Raises:
            VLLMValidationError: they do not fit on the GPU.
        """
        try:
            self.model_runner.load_model()
        except torch.OutOfMemoryError as e:
            raise VLLMValidationError(
                f"The weights of {self.vllm_config.model_config.model!r} do not fit into the "
                f"{self.init_free_memory / GIB:.2f} GiB that were free on {self.device}; use a "
                "smaller model or dtype.",
                parameter="model",
            ) from e

    def get_kv_cache_spec(self) -> FullAttentionSpec:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache of all layers may take.

        `kv_cache_memory_bytes` if the user has set it; else, on a GPU, gpu_memory_utilization of it
        less what weights and the largest step need; else CPU_KV_CACHE_MEMORY_SHARE of the free
        memory, but not more than max_num_seqs requests of max_model_len can fill.
        """
        if self.cache_config.kv_cache_memory_bytes is not None:
            return self.cache_config.kv_cache_memory_bytes
        if self.device.type == "cuda":
            return self._profile_gpu_memory()
        budget = int(free_memory_bytes() * CPU_KV_CACHE_MEMORY_SHARE)
        return min(budget, self._largest_useful_kv_cache())

    def _largest_useful_kv_cache(self) -> int:
        scheduler_config = self.vllm_config.scheduler_config
        blocks_per_request = -(-self.model_runner.max_model_len // self.cache_config.block_size)
        num_blocks = scheduler_config.max_num_seqs * blocks_per_request + 1  # and the null block
        num_layers = self.vllm_config.model_config.get_num_layers()
        return KVCacheConfig(num_blocks, num_layers, self.get_kv_cache_spec()).size_bytes

    def _profile_gpu_memory(self) -> int:
        """Measure the peak of the largest step, with the weights loaded.

        Raises:
            VLLMValidationError: the step does not fit, or leaves nothing for the KV cache.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self.model_runner.profile_run()
        except torch.OutOfMemoryError as e:
            raise VLLMValidationError(
                f"A step of max_num_batched_tokens={self.model_runner.max_num_tokens} does not fit "
                f"on {self.device} beside the weights; lower max_num_batched_tokens.",
                parameter="max_num_batched_tokens",
                value=self.model_runner.max_num_tokens,
            ) from e
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        try:
            graphs = self.model_runner.profile_cudagraph_memory()
        except torch.OutOfMemoryError as e:
            raise self._graphs_do_not_fit() from e
        torch.cuda.empty_cache()
        # What the driver and libraries took since init_device, which torch's allocator does not
        # see.
        free, _ = torch.cuda.mem_get_info(self.device)
        used = self.init_free_memory - free
        non_torch = max(used - torch.cuda.memory_reserved(self.device), 0)
        available = self.requested_memory - peak - non_torch - graphs
        if available <= 0:
            utilization = self.cache_config.gpu_memory_utilization
            raise VLLMValidationError(
                f"Weights, activations and CUDA graphs take "
                f"{(peak + non_torch + graphs) / GIB:.2f} GiB, all of the "
                f"{self.requested_memory / GIB:.2f} GiB that gpu_memory_utilization={utilization} "
                "allows, so nothing is left for the KV cache; raise it.",
                parameter="gpu_memory_utilization",
                value=utilization,
            )
        return available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache.

        Raises:
            VLLMValidationError: it does not fit.
        """
        try:
            self.model_runner.initialize_kv_cache(kv_cache_config)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            if not isinstance(e, torch.OutOfMemoryError) and "memory" not in str(e):
                raise
            on_gpu = self.device.type == "cuda"
            knob = "gpu_memory_utilization" if on_gpu else "kv_cache_memory_bytes"
            raise VLLMValidationError(
                f"A KV cache of {kv_cache_config.size_bytes / GIB:.2f} GiB does not fit in memory "
                f"on {self.device}; lower {knob} (or num_gpu_blocks_override, if you set it).",
                parameter=knob,
            ) from e

    def compile_or_warm_up_model(self) -> None:
        """Record the CUDA graphs, if there are to be any.

        Raises:
            VLLMValidationError: they do not fit beside the KV cache.
        """
        try:
            self.model_runner.capture_model()
        except torch.OutOfMemoryError as e:
            raise self._graphs_do_not_fit() from e

    def _graphs_do_not_fit(self) -> VLLMValidationError:
        return VLLMValidationError(
            f"The CUDA graphs do not fit on {self.device} beside weights and KV cache; lower "
            "gpu_memory_utilization or max_cudagraph_capture_size, or set enforce_eager.",
            parameter="gpu_memory_utilization",
            value=self.cache_config.gpu_memory_utilization,
        )

    def reset(self) -> None:
        """Forget every request, after a step that failed."""
        self.model_runner.reset()

    def shutdown(self) -> None:
        """Give the memory back."""
        self.model_runner.kv_caches.clear()
        del self.model_runner
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Run one step: to its end, or with async scheduling until all of it is under way."""
        output = self.model_runner.execute_model(scheduler_output)
        return self.model_runner.sample_tokens() if output is None else output


def free_memory_bytes() -> int:
    """Memory that this process may still take without swapping.

    Linux: what /proc/meminfo calls available, or what a container's limit (cgroup v2) leaves, if
    less. Elsewhere (macOS has no such figure in Python's library): half of the physical memory.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 0
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max": none
        available = min(available, limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(available, 0)
