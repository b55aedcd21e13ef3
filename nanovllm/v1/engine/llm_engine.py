"""LLMEngine: the whole engine behind add_request and step.

    add_request   InputProcessor: prompt -> EngineCoreRequest -> EngineCore
    step          EngineCore: one step -> EngineCoreOutputs -> OutputProcessor: RequestOutputs

Upstream: vllm/v1/engine/llm_engine.py (0.23.0)
Left out: data parallelism, statistics loggers, profiling, sleep mode, LoRA, collective RPC.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from nanovllm import __version__
from nanovllm.engine.arg_utils import EngineArgs, UsageContext
from nanovllm.inputs import PromptType
from nanovllm.logger import configure_logging
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine import EngineCoreRequest
from nanovllm.v1.engine.core_client import make_client
from nanovllm.v1.engine.input_processor import InputProcessor, get_prompt_text
from nanovllm.v1.engine.output_processor import OutputProcessor
from nanovllm.v1.engine.parallel_sampling import ParentRequest, split_request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)

ENABLE_MULTIPROCESSING = "NANOVLLM_ENABLE_V1_MULTIPROCESSING"


class LLMEngine:
    """Drive it with `while engine.has_unfinished_requests(): engine.step()`.

    A request is known to the output processor and to the core, or to neither: whatever goes wrong,
    they are brought back into step before the error is raised.
    """

    def __init__(
        self, vllm_config: VllmConfig, log_stats: bool = True, multiprocess_mode: bool = False
    ) -> None:
        """Load tokenizer and model, allocate the KV cache.

        Args:
            log_stats: keep the moments that `RequestOutput.metrics` shows.
            multiprocess_mode: run the core in a process of its own (needs msgspec and pyzmq).

        Raises:
            VLLMValidationError: the model or the settings cannot be used.
        """
        configure_logging()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.input_processor = InputProcessor(vllm_config)
        self.output_processor = OutputProcessor(self.input_processor.tokenizer, log_stats)
        self.multiprocess_mode = multiprocess_mode
        self.engine_core = make_client(multiprocess_mode, vllm_config, log_stats)
        self._log_environment()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
    ) -> LLMEngine:
        """An engine from a user's arguments; `usage_context` decides the batch size's defaults.

        With NANOVLLM_ENABLE_V1_MULTIPROCESSING=1 in the environment the core gets a process of its
        own. (Upstream's variable begins with VLLM, and is on by default.)
        """
        vllm_config = engine_args.create_engine_config(usage_context)
        return cls(
            vllm_config,
            log_stats=not engine_args.disable_log_stats,
            multiprocess_mode=os.environ.get(ENABLE_MULTIPROCESSING) == "1",
        )

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt.

        Args:
            request_id: any string no unfinished request bears; outputs carry it.
            prompt: text, token ids or a dict of them (nanovllm/inputs.py).
            arrival_time: seconds, as `time.time()`; None: now.
            priority: with scheduling_policy="priority": the lower, the sooner.

        Returns:
            `request_id`.

        Raises:
            VLLMValidationError: the request can never run as given; the engine is as it was.
        """
        request = self.input_processor.process_inputs(
            request_id, prompt, params, arrival_time, priority
        )
        if self.multiprocess_mode:
            self.input_processor.assign_request_id(request)
        prompt_text = get_prompt_text(prompt)
        parent_req, core_requests = split_request(request)
        for index, core_request in enumerate(core_requests):
            try:
                self._add_request(core_request, prompt_text, parent_req, index)
            except BaseException:
                if index > 0:  # else the id is somebody else's
                    self.abort_request([request_id])
                raise
        return request_id

    def _add_request(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        parent_req: ParentRequest | None,
        index: int,
    ) -> None:
        """Enter one (child) request on both sides, or the whole of it on neither."""
        self.output_processor.add_request(request, prompt_text, parent_req, index)
        try:
            self.engine_core.add_request(request)
        except BaseException:
            self.abort_request([request.external_req_id or request.request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step of the core and hand out what it produced.

        If the step fails, every request is dropped and the error raised: the core has ended them
        all.
        """
        try:
            # 1) Schedule, run the model, sample.
            outputs = self.engine_core.get_output()
            # 2) Detokenize, look for stop strings, make RequestOutputs.
            processed = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp)
            # 3) Tell the core which requests a stop string has ended.
            self.engine_core.abort_requests(processed.reqs_to_abort)
        except BaseException:
            self.abort_request(list(self.output_processor.external_req_ids))
            raise
        return processed.request_outputs

    def abort_request(self, request_ids: list[str]) -> None:
        """Drop requests and free what they hold; no output follows. Unknown ids are ignored."""
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids))

    def get_num_unfinished_requests(self) -> int:
        """Requests in the engine, each of n samples counted."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return self.engine_core.reset_prefix_cache()

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
        """Let go of the model and the KV cache; the engine cannot be used afterwards."""
        self.engine_core.shutdown()

    def _log_environment(self) -> None:
        """Two lines: what runs where, and how much the KV cache holds."""
        import torch

        from nanovllm.v1.attention.selector import choose_attn_backend

        device = self.vllm_config.device_config.device
        hardware = (
            f"{torch.get_num_threads()} threads"
            if self.vllm_config.device_config.device_type == "cpu"
            else torch.cuda.get_device_name(device)
        )
        logger.info(
            "nanovllm %s, torch %s: %s (%s) on %s (%s), %s, attention %s",
            __version__,
            torch.__version__,
            self.model_config.served_model_name,
            self.model_config.architecture,
            device,
            hardware,
            str(self.model_config.torch_dtype).removeprefix("torch."),
            choose_attn_backend(self.vllm_config)[0].get_name(),
        )
        cache_config = self.vllm_config.cache_config
        assert cache_config.num_gpu_blocks is not None  # set by EngineCore
        assert self.model_config.max_model_len is not None
        # Block 0 is the null block and never holds tokens.
        num_blocks = cache_config.num_gpu_blocks - 1
        num_tokens = num_blocks * cache_config.block_size
        logger.info(
            "KV cache: %s blocks of %d tokens = %s tokens, %.1f requests of max_model_len %s; "
            "prefix cache: %s",
            f"{num_blocks:,}",
            cache_config.block_size,
            f"{num_tokens:,}",
            num_tokens / self.model_config.max_model_len,
            f"{self.model_config.max_model_len:,}",
            cache_config.prefix_cache_backend if cache_config.enable_prefix_caching else "off",
        )
