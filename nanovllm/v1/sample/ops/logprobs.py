"""The rank of a token among a row's logprobs.

Upstream: vllm/v1/sample/ops/logprobs.py (0.23.0)
Left out: torch.compile.
"""

from __future__ import annotations

import torch


def batched_count_greater_than(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many elements of each row of x [num_rows, n] are at least values [num_rows, 1]:
    [num_rows] int32. (The name is upstream's; ties count, so a value of the row itself counts too
    and the largest one has rank 1.)"""
    return (x >= values).sum(dim=-1, dtype=torch.int32)
