"""What the sampler and the model runner return.

Upstream: vllm/v1/outputs.py (0.23.0)
Left out: pooling, KV-connector, routed-expert and draft-token outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class LogprobsLists(NamedTuple):
    """LogprobsTensors on the host; one row a generated token, column 0 is the sampled token."""

    logprob_token_ids: np.ndarray  # [num_tokens, max_num_logprobs + 1]
    logprobs: np.ndarray  # [num_tokens, max_num_logprobs + 1]
    sampled_token_ranks: np.ndarray  # [num_tokens], 1 = the most likely token
    # Row at which request i's tokens start; None: one token a request.
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """The `num_positions` rows of the request in batch row `req_idx`."""
        if self.cu_num_generated_tokens is not None:
            req_idx = self.cu_num_generated_tokens[req_idx]
        rows = slice(req_idx, req_idx + num_positions)
        return LogprobsLists(
            self.logprob_token_ids[rows], self.logprobs[rows], self.sampled_token_ranks[rows]
        )


class LogprobsTensors(NamedTuple):
    """Top logprobs of some positions, on the device; column 0 is the sampled (or prompt) token."""

    logprob_token_ids: torch.Tensor  # [num_positions, max_num_logprobs + 1], int32
    logprobs: torch.Tensor  # [num_positions, max_num_logprobs + 1], float32
    selected_token_ranks: torch.Tensor  # [num_positions], int32

    def tolists(self) -> LogprobsLists:
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.selected_token_ranks.cpu().numpy(),
        )

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        """Start copying to page-locked host memory; whoever reads it waits for the stream first."""
        return LogprobsTensors(*(x.to("cpu", non_blocking=True) for x in self))

    @staticmethod
    def empty_cpu(num_positions: int, num_tokens_per_position: int) -> LogprobsTensors:
        """Uninitialised host tensors to collect a prompt's logprobs in, chunk by chunk."""
        token_ids = torch.empty((num_positions, num_tokens_per_position), dtype=torch.int32)
        return LogprobsTensors(
            logprob_token_ids=token_ids,
            logprobs=torch.empty_like(token_ids, dtype=torch.float32),
            selected_token_ranks=torch.empty(num_positions, dtype=torch.int32),
        )


@dataclass
class SamplerOutput:
    """What Sampler.forward returns, still on the device."""

    sampled_token_ids: torch.Tensor  # [num_reqs, 1], int32
    logprobs_tensors: LogprobsTensors | None


@dataclass
class ModelRunnerOutput:
    """One step's result, on the host, in the order of the input batch's rows."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    # An empty list: the request's known tokens are not all computed yet, its sample was dropped.
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    # req_id -> logprobs of prompt positions 1..prompt_len-1, in the step that completes them.
    prompt_logprobs_dict: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class AsyncModelRunnerOutput(ABC):
    """A step's result that is still on its way from the device."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for it. Further calls return the same object."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})
