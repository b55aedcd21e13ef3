"""AsyncGPUModelRunner: the model runner that does not wait for the tokens it has just sampled.

With async scheduling, step n + 1 is prepared and launched while the device still works on step n.
Its input is then not known on the host: a decoding request's newest token is the one that step n is
about to sample. The host needs only to know that there is one, and where it will be:

    step n      sampled on the device       prev_sampled_token_ids   [ 17 | 4 | 99 ]
                on the host                 token_ids_cpu row 1      p p p o o -1
    step n + 1  the row moved from 1 to 0   input_ids (host)         -2             = -1 - 1
                the device resolves it      input_ids (device)        4

A negative input id -1 - r says "what row r of the last step has sampled". The tokens themselves
come to the host on a copy stream, and are put in place of the -1 when the step's output is taken
in, which is before step n + 2 is planned: so a step that is prepared finds at most one token of a
request unknown.

Upstream: vllm/v1/worker/gpu_model_runner.py (0.23.0), where both ways are one class
(`use_async_scheduling`) and the sampled tokens are scattered into the input by two index tensors.
Left out: what upstream does for speculative tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.triton_utils import tl, triton, use_triton
from nanovllm.v1.outputs import (
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from nanovllm.v1.sample.ops.penalties import make_output_matrix
from nanovllm.v1.utils import async_tensor_h2d
from nanovllm.v1.worker.gpu_input_batch import CachedRequestState
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.sample.metadata import SamplingMetadata

UNKNOWN_TOKEN_ID = -1
# Copies of sampled tokens that may be on their way or waiting to be read: one a step in the batch
# queue, and the one being started.
NUM_PINNED_COPIES = 3


class AsyncGPUModelRunnerOutput(AsyncModelRunnerOutput):
    """One step's samples on their way to the host."""

    def __init__(
        self,
        runner: AsyncGPUModelRunner,
        model_runner_output: ModelRunnerOutput,
        sampler_output: SamplerOutput,
        token_ids_cpu: torch.Tensor,
        pending: list[tuple[CachedRequestState, int] | None],
    ) -> None:
        """Start the copies.

        Args:
            token_ids_cpu: [num_reqs, 1], pinned, where the tokens will be.
            pending: by row, the request that gets the token and its index among the request's
                outputs; None: the sample is dropped.
        """
        self._runner = runner
        self._output = model_runner_output
        self._pending: list[tuple[CachedRequestState, int] | None] | None = pending
        self._token_ids_cpu = token_ids_cpu
        # Held until the copies are done: the allocator does not know of the copy stream.
        self._sampler_output: SamplerOutput | None = sampler_output
        self._logprobs, self._copied = runner.copy_to_host(sampler_output, token_ids_cpu)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, put its tokens where the -1 stood, and return its output."""
        if self._pending is not None:
            if self._copied is not None:
                self._copied.synchronize()
            token_ids: list[list[int]] = self._token_ids_cpu.tolist()
            for row, pending in enumerate(self._pending):
                if pending is None:
                    token_ids[row].clear()
                else:
                    self._runner.fill_in_token(*pending, token_ids[row][0])
            self._output.sampled_token_ids = token_ids
            if self._logprobs is not None:
                self._output.logprobs = self._logprobs.tolists()
            self._sampler_output = self._pending = None
        return self._output


class AsyncGPUModelRunner(GPUModelRunner):
    """GPUModelRunner whose sample_tokens returns before the tokens are known.

    Invariants, beside those of GPUModelRunner:
    - When a step is prepared, a token_ids_cpu entry below num_tokens_no_spec is -1 only if it is
      the last one of its row and the step before sampled it; batch.prev_rows then says in which
      row. (From this step's samples until the last step's arrive, a row may end in two.)
    - The host writes no pinned input buffer before the copies of the step before are done
      (`inputs_copied`): they may be queued behind a model that is still running.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # What the last step sampled, by row. CUDA graphs read it, so it never moves.
        self.prev_sampled_token_ids = torch.zeros(
            self.max_num_reqs, dtype=torch.int64, device=device
        )
        self._pinned_token_ids = [
            torch.zeros(self.max_num_reqs, 1, dtype=torch.int32, pin_memory=self.pin_memory)
            for _ in range(NUM_PINNED_COPIES)
        ]
        self._last_output: AsyncGPUModelRunnerOutput | None = None
        self.copy_stream: torch.cuda.Stream | None = None
        self.inputs_copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.copy_stream = torch.cuda.Stream(device)
            self.inputs_copied = torch.cuda.Event()

    def reset(self) -> None:
        super().reset()
        self._last_output = None

    # ---- one step ----

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self.inputs_copied is not None:
            self.inputs_copied.synchronize()
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:  # type: ignore[override]
        """Sample; the tokens stay on the device, and the host gets them with `get_output`."""
        scheduler_output, hidden_states, sampler_output = self._sample()
        batch, num_reqs = self.input_batch, self.input_batch.num_reqs
        self.prev_sampled_token_ids[:num_reqs] = sampler_output.sampled_token_ids.squeeze(1)
        batch.prev_rows[:num_reqs] = np.arange(num_reqs)
        prompt_logprobs_dict = self._get_prompt_logprobs_dict(
            hidden_states, scheduler_output.num_scheduled_tokens
        )
        output = ModelRunnerOutput(
            req_ids=batch.req_ids.copy(),
            req_id_to_index=batch.req_id_to_index.copy(),
            prompt_logprobs_dict=prompt_logprobs_dict,
        )
        self._last_output = AsyncGPUModelRunnerOutput(
            self, output, sampler_output, self._next_pinned_copy(), self._append_unknown_tokens()
        )
        return self._last_output

    def _sample(self) -> tuple[SchedulerOutput, torch.Tensor, SamplerOutput]:
        """Some sampling steps look at the tokens before, the newest included."""
        sampling_metadata = self.input_batch.sampling_metadata
        if sampling_metadata.bad_words_token_ids and self._last_output is not None:
            # They are looked up on the host: wait. (The engine would do so next anyhow.)
            self._last_output.get_output()
        if not sampling_metadata.no_penalties:
            self._add_output_tokens(sampling_metadata)
        return super()._sample()

    def _add_output_tokens(self, sampling_metadata: SamplingMetadata) -> None:
        """For the penalties: what the host knows, as a matrix, and the newest tokens from where
        they are."""
        batch, num_reqs = self.input_batch, self.input_batch.num_reqs
        num_tokens = batch.num_tokens_no_spec[:num_reqs]
        unknown = batch.token_ids_cpu[np.arange(num_reqs), num_tokens - 1] == UNKNOWN_TOKEN_ID
        matrix = make_output_matrix(
            batch.token_ids_cpu,
            batch.num_prompt_tokens[:num_reqs],
            num_tokens - unknown,
            batch.vocab_size,
        )
        sampling_metadata.output_token_ids_tensor = async_tensor_h2d(
            torch.from_numpy(matrix), self.device
        )
        rows = async_tensor_h2d(torch.from_numpy(batch.prev_rows[:num_reqs].copy()), self.device)
        known = async_tensor_h2d(torch.from_numpy(~unknown), self.device)
        newest = self.prev_sampled_token_ids[rows.clamp(min=0)]
        sampling_metadata.last_sampled_token_ids = newest.masked_fill(known, -1)

    def _next_pinned_copy(self) -> torch.Tensor:
        """[num_reqs, 1] int32 on the host; the step that used it last has been taken in."""
        pinned = self._pinned_token_ids.pop(0)
        self._pinned_token_ids.append(pinned)
        return pinned[: self.input_batch.num_reqs]

    def _append_unknown_tokens(self) -> list[tuple[CachedRequestState, int] | None]:
        """Give every request that has sampled one more token, value unknown.

        Returns:
            By row, the request and the token's index in its outputs; None for dropped samples.
        """
        batch, num_reqs = self.input_batch, self.input_batch.num_reqs
        rows = np.flatnonzero(~self.discard_request_mask[:num_reqs])
        batch.token_ids_cpu[rows, batch.num_tokens_no_spec[rows]] = UNKNOWN_TOKEN_ID
        batch.num_tokens_no_spec[rows] += 1
        pending: list[tuple[CachedRequestState, int] | None] = [None] * num_reqs
        req_ids = batch.req_ids
        for row in rows.tolist():
            request = self.requests[req_ids[row]]
            pending[row] = (request, len(request.output_token_ids))
            request.output_token_ids.append(UNKNOWN_TOKEN_ID)
        return pending

    def fill_in_token(self, request: CachedRequestState, index: int, token_id: int) -> None:
        """Replace the -1 at outputs[index] of `request`, and in its row if it (still) has one."""
        if index >= len(request.output_token_ids):
            return  # Its outputs were restored from the scheduler's, without this one.
        request.output_token_ids[index] = token_id
        row = self.input_batch.req_id_to_index.get(request.req_id)
        # Its id may belong to another request by now.
        if row is not None and self.requests.get(request.req_id) is request:
            self.input_batch.token_ids_cpu[row, request.num_prompt_tokens + index] = token_id

    # ---- inputs ----

    def _prepare_input_ids(self, num_tokens_padded: int, req_indices: np.ndarray) -> None:
        """Name the unknown tokens by the rows that sample them, then send."""
        input_ids = self.input_ids.np[: len(req_indices)]
        unknown = np.flatnonzero(input_ids == UNKNOWN_TOKEN_ID)
        if unknown.size:
            rows = self.input_batch.prev_rows[req_indices[unknown]]
            assert (rows >= 0).all(), "a token is unknown that the last step has not sampled"
            input_ids[unknown] = -1 - rows
        super()._prepare_input_ids(num_tokens_padded, req_indices)

    def _model_forward_eager(self, num_tokens: int, attn_metadata: object) -> torch.Tensor:
        """Resolve negative input ids first; recorded with the rest in a CUDA graph."""
        resolve_input_ids(self.input_ids.gpu[:num_tokens], self.prev_sampled_token_ids)
        if self.inputs_copied is not None and not torch.cuda.is_current_stream_capturing():
            self.inputs_copied.record()
        return super()._model_forward_eager(num_tokens, attn_metadata)

    def _replay(self, size: int) -> torch.Tensor:
        if self.inputs_copied is not None:
            self.inputs_copied.record()
        return super()._replay(size)

    def copy_to_host(
        self, sampler_output: SamplerOutput, token_ids_cpu: torch.Tensor
    ) -> tuple[LogprobsTensors | None, torch.cuda.Event | None]:
        """Start copying to the host, beside whatever the device does next.

        Returns:
            The logprobs on the host, and the event that says when all copies are done.
        """
        logprobs = sampler_output.logprobs_tensors
        if self.copy_stream is None:
            token_ids_cpu.copy_(sampler_output.sampled_token_ids)
            return logprobs, None
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            token_ids_cpu.copy_(sampler_output.sampled_token_ids, non_blocking=True)
            logprobs = None if logprobs is None else logprobs.to_cpu_nonblocking()
            copied = torch.cuda.Event()
            copied.record()
        return logprobs, copied


def resolve_input_ids(input_ids: torch.Tensor, prev_sampled_token_ids: torch.Tensor) -> None:
    """Replace each negative input id -1 - r, in place, by what row r of the last step has sampled.

    Args:
        input_ids: [num_tokens] int64.
        prev_sampled_token_ids: [max_num_reqs] int64.
    """
    if use_triton(input_ids):
        num_tokens = input_ids.shape[0]
        _resolve_input_ids_kernel[(triton.cdiv(num_tokens, 1024),)](
            input_ids, prev_sampled_token_ids, num_tokens, BLOCK=1024
        )
        return
    unknown = input_ids < 0
    if unknown.any():
        input_ids[unknown] = prev_sampled_token_ids[-1 - input_ids[unknown]]


@triton.jit
def _resolve_input_ids_kernel(input_ids, prev_sampled_token_ids, num_tokens, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(input_ids + offsets, mask=offsets < num_tokens, other=0)
    unknown = ids < 0
    tokens = tl.load(prev_sampled_token_ids + (-1 - ids), mask=unknown, other=0)
    tl.store(input_ids + offsets, tokens, mask=unknown)
