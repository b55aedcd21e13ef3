"""InputBatch: the running requests as rows of arrays that persist from step to step.

Two steps in a row mostly run the same requests, so the runner does not build its inputs anew: each
request keeps a row in preallocated arrays, a step only changes what the scheduler says has changed,
and the model's inputs are then gathered from the rows by a few numpy operations.

Upstream: vllm/v1/worker/gpu_input_batch.py (0.23.0)
Left out: LoRA, pooling, multimodal inputs, prompt embeddings, speculative tokens, swap_states (no
backend here asks for another row order). Upstream's sets of request ids that use a sampling step
(top_p_reqs and so on) are array comparisons here, and its per-request torch.Generators are a column
of seeds (see SamplingMetadata).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams, SamplingType
from nanovllm.v1.outputs import LogprobsTensors
from nanovllm.v1.sample.logits_processor import (
    BatchUpdateBuilder,
    LogitsProcessors,
    MoveDirectionality,
)
from nanovllm.v1.sample.metadata import UNSEEDED, SamplingMetadata, encode_seed
from nanovllm.v1.utils import CpuGpuBuffer, async_tensor_h2d
from nanovllm.v1.worker.block_table import BlockTable


@dataclass
class CachedRequestState:
    """What the runner remembers of a request, whether it is in the batch or not.

    It lives from the step that first schedules the request to the one that reports it finished, so
    a preempted request can come back without its prompt being sent again.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]  # this object's own list, not the scheduler's
    num_computed_tokens: int
    # One list for the request's whole life: logits processors and penalties hold references to it.
    output_token_ids: list[int] = field(default_factory=list)
    # Prompt logprobs of the chunks done so far; None before the first and after the last.
    in_progress_prompt_logprobs_cpu: LogprobsTensors | None = None
    # [num_prompt_tokens, hidden_size] on the host: the prompt's embeddings, its ids all 0.
    prompt_embeds: torch.Tensor | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what has been sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class InputBatch:
    """One row a request; row i of every array below belongs to req_ids[i].

                    token_ids_cpu[i]             num_prompt  num_tokens  num_computed  block_table
        row 0  "a"  p p p p p p o o o . . . .        6           9            8          7  2  9
        row 1  "b"  p p p o . . . . . . . . .        3           4            3          4
        row 2  "c"  p p p p p p p p p p p . .       11          11            4          1  5  6
                    prompt, outputs, free

    "a" and "b" compute their last known token next and sample the one after it; "c" is inside its
    prompt.

    Within a step, in this order (the runner's _update_states does it):

        remove_request    frees rows:        [a, -, c, -, e]
        add_request       fills the lowest:  [a, f, c, -, e]
        condense          moves the highest: [a, f, c, e]        rows are dense again
        refresh_metadata  tells the logits processors, rebuilds sampling_metadata

    Invariants between steps:
    - Rows 0..num_reqs-1 are in use, no other; req_id_to_index[req_ids[i]] == i.
    - num_computed_tokens <= num_tokens_no_spec, and token_ids_cpu[i, :num_tokens_no_spec[i]] are
      the request's known tokens. What lies behind them in the row is stale.
    - req_output_token_ids[i] *is* the request's own list, never a copy.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
        pin_memory: bool,
        vocab_size: int,
        block_size: int,
        logitsprocs: LogitsProcessors,
        block_table: BlockTable | None = None,
    ) -> None:
        """
        Args:
            block_table: an empty one to take over, of the same sizes; None: a new one.
        """
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.device = device
        self.pin_memory = pin_memory
        self.vocab_size = vocab_size

        # None marks a hole, between remove_request and condense only.
        self._req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self.req_output_token_ids: list[list[int] | None] = []

        # Never copied to the device whole: a step gathers what it computes.
        self.token_ids_cpu = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens_cpu = np.zeros(max_num_reqs, dtype=np.int32)
        if block_table is None:
            block_table = BlockTable(
                block_size,
                max_num_reqs,
                -(-max_model_len // block_size),
                max_num_batched_tokens,
                pin_memory,
                device,
            )
        self.block_table = block_table

        # Sampling parameters. A row whose value switches a step off (top_p 1, penalty 0 ...) costs
        # nothing: the step runs only if some row needs it.
        self.temperature = self._make_column(torch.float32)
        self.top_p = self._make_column(torch.float32)
        self.top_k = self._make_column(torch.int32)
        self.frequency_penalties = self._make_column(torch.float32)
        self.presence_penalties = self._make_column(torch.float32)
        self.repetition_penalties = self._make_column(torch.float32)
        self.seeds = self._make_column(torch.int64)
        # Async scheduling: the row of the last step's samples that holds this row's newest token,
        # -1 if it has none there. Written by AsyncGPUModelRunner.
        self.prev_rows = np.full(max_num_reqs, -1, dtype=np.int64)
        # Every array with one number a row, for condense to move.
        self._columns: tuple[np.ndarray, ...] = (
            self.num_tokens_no_spec,
            self.num_prompt_tokens,
            self.num_computed_tokens_cpu,
            self.temperature.np,
            self.top_p.np,
            self.top_k.np,
            self.frequency_penalties.np,
            self.presence_penalties.np,
            self.repetition_penalties.np,
            self.seeds.np,
            self.prev_rows,
        )

        self.num_logprobs: dict[str, int] = {}  # req_id -> top logprobs wanted
        self.has_allowed_token_ids: set[str] = set()
        # [max_num_reqs, vocab_size] bool, True = forbidden; made when a request first needs it.
        self.allowed_token_ids_mask: CpuGpuBuffer | None = None
        self.bad_words_token_ids: dict[int, list[list[int]]] = {}  # row -> forbidden sequences

        # What changed since the last refresh_metadata.
        self.batch_update_builder = BatchUpdateBuilder()
        self.logitsprocs = logitsprocs
        self.sampling_metadata = self._make_sampling_metadata()

    def _make_column(self, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(
            self.max_num_reqs, dtype=dtype, device=self.device, pin_memory=self.pin_memory
        )

    # ---- rows ----

    @property
    def req_ids(self) -> list[str]:
        """Request ids in row order. Holes exist only while the batch is being updated."""
        return cast(list[str], self._req_ids)

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def add_request(self, request: CachedRequestState) -> int:
        """Give `request` the lowest free row and copy its state there. Returns the row."""
        req_index = self._register_add_request(request)
        if req_index == len(self._req_ids):
            self._req_ids.append(request.req_id)
            self.req_output_token_ids.append(request.output_token_ids)
        else:
            self._req_ids[req_index] = request.req_id
            self.req_output_token_ids[req_index] = request.output_token_ids
        self.req_id_to_index[request.req_id] = req_index

        num_prompt_tokens, num_tokens = request.num_prompt_tokens, request.num_tokens
        row = self.token_ids_cpu[req_index]
        row[:num_prompt_tokens] = request.prompt_token_ids
        row[num_prompt_tokens:num_tokens] = request.output_token_ids
        self.num_prompt_tokens[req_index] = num_prompt_tokens
        self.num_tokens_no_spec[req_index] = num_tokens
        self.num_computed_tokens_cpu[req_index] = request.num_computed_tokens
        self.prev_rows[req_index] = -1
        self.block_table.add_row(request.block_ids, req_index)
        self._add_sampling_params(req_index, request.req_id, request.sampling_params)
        return req_index

    def _register_add_request(self, request: CachedRequestState) -> int:
        """Choose the row (a hole if there is one, else the end) and note it for the processors."""
        req_index = self.batch_update_builder.pop_removed()
        if req_index is None:
            req_index = self.num_reqs
        assert req_index < self.max_num_reqs, "the scheduler runs at most max_num_seqs requests"
        self.batch_update_builder.added.append(
            (
                req_index,
                request.sampling_params,
                request.prompt_token_ids,
                request.output_token_ids,
            )
        )
        return req_index

    def _add_sampling_params(self, req_index: int, req_id: str, params: SamplingParams) -> None:
        greedy = params.sampling_type == SamplingType.GREEDY
        self.temperature.np[req_index] = 0.0 if greedy else params.temperature
        self.top_p.np[req_index] = params.top_p
        # 0 and -1 mean "all": the whole vocabulary, so that a mixed batch needs no special case.
        top_k = params.top_k
        self.top_k.np[req_index] = top_k if 0 < top_k < self.vocab_size else self.vocab_size
        self.frequency_penalties.np[req_index] = params.frequency_penalty
        self.presence_penalties.np[req_index] = params.presence_penalty
        self.repetition_penalties.np[req_index] = params.repetition_penalty
        self.seeds.np[req_index] = encode_seed(params.seed)
        if params.logprobs is not None:
            self.num_logprobs[req_id] = (
                self.vocab_size if params.logprobs == -1 else params.logprobs
            )
        if params.allowed_token_ids:
            self._add_allowed_token_ids(req_index, req_id, params.allowed_token_ids)
        if params.bad_words_token_ids:
            self.bad_words_token_ids[req_index] = params.bad_words_token_ids

    def _add_allowed_token_ids(self, req_index: int, req_id: str, allowed: list[int]) -> None:
        if self.allowed_token_ids_mask is None:
            self.allowed_token_ids_mask = CpuGpuBuffer(
                self.max_num_reqs,
                self.vocab_size,
                dtype=torch.bool,
                device=self.device,
                pin_memory=self.pin_memory,
            )
        self.has_allowed_token_ids.add(req_id)
        self.allowed_token_ids_mask.np[req_index] = True
        self.allowed_token_ids_mask.np[req_index, allowed] = False

    def remove_request(self, req_id: str) -> int | None:
        """Free the row of `req_id` and return it; None if the request is not in the batch.

        All removals of a step come before its first add_request, and condense() must follow.
        """
        req_index = self.req_id_to_index.pop(req_id, None)
        if req_index is None:
            return None
        self.batch_update_builder.removed_append(req_index)
        self._req_ids[req_index] = None
        self.req_output_token_ids[req_index] = None
        self.block_table.clear_row(req_index)
        self.num_logprobs.pop(req_id, None)
        self.bad_words_token_ids.pop(req_index, None)
        if req_id in self.has_allowed_token_ids:
            self.has_allowed_token_ids.remove(req_id)
            assert self.allowed_token_ids_mask is not None
            self.allowed_token_ids_mask.np[req_index] = False
        return req_index

    def condense(self) -> None:
        """Move the highest rows into the remaining holes, so that rows are 0..num_reqs-1 again."""
        empty_req_indices = self.batch_update_builder.removed  # descending
        if not empty_req_indices:
            return
        last_req_index = len(self._req_ids) - 1
        while empty_req_indices:
            # The highest row in use ...
            while last_req_index >= 0 and self._req_ids[last_req_index] is None:
                last_req_index -= 1
            # ... goes to the lowest hole, unless all holes lie behind it.
            empty_index = self.batch_update_builder.peek_removed()
            assert empty_index is not None
            if empty_index >= last_req_index:
                break
            self.batch_update_builder.pop_removed()
            self._move_row(last_req_index, empty_index)
        # The holes left are the end of the lists. They stay in `removed`, for the processors.
        del self._req_ids[self.num_reqs :]
        del self.req_output_token_ids[self.num_reqs :]

    def _move_row(self, src: int, tgt: int) -> None:
        """Move the request of row `src` to the hole `tgt`; `src` becomes a hole."""
        req_id = self._req_ids[src]
        assert req_id is not None and self._req_ids[tgt] is None
        self._req_ids[tgt], self._req_ids[src] = req_id, None
        self.req_output_token_ids[tgt] = self.req_output_token_ids[src]
        self.req_output_token_ids[src] = None
        self.req_id_to_index[req_id] = tgt

        num_tokens = self.num_tokens_no_spec[src]
        self.token_ids_cpu[tgt, :num_tokens] = self.token_ids_cpu[src, :num_tokens]
        for column in self._columns:
            column[tgt] = column[src]
        self.block_table.move_row(src, tgt)
        if self.allowed_token_ids_mask is not None:
            self.allowed_token_ids_mask.np[tgt] = self.allowed_token_ids_mask.np[src]
            self.allowed_token_ids_mask.np[src] = False
        if src in self.bad_words_token_ids:
            self.bad_words_token_ids[tgt] = self.bad_words_token_ids.pop(src)
        self.batch_update_builder.moved.append((src, tgt, MoveDirectionality.UNIDIRECTIONAL))

    # ---- sampling metadata ----

    def refresh_metadata(self) -> None:
        """Tell the logits processors what changed; rebuild `sampling_metadata` only if rows did.

        The processors are called even when nothing changed: some (min_tokens) watch the outputs
        grow.
        """
        batch_update = self.batch_update_builder.get_and_reset(self.num_reqs)
        for processor in self.logitsprocs.all:
            processor.update_state(batch_update)
        if batch_update is not None:
            self.sampling_metadata = self._make_sampling_metadata()

    def _make_sampling_metadata(self) -> SamplingMetadata:
        """Describe the rows to the sampler, sending to the device only what some row needs."""
        n = self.num_reqs
        seeded = bool((self.seeds.np[:n] != UNSEEDED).any())
        needs_output_token_ids = not self.no_penalties or bool(self.bad_words_token_ids)
        penalties = (
            self.frequency_penalties,
            self.presence_penalties,
            self.repetition_penalties,
        )
        if not self.no_penalties:
            for buffer in penalties:
                buffer.copy_to_gpu(n)
        frequency, presence, repetition = (buffer.gpu[:n] for buffer in penalties)
        return SamplingMetadata(
            temperature=None if self.all_greedy else self.temperature.copy_to_gpu(n),
            all_greedy=self.all_greedy,
            all_random=self.all_random,
            top_p=None if self.no_top_p else self.top_p.copy_to_gpu(n),
            top_k=None if self.no_top_k else self.top_k.copy_to_gpu(n),
            seeds=self.seeds.copy_to_gpu(n) if seeded else None,
            positions=None,  # differs each step: the runner's _prepare_inputs sets it
            max_num_logprobs=self.max_num_logprobs,
            no_penalties=self.no_penalties,
            prompt_token_ids=None if self.no_penalties else self._make_prompt_token_ids_tensor(),
            frequency_penalties=frequency,
            presence_penalties=presence,
            repetition_penalties=repetition,
            output_token_ids=(
                cast(list[list[int]], self.req_output_token_ids) if needs_output_token_ids else []
            ),
            allowed_token_ids_mask=(
                self.allowed_token_ids_mask.copy_to_gpu(n)
                if self.allowed_token_ids_mask is not None and self.has_allowed_token_ids
                else None
            ),
            bad_words_token_ids=self.bad_words_token_ids,
            logitsprocs=self.logitsprocs,
        )

    def _make_prompt_token_ids_tensor(self) -> torch.Tensor:
        """Prompts for the penalties: [num_reqs, max_prompt_len] int64, padded with vocab_size,
        which is no token's id."""
        num_prompt_tokens = self.num_prompt_tokens[: self.num_reqs, None]
        columns = np.arange(num_prompt_tokens.max())
        prompt_token_ids = np.where(
            columns < num_prompt_tokens,
            self.token_ids_cpu[: self.num_reqs, : len(columns)],
            self.vocab_size,
        )
        return async_tensor_h2d(torch.from_numpy(prompt_token_ids.astype(np.int64)), self.device)

    @property
    def all_greedy(self) -> bool:
        return not self.temperature.np[: self.num_reqs].any()

    @property
    def all_random(self) -> bool:
        return bool(self.temperature.np[: self.num_reqs].all())

    @property
    def no_top_p(self) -> bool:
        return bool((self.top_p.np[: self.num_reqs] >= 1).all())

    @property
    def no_top_k(self) -> bool:
        return bool((self.top_k.np[: self.num_reqs] == self.vocab_size).all())

    @property
    def no_penalties(self) -> bool:
        n = self.num_reqs
        return not (
            self.frequency_penalties.np[:n].any()
            or self.presence_penalties.np[:n].any()
            or (self.repetition_penalties.np[:n] != 1).any()
        )

    @property
    def max_num_logprobs(self) -> int | None:
        return max(self.num_logprobs.values(), default=None)
