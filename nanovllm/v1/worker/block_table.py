"""The block tables of the running batch, one row a request.

A block table maps a request's logical blocks to the physical blocks of the paged KV cache, as a
page table does. The scheduler owns the truth (KVCacheManager.req_to_blocks); this is the runner's
copy, in a form that kernels can read.

Upstream: vllm/v1/worker/block_table.py (0.23.0), where a Triton kernel computes the slots on the
GPU and MultiGroupBlockTable holds one table a KV-cache group.
Left out: kernel block sizes that differ from the cache's, context parallelism, several groups.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.v1.utils import CpuGpuBuffer

PAD_SLOT_ID = -1  # a token that is written nowhere


class BlockTable:
    """Rows of physical block ids and, from them, the slot of every token of a step.

    With block_size 4, a request of 10 tokens in row 1:

        block_table[1]              7     2     9     -     -      num_blocks_per_row[1] == 3
        logical block               0     1     2
        token positions            0-3   4-7   8-11

        position 6  ->  logical block 6 // 4 = 1  ->  block 2  ->  slot 2 * 4 + 6 % 4 = 10

    Invariants:
    - Entries past num_blocks_per_row are stale and must not be followed.
    - A row only grows (append_row) or is replaced whole (add_row): a block that is in a table never
      changes its place, so slots computed once stay right.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device,
    ) -> None:
        self.block_size = block_size  # tokens
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.block_table = CpuGpuBuffer(
            max_num_reqs,
            max_num_blocks_per_req,
            dtype=torch.int32,
            device=device,
            pin_memory=pin_memory,
        )
        self.num_blocks_per_row = np.zeros(max_num_reqs, dtype=np.int32)
        # Where each token of the step goes in the cache.
        self.slot_mapping = CpuGpuBuffer(
            max_num_batched_tokens, dtype=torch.int64, device=device, pin_memory=pin_memory
        )

    def append_row(self, block_ids: list[int], row_idx: int) -> None:
        """Add newly allocated blocks at the end of a row."""
        if not block_ids:
            return
        start = self.num_blocks_per_row[row_idx]
        end = start + len(block_ids)
        self.block_table.np[row_idx, start:end] = block_ids
        self.num_blocks_per_row[row_idx] = end

    def add_row(self, block_ids: list[int], row_idx: int) -> None:
        """Replace a row: a request that enters the batch, or comes back with other blocks."""
        self.num_blocks_per_row[row_idx] = 0
        self.append_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Forget a row. Its entries become the null block, harmless if followed by mistake."""
        self.block_table.np[row_idx, : self.num_blocks_per_row[row_idx]] = 0
        self.num_blocks_per_row[row_idx] = 0

    def clear(self) -> None:
        """Forget all rows. The buffers stay where they are."""
        self.block_table.np[:] = 0
        self.num_blocks_per_row[:] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Copy row `src` over row `tgt`; `src` is left as it is."""
        num_blocks = self.num_blocks_per_row[src]
        self.block_table.np[tgt, :num_blocks] = self.block_table.np[src, :num_blocks]
        self.num_blocks_per_row[tgt] = num_blocks

    def compute_slot_mapping(
        self,
        req_indices: np.ndarray,
        positions: np.ndarray,
        num_tokens_padded: int | None = None,
    ) -> torch.Tensor:
        """Find the slot of every token of the step, and send the slots to the device.

        The block of a position was allocated when the step was scheduled, before the token's key
        and value exist: that is what makes the slot known here.

        Args:
            req_indices: [num_tokens], the batch row of each token.
            positions: [num_tokens], its position in its sequence.
            num_tokens_padded: at least num_tokens; a padding token's slot is PAD_SLOT_ID. None:
                no padding.

        Returns:
            [num_tokens_padded] int64 on the device, block_id * block_size + offset.
        """
        num_tokens = len(positions)
        block_indices, block_offsets = np.divmod(positions, self.block_size)
        block_ids = self.block_table.np[req_indices, block_indices]
        slots = self.slot_mapping.np[:num_tokens]
        # In int64 (the buffer's type): block ids are int32, and a product of two would overflow.
        np.multiply(block_ids, self.block_size, out=slots, dtype=np.int64)
        slots += block_offsets
        num_tokens_padded = num_tokens_padded or num_tokens
        self.slot_mapping.np[num_tokens:num_tokens_padded] = PAD_SLOT_ID
        return self.slot_mapping.copy_to_gpu(num_tokens_padded)

    def commit_block_table(self, num_reqs: int) -> torch.Tensor:
        """Send the first rows to the device: [num_reqs, max_num_blocks_per_req] int32."""
        return self.block_table.copy_to_gpu(num_reqs)

    def get_numpy_array(self) -> np.ndarray:
        return self.block_table.np
