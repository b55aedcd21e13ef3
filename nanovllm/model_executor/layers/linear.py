"""Linear layers, and the two that hold several checkpoint matrices in one.

One large matrix multiplication is faster than three small ones, so the query, key and value
projections of a layer share one weight, and so do the MLP's gate and up projections. A checkpoint
has them apart; a layer's `weight_loader` puts each where it belongs:

    QKVParallelLinear.weight                 MergedColumnParallelLinear.weight
    rows   0 ............ q_size  "q"        rows   0 .... sizes[0]            shard 0 (gate)
           q_size ..... + kv_size "k"               sizes[0] ... + sizes[1]    shard 1 (up)
           .......... + 2 kv_size "v"

Upstream: vllm/model_executor/layers/linear.py (0.23.0). The names with "Parallel" in them are
upstream's; here one rank holds the whole matrix, and the docstrings say what upstream would split.
Left out: tensor parallelism, quantized weights. `forward` returns the output alone, where upstream
returns it together with a bias that some callers add later.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.model_executor.layers.layernorm import RMSNorm
from nanovllm.model_executor.layers.skinny_linear import skinny_linear
from nanovllm.model_executor.model_loader.weight_utils import default_weight_loader


class LinearBase(nn.Module):
    """y = x W^T + b, with W of shape [output_size, input_size] as in torch.nn.Linear.

    Parameters are made with torch's default dtype and device and left unfilled: the model loader
    sets both (see `get_model`) and fills each parameter through its `weight_loader`.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
        else:
            self.register_parameter("bias", None)
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Fill `param` (this layer's weight or bias) from a checkpoint tensor of the same shape."""
        default_weight_loader(param, loaded_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., input_size] -> [..., output_size]"""
        return skinny_linear(x, self.weight, self.bias)

    def forward_fused(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        silu_and_mul: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` of norm(x), then silu(gate) * up of its halves, or residual + it: for a few
        rows on a GPU in one kernel. See `skinny_linear`."""
        return skinny_linear(
            x, self.weight, self.bias, norm=norm, silu_and_mul=silu_and_mul, residual=residual
        )


class ColumnParallelLinear(LinearBase):
    """Upstream gives each rank a slice of the outputs (columns of W^T)."""


class RowParallelLinear(LinearBase):
    """Upstream gives each rank a slice of the inputs and sums the ranks' results."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of the same input, their outputs side by side.

    Args:
        output_sizes: the width of each projection, in order.
    """

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False) -> None:
        super().__init__(input_size, sum(output_sizes), bias)
        self.output_sizes = output_sizes

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | str | None = None,
    ) -> None:
        """Fill the rows of projection number `loaded_shard_id`; None: all rows."""
        if loaded_shard_id is None:
            default_weight_loader(param, loaded_weight)
            return
        index = self._shard_index(loaded_shard_id)
        rows = param.data.narrow(0, sum(self.output_sizes[:index]), self.output_sizes[index])
        default_weight_loader(rows, loaded_weight)

    def _shard_index(self, loaded_shard_id: int | str) -> int:
        return int(loaded_shard_id)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections of one attention layer.

    `output_sizes` is [q_size, kv_size, kv_size]: with grouped-query attention there are fewer key
    and value heads than query heads. Shard ids are "q", "k" and "v".

    Args:
        head_size: width of one head.
        total_num_kv_heads: key heads (and value heads); None means as many as query heads.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,
    ) -> None:
        if total_num_kv_heads is None:
            total_num_kv_heads = total_num_heads
        q_size, kv_size = total_num_heads * head_size, total_num_kv_heads * head_size
        super().__init__(hidden_size, [q_size, kv_size, kv_size], bias)

    def _shard_index(self, loaded_shard_id: int | str) -> int:
        return ("q", "k", "v").index(str(loaded_shard_id))
