"""GPUModelRunner: from the scheduler's plan to sampled tokens, on any device.

The scheduler says, in terms of requests, what one step computes. The runner keeps each request as a
row of an InputBatch, packs the scheduled tokens of all rows into one row of tokens, runs the model
over them and samples one token for every request whose known tokens are then all computed.

Upstream: vllm/v1/worker/gpu_model_runner.py (0.23.0)
Left out: multimodal inputs, LoRA, pooling, speculative decoding, several KV-cache groups, pipeline
parallelism, structured outputs. What a GPU adds stands in files of its own: CUDA graphs in
v1/cudagraph_dispatcher.py, asynchronous scheduling in async_gpu_model_runner.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanovllm.model_executor.model_loader.default_loader import get_model
from nanovllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from nanovllm.v1.attention.selector import get_attn_backend
from nanovllm.v1.cudagraph_dispatcher import CudagraphDispatcher, get_cudagraph_capture_sizes
from nanovllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from nanovllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from nanovllm.v1.sample.logits_processor import build_logitsprocs
from nanovllm.v1.sample.sampler import Sampler
from nanovllm.v1.utils import CpuGpuBuffer
from nanovllm.v1.worker.block_table import PAD_SLOT_ID, BlockTable
from nanovllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

# Prompt logprobs need a row of the whole vocabulary for every prompt token; so many rows at a time.
PROMPT_LOGPROBS_ROWS = 256


class ExecuteModelState(NamedTuple):
    """What execute_model leaves for sample_tokens."""

    scheduler_output: SchedulerOutput
    hidden_states: torch.Tensor  # [num_tokens, hidden_size]
    logits_indices: torch.Tensor  # [num_reqs] int64, each request's last token of the step


class GPUModelRunner:
    """The worker's half of a step.

        SchedulerOutput
           │ _update_states
           ▼
        requests: every unfinished request seen so far         input_batch: the rows of this step
        {"a": state, "b": state, "c": state (preempted)}       [ a | b ]
                                                                  │ _prepare_inputs
           packed, for tokens scheduled {"a": 4, "b": 1}          ▼
           input_ids         a0 a1 a2 a3 b7
           positions          0  1  2  3  7
           slot_mapping      64 65 66 67 39      where each token's key and value go
           query_start_loc    0          4  5    request i: tokens [i] to [i + 1]
           seq_lens           4  8               context, this step's tokens included
           logits_indices     3  4               the last token of each request
                                                                  │ execute_model, sample_tokens
                                                                  ▼
                                                         ModelRunnerOutput, in row order

    Invariants:
    - How far a request has come is what the scheduler says (num_computed_tokens); the runner never
      counts on its own, so a preemption or a prefix-cache hit needs no special case here.
    - A request samples exactly when the step computes its last known token. A chunk that ends
      inside the prompt (or inside recomputed outputs) has a logits row too, and what is sampled
      there is dropped.
    - The runner appends the tokens that it samples to its own copy; the scheduler does not send
      them back.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.device = device
        self.pin_memory = device.type == "cuda"

        model_config, scheduler_config = vllm_config.model_config, vllm_config.scheduler_config
        assert model_config.max_model_len is not None
        self.max_model_len = model_config.max_model_len
        self.max_num_reqs = scheduler_config.max_num_seqs
        self.max_num_tokens = scheduler_config.max_num_batched_tokens

        self.attn_backend = get_attn_backend(vllm_config)
        self.attn_metadata_builder = self.attn_backend.get_builder_cls()(
            self.cache_config.block_size,
            model_config.get_num_attention_heads(),
            model_config.get_num_kv_heads(),
            model_config.get_head_size(),
            max_num_reqs=self.max_num_reqs,
            device=device,
            dtype=model_config.torch_dtype,
        )
        self.sampler = Sampler(seed=model_config.seed)
        self.model: torch.nn.Module
        self.kv_caches: list[torch.Tensor] = []  # one a layer, AttentionBackend.get_kv_cache_shape

        self.requests: dict[str, CachedRequestState] = {}
        # req_id -> prompt logprobs wanted; gone when the prompt is done.
        self.num_prompt_logprobs: dict[str, int] = {}
        self.input_batch = self._make_input_batch()

        # The model's inputs. Their addresses never change, which is what CUDA graphs ask for.
        self.input_ids = self._make_buffer(self.max_num_tokens, dtype=torch.int64)
        self.positions = self._make_buffer(self.max_num_tokens, dtype=torch.int64)
        self.query_start_loc = self._make_buffer(self.max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = self._make_buffer(self.max_num_reqs, dtype=torch.int32)
        self.sampling_positions = self._make_buffer(self.max_num_reqs, dtype=torch.int64)
        self.logits_indices = self._make_buffer(self.max_num_reqs, dtype=torch.int64)
        # True: the row's known tokens are not all computed after this step.
        self.discard_request_mask = np.zeros(self.max_num_reqs, dtype=bool)
        self.execute_model_state: ExecuteModelState | None = None
        self.prompt_embeds_reqs: set[str] = set()  # unfinished requests that have embeddings
        # (index of the first among the step's packed tokens, embeddings in place of their ids')
        self.scheduled_embeds: list[tuple[int, torch.Tensor]] = []

        capture_sizes: list[int] = []
        can_capture = self.attn_metadata_builder.cudagraph_support is not AttentionCGSupport.NEVER
        if device.type == "cuda" and can_capture and not model_config.enforce_eager:
            capture_sizes = get_cudagraph_capture_sizes(
                self.max_num_reqs, vllm_config.max_cudagraph_capture_size
            )
        self.cudagraph_dispatcher = CudagraphDispatcher(capture_sizes)

    def _make_buffer(self, size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(size, dtype=dtype, device=self.device, pin_memory=self.pin_memory)

    def _make_input_batch(self, block_table: BlockTable | None = None) -> InputBatch:
        return InputBatch(
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_tokens,
            device=self.device,
            pin_memory=self.pin_memory,
            vocab_size=self.model_config.get_vocab_size(),
            block_size=self.cache_config.block_size,
            logitsprocs=build_logitsprocs(self.max_num_reqs, self.device),
            block_table=block_table,
        )

    def reset(self) -> None:
        """Forget every request: a step has failed, perhaps half way through the rows."""
        self.requests.clear()
        self.num_prompt_logprobs.clear()
        self.prompt_embeds_reqs.clear()
        self.scheduled_embeds.clear()
        # The block table stays: CUDA graphs have recorded its address, and that of the slots.
        block_table = self.input_batch.block_table
        block_table.clear()
        self.input_batch = self._make_input_batch(block_table)
        self.execute_model_state = None

    # ---- set-up ----

    def load_model(self) -> None:
        self.model = get_model(self.vllm_config, self.attn_backend, self.device)

    def get_kv_cache_spec(self) -> FullAttentionSpec:
        """What one layer keeps of a token; every layer keeps the same."""
        return FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.torch_dtype,
        )

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the paged KV cache, uninitialised.

        Nothing is cleared, now or when a block changes hands: attention reads only slots that the
        request, or the one whose prefix it shares, has written. On a CPU the operating system
        provides memory page by page when it is first written, so a generous cache costs nothing
        until used.
        """
        spec = kv_cache_config.kv_cache_spec
        shape = self.attn_backend.get_kv_cache_shape(
            kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        self.kv_caches = [
            torch.empty(shape, dtype=spec.dtype, device=self.device)
            for _ in range(kv_cache_config.num_layers)
        ]

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Run the largest step there can be, so that the peak of memory use can be read off.

        The batch is made of empty rows: token 0 everywhere, every block table entry the null block.
        It needs a KV cache of just that block, which is thrown away.
        """
        assert self.input_batch.num_reqs == 0
        spec = self.get_kv_cache_spec()
        self.initialize_kv_cache(KVCacheConfig(1, self.model_config.get_num_layers(), spec))
        num_reqs = min(self.max_num_reqs, self.max_num_tokens)
        num_tokens = min(self.max_num_tokens, num_reqs * self.max_model_len)
        num_scheduled_tokens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
        num_scheduled_tokens[: num_tokens % num_reqs] += 1

        logits_indices, common_attn_metadata = self._prepare_inputs(num_scheduled_tokens)
        hidden_states = self._model_forward(common_attn_metadata)
        logits = self.model.compute_logits(hidden_states[logits_indices])  # type: ignore[operator]
        self.sampler.compute_logprobs(logits)
        self.kv_caches = []

    def profile_cudagraph_memory(self) -> int:
        """Bytes that the CUDA graphs will take.

        Two are recorded for trial, with a KV cache of just the null block. The first brings the
        pool, in which all others find room; what the second takes, each further one takes too.
        """
        sizes = self.cudagraph_dispatcher.capture_sizes
        if not sizes:
            return 0
        config = KVCacheConfig(1, self.model_config.get_num_layers(), self.get_kv_cache_spec())
        self.initialize_kv_cache(config)
        memory_used = self._capture(CudagraphDispatcher(sizes[-2:]))
        self.kv_caches = []
        return memory_used[0] + memory_used[-1] * (len(sizes) - 1)

    def capture_model(self) -> None:
        """Record the CUDA graphs. The KV cache must be there, for its address is recorded too."""
        self._capture(self.cudagraph_dispatcher)

    @torch.inference_mode()
    def _capture(self, cudagraph_dispatcher: CudagraphDispatcher) -> list[int]:
        """Record on a batch of padding; bytes that each graph took."""

        def model_forward(size: int) -> torch.Tensor:
            return self._model_forward_eager(size, attn_metadata[size])

        sizes = cudagraph_dispatcher.capture_sizes
        if not sizes:
            return []
        # Padding, as a batch that is smaller than its graph has it; and context lengths that stand
        # for the longest there can be.
        self.seq_lens.np[:] = 0
        self.query_start_loc.np[:] = 0
        self.input_ids.np[:] = self.positions.np[:] = 0
        slot_mapping = self.input_batch.block_table.slot_mapping
        slot_mapping.np[:] = PAD_SLOT_ID
        for buffer in (self.seq_lens, self.query_start_loc, self.input_ids, self.positions):
            buffer.copy_to_gpu()
        slot_mapping.copy_to_gpu()
        attn_metadata = {
            size: self.attn_metadata_builder.build_for_cudagraph_capture(
                self._common_attn_metadata(size, size, max_query_len=1)
            )
            for size in sizes
        }
        memory_used = cudagraph_dispatcher.capture(model_forward)
        torch.cuda.synchronize(self.device)
        return memory_used

    def _common_attn_metadata(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int | None = None
    ) -> CommonAttentionMetadata:
        """The batch that the persistent buffers hold; max_seq_len None: as long as may be."""
        block_table = self.input_batch.block_table
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc.gpu[: num_reqs + 1],
            query_start_loc_cpu=self.query_start_loc.cpu[: num_reqs + 1],
            seq_lens=self.seq_lens.gpu[:num_reqs],
            seq_lens_cpu=self.seq_lens.cpu[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=self.max_model_len if max_seq_len is None else max_seq_len,
            block_table_tensor=block_table.block_table.gpu[:num_reqs],
            slot_mapping=block_table.slot_mapping.gpu[:num_tokens],
        )

    # ---- one step ----

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute the scheduled tokens' hidden states and their keys and values.

        Returns:
            None: sample_tokens() must be called next. An empty output if nothing was scheduled (the
            step only told which requests have finished); then it must not.
        """
        assert self.execute_model_state is None, "sample_tokens() must be called after each step"
        self._update_states(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT

        num_scheduled_tokens = np.array(
            [scheduler_output.num_scheduled_tokens[req_id] for req_id in self.input_batch.req_ids],
            dtype=np.int32,
        )
        logits_indices, common_attn_metadata = self._prepare_inputs(num_scheduled_tokens)
        self._gather_prompt_embeds(num_scheduled_tokens)
        hidden_states = self._model_forward(common_attn_metadata)
        self.execute_model_state = ExecuteModelState(
            scheduler_output, hidden_states, logits_indices
        )
        return None

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the next token of every request that execute_model has brought up to date."""
        scheduler_output, hidden_states, sampler_output = self._sample()
        # The device is waited for here, once a step.
        sampled_token_ids = self._bookkeeping_sync(sampler_output)
        logprobs = sampler_output.logprobs_tensors
        return ModelRunnerOutput(
            # Copies: the batch goes on changing, the output belongs to the scheduler.
            req_ids=self.input_batch.req_ids.copy(),
            req_id_to_index=self.input_batch.req_id_to_index.copy(),
            sampled_token_ids=sampled_token_ids,
            logprobs=logprobs.tolists() if logprobs is not None else None,
            prompt_logprobs_dict=self._get_prompt_logprobs_dict(
                hidden_states, scheduler_output.num_scheduled_tokens
            ),
        )

    def _sample(self) -> tuple[SchedulerOutput, torch.Tensor, SamplerOutput]:
        """From the step's hidden states to its samples: (plan, hidden states, samples)."""
        assert self.execute_model_state is not None, "execute_model() comes first"
        scheduler_output, hidden_states, logits_indices = self.execute_model_state
        self.execute_model_state = None
        # A decode batch samples after every token; others only after each request's last.
        if len(hidden_states) != len(logits_indices):
            hidden_states_to_sample = hidden_states[logits_indices]
        else:
            hidden_states_to_sample = hidden_states
        logits = self.model.compute_logits(hidden_states_to_sample)  # type: ignore[operator]
        sampler_output = self.sampler(logits, self.input_batch.sampling_metadata)
        return scheduler_output, hidden_states, sampler_output

    def _model_forward(self, common_attn_metadata: CommonAttentionMetadata) -> torch.Tensor:
        """Run the model over the packed tokens: [num_tokens, hidden_size]."""
        num_tokens = common_attn_metadata.num_actual_tokens
        graph_size = self.cudagraph_dispatcher.dispatch(
            num_tokens, common_attn_metadata.max_query_len
        )
        if graph_size is not None and not self.scheduled_embeds:
            self.attn_metadata_builder.prepare_for_replay(common_attn_metadata)
            return self._replay(graph_size)[:num_tokens]
        attn_metadata = self.attn_metadata_builder.build(common_attn_metadata)
        return self._model_forward_eager(num_tokens, attn_metadata)

    def _model_forward_eager(self, num_tokens: int, attn_metadata: Any) -> torch.Tensor:
        input_ids = self.input_ids.gpu[:num_tokens]
        positions = self.positions.gpu[:num_tokens]
        if not self.scheduled_embeds:
            return self.model(input_ids, positions, self.kv_caches, attn_metadata)
        inputs_embeds = self.model.embed_input_ids(input_ids)  # type: ignore[operator]
        for start, embeds in self.scheduled_embeds:
            inputs_embeds[start : start + len(embeds)] = embeds.to(self.device)
        return self.model(input_ids, positions, self.kv_caches, attn_metadata, inputs_embeds)

    def _gather_prompt_embeds(self, num_scheduled_tokens: np.ndarray) -> None:
        """Note which of the packed tokens are prompts given by embeddings."""
        self.scheduled_embeds.clear()
        for req_id in self.prompt_embeds_reqs:
            row, request = self.input_batch.req_id_to_index.get(req_id), self.requests[req_id]
            if row is None or request.prompt_embeds is None:
                continue
            start = request.num_computed_tokens
            embeds = request.prompt_embeds[start : start + num_scheduled_tokens[row]]
            if len(embeds) > 0:  # else it is decoding
                self.scheduled_embeds.append((int(self.query_start_loc.np[row]), embeds))

    def _replay(self, size: int) -> torch.Tensor:
        return self.cudagraph_dispatcher.replay(size)

    # ---- the scheduler's plan, applied to the rows ----

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Make input_batch hold exactly the requests scheduled in this step, up to date.

        Requests that are not scheduled (preempted, or out of budget) lose their row but keep their
        state. The order matters: rows are freed before any is filled, and filled before condense.
        """
        self._remove_requests(scheduler_output)
        reqs_to_add = [
            self._add_new_request(new_req_data)
            for new_req_data in scheduler_output.scheduled_new_reqs
        ]
        reqs_to_add += self._update_cached_requests(scheduler_output.scheduled_cached_reqs)
        for request in reqs_to_add:
            self.input_batch.add_request(request)
        self.input_batch.condense()
        self.input_batch.refresh_metadata()

    def _remove_requests(self, scheduler_output: SchedulerOutput) -> None:
        # Finished ones first: an id that was aborted and used again at once is in both lists, and
        # what follows treats it as new.
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.num_prompt_logprobs.pop(req_id, None)
            self.prompt_embeds_reqs.discard(req_id)
            self.input_batch.remove_request(req_id)
        # A resumed request never keeps a row: its block table is another one now. (Our scheduler
        # does not preempt and resume within one step; upstream's can, to reset the prefix cache.)
        resumed_req_ids = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        staying = scheduler_output.num_scheduled_tokens.keys() - resumed_req_ids
        for req_id in self.input_batch.req_id_to_index.keys() - staying:
            self.input_batch.remove_request(req_id)

    def _add_new_request(self, new_req_data: NewRequestData) -> CachedRequestState:
        req_id, sampling_params = new_req_data.req_id, new_req_data.sampling_params
        request = CachedRequestState(
            req_id=req_id,
            prompt_token_ids=new_req_data.prompt_token_ids,
            sampling_params=sampling_params,
            block_ids=list(new_req_data.block_ids),
            num_computed_tokens=new_req_data.num_computed_tokens,
            prompt_embeds=new_req_data.prompt_embeds,
        )
        self.requests[req_id] = request
        if request.prompt_embeds is not None:
            self.prompt_embeds_reqs.add(req_id)
        if sampling_params.prompt_logprobs is not None:
            self.num_prompt_logprobs[req_id] = (
                self.input_batch.vocab_size
                if sampling_params.prompt_logprobs == -1
                else sampling_params.prompt_logprobs
            )
        return request

    def _update_cached_requests(self, req_data: CachedRequestData) -> list[CachedRequestState]:
        """Bring known requests up to date; return those that have no row and need one."""
        reqs_to_add = []
        for i, req_id in enumerate(req_data.req_ids):
            request = self.requests[req_id]
            request.num_computed_tokens = req_data.num_computed_tokens[i]
            new_block_ids = req_data.new_block_ids[i]
            if req_id in req_data.resumed_req_ids:
                # Preemption freed its blocks; these are others.
                request.block_ids = list(new_block_ids or [])
            elif new_block_ids:
                request.block_ids.extend(new_block_ids)

            req_index = self.input_batch.req_id_to_index.get(req_id)
            if req_index is None:
                self._restore_output_token_ids(request, req_data, req_data.num_output_tokens[i])
                reqs_to_add.append(request)
                continue
            self.input_batch.num_computed_tokens_cpu[req_index] = request.num_computed_tokens
            if new_block_ids:
                self.input_batch.block_table.append_row(new_block_ids, req_index)
        return reqs_to_add

    @staticmethod
    def _restore_output_token_ids(
        request: CachedRequestState, req_data: CachedRequestData, num_output_tokens: int
    ) -> None:
        """Take the outputs of a request without a row from the scheduler. They equal our own copy
        (upstream's runner may lack the last one with async scheduling)."""
        all_token_ids = req_data.all_token_ids.get(request.req_id)
        if all_token_ids is not None:
            num_prompt_tokens = request.num_prompt_tokens
            request.output_token_ids[:] = all_token_ids[
                num_prompt_tokens : num_prompt_tokens + num_output_tokens
            ]

    # ---- the rows, packed into the model's inputs ----

    def _prepare_inputs(
        self, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, CommonAttentionMetadata]:
        """Gather the scheduled tokens of all rows, and describe them to attention and sampler.

        Args:
            num_scheduled_tokens: [num_reqs] int32, by row.

        Returns:
            logits_indices ([num_reqs] int64, device) and the attention metadata, views of
            persistent buffers that hold until the next step.
        """
        num_reqs = len(num_scheduled_tokens)
        num_tokens = int(num_scheduled_tokens.sum())
        max_query_len = int(num_scheduled_tokens.max())
        # A batch that a CUDA graph will run is padded to the graph's size.
        graph_size = self.cudagraph_dispatcher.dispatch(num_reqs, max_query_len)
        num_tokens_padded = num_tokens if graph_size is None else graph_size
        batch = self.input_batch
        # First, so that the copy runs while the host goes on.
        batch.block_table.commit_block_table(num_reqs)

        # [4, 1] -> [0, 4, 5]
        query_start_loc = self.query_start_loc.np[: num_reqs + 1]
        np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
        # Past the end it stays constant: kernels that see padded rows need it non-decreasing.
        self.query_start_loc.np[num_reqs + 1 :] = num_tokens
        # [4, 1] -> [0, 0, 0, 0, 1]
        req_indices = np.repeat(np.arange(num_reqs), num_scheduled_tokens)
        # A token's position: what its request has computed, plus its index within the request.
        positions = self.positions.np[:num_tokens]
        positions[:] = np.arange(num_tokens)
        positions += (batch.num_computed_tokens_cpu[:num_reqs] - query_start_loc[:-1])[req_indices]
        self.input_ids.np[:num_tokens] = batch.token_ids_cpu[req_indices, positions]
        batch.block_table.compute_slot_mapping(req_indices, positions, num_tokens_padded)

        seq_lens = self.seq_lens.np[:num_reqs]
        np.add(batch.num_computed_tokens_cpu[:num_reqs], num_scheduled_tokens, out=seq_lens)
        self.seq_lens.np[num_reqs:] = 0
        np.less(
            seq_lens,
            batch.num_tokens_no_spec[:num_reqs],
            out=self.discard_request_mask[:num_reqs],
        )
        # The token sampled by a row has all of its context before it.
        self.sampling_positions.np[:num_reqs] = seq_lens
        if batch.sampling_metadata.seeds is not None:
            batch.sampling_metadata.positions = self.sampling_positions.copy_to_gpu(num_reqs)
        np.subtract(query_start_loc[1:], 1, out=self.logits_indices.np[:num_reqs])

        self.input_ids.np[num_tokens:num_tokens_padded] = 0
        self.positions.np[num_tokens:num_tokens_padded] = 0
        self._prepare_input_ids(num_tokens_padded, req_indices)
        self.positions.copy_to_gpu(num_tokens_padded)
        self.query_start_loc.copy_to_gpu()
        self.seq_lens.copy_to_gpu()
        return self.logits_indices.copy_to_gpu(num_reqs), self._common_attn_metadata(
            num_reqs, num_tokens, max_query_len, int(seq_lens.max())
        )

    def _prepare_input_ids(self, num_tokens_padded: int, req_indices: np.ndarray) -> None:
        """Send input_ids to the device. (With asynchronous scheduling a decoding request's token is
        not on the host yet: AsyncGPUModelRunner sends in its place where it will be.)"""
        self.input_ids.copy_to_gpu(num_tokens_padded)

    # ---- results ----

    def _bookkeeping_sync(self, sampler_output: SamplerOutput) -> list[list[int]]:
        """Read the sampled tokens back and append them to their requests.

        Returns:
            By row, [token], or [] where the request's known tokens are not all computed yet.
        """
        batch = self.input_batch
        sampled_token_ids: list[list[int]] = sampler_output.sampled_token_ids.tolist()
        discarded = self.discard_request_mask[: batch.num_reqs]
        for row in np.flatnonzero(discarded).tolist():
            sampled_token_ids[row].clear()

        rows = np.flatnonzero(~discarded)
        num_tokens = batch.num_tokens_no_spec[rows]
        assert (num_tokens < self.max_model_len).all(), "max_model_len ends a request"
        new_token_ids = [sampled_token_ids[row][0] for row in rows.tolist()]
        batch.token_ids_cpu[rows, num_tokens] = new_token_ids
        batch.num_tokens_no_spec[rows] += 1
        for row, token_id in zip(rows.tolist(), new_token_ids, strict=True):
            self.requests[batch.req_ids[row]].output_token_ids.append(token_id)
        return sampled_token_ids

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Logprobs of the prompt tokens that this step's hidden states predict.

        A prompt of n tokens has n - 1 of them: position i predicts token i + 1. They are collected
        chunk by chunk and handed over whole, in the step that also samples the first output token.
        (A request that wants them never takes a prefix from the cache: the cache holds no hidden
        states.)
        """
        prompt_logprobs_dict: dict[str, LogprobsTensors | None] = {}
        for req_id, num_prompt_logprobs in list(self.num_prompt_logprobs.items()):
            num_tokens = num_scheduled_tokens.get(req_id)
            if num_tokens is None:
                continue  # preempted inside its prompt
            request = self.requests[req_id]
            num_prompt_tokens = request.num_prompt_tokens
            if request.in_progress_prompt_logprobs_cpu is None:
                request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(
                    num_prompt_tokens - 1, num_prompt_logprobs + 1
                )
            logprobs = request.in_progress_prompt_logprobs_cpu
            start = request.num_computed_tokens
            end = min(start + num_tokens, num_prompt_tokens - 1)
            self._fill_prompt_logprobs(hidden_states, request, logprobs, start, end)
            if start + num_tokens >= num_prompt_tokens:
                prompt_logprobs_dict[req_id] = logprobs
                request.in_progress_prompt_logprobs_cpu = None
                del self.num_prompt_logprobs[req_id]
        return prompt_logprobs_dict

    def _fill_prompt_logprobs(
        self,
        hidden_states: torch.Tensor,
        request: CachedRequestState,
        logprobs: LogprobsTensors,
        start: int,
        end: int,
    ) -> None:
        """Fill rows start..end-1 of `logprobs`; row i is about prompt token i + 1."""
        num_prompt_logprobs = logprobs.logprobs.shape[1] - 1
        row = self.input_batch.req_id_to_index[request.req_id]
        # Position p of the request is at index p + offset of the packed tokens.
        offset = int(self.query_start_loc.np[row]) - request.num_computed_tokens
        for i in range(start, end, PROMPT_LOGPROBS_ROWS):
            rows = slice(i, min(i + PROMPT_LOGPROBS_ROWS, end))
            hidden = hidden_states[offset + rows.start : offset + rows.stop]
            logits = self.model.compute_logits(hidden)  # type: ignore[operator]
            targets = torch.tensor(
                request.prompt_token_ids[rows.start + 1 : rows.stop + 1], device=self.device
            )
            chunk = self.sampler.gather_logprobs(
                self.sampler.compute_logprobs(logits), num_prompt_logprobs, targets
            )
            for whole, part in zip(logprobs, chunk, strict=True):
                whole[rows] = part
