"""Every block of the KV cache: which are free, which are held, which can be found by content.

Upstream: vllm/v1/core/block_pool.py (0.23.0)
Left out: KV-cache groups, residency metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nanovllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from nanovllm.v1.core.kv_cache_utils import BlockHash, FreeKVCacheBlockQueue, KVCacheBlock

if TYPE_CHECKING:
    from nanovllm.v1.request import Request


class BlockHashToBlockMap:
    """Block hash -> the blocks that hold that content.

    Two requests may each fill a block of their own with the same content: by decoding the same
    tokens, or by recomputing the last block of a fully cached prompt. Both are published under one
    hash: block tables are append-only, so neither is swapped for the other later.
    Hence several blocks a hash, and removal by block, not by hash. Nearly always it is one block,
    which is then stored bare; a dict for each would burden the garbage collector.
    """

    def __init__(self) -> None:
        self._cache: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHash) -> KVCacheBlock | None:
        """Any block with this content (the one published first, while it lives)."""
        blocks = self._cache.get(key)
        if isinstance(blocks, dict):
            return next(iter(blocks.values()))
        return blocks

    def insert(self, key: BlockHash, block: KVCacheBlock) -> None:
        blocks = self._cache.get(key)
        if blocks is None:
            self._cache[key] = block
        elif isinstance(blocks, dict):
            blocks[block.block_id] = block
        else:
            self._cache[key] = {blocks.block_id: blocks, block.block_id: block}

    def pop(self, key: BlockHash, block_id: int) -> KVCacheBlock | None:
        """Remove one block, leaving others with the same hash. None: it was not there."""
        blocks = self._cache.get(key)
        if isinstance(blocks, dict):
            block = blocks.pop(block_id, None)
            if not blocks:
                del self._cache[key]
            return block
        if blocks is not None and blocks.block_id == block_id:
            return self._cache.pop(key)  # type: ignore[return-value]
        return None

    def __len__(self) -> int:
        """Number of different contents (hashes)."""
        return len(self._cache)


class BlockPool:
    """Hands out blocks, takes them back, and remembers what they hold.

                        get_new_blocks                 cache_full_blocks
        free, no hash ----------------> held, no hash -----------------> held, hash
             ^                                |                           ^     |
             |                    free_blocks |                     touch |     | free_blocks
             +--------------------------------+                           |     v
             |                        get_new_blocks: evicts              free, hash
             +------------------------------------------------------- (eviction candidate)

    Invariants: a block is in the free queue exactly when its ref_cnt is 0; ref_cnt is the number of
    block tables that hold it; free + held + null block = all. A block with a hash can be found by
    content, whether held (shared) or free (until it is its turn to be evicted).

    Block 0 is the null block: never handed out, never hashed. Padding in block tables points to it.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int = 16,
        enable_kv_cache_events: bool = False,
    ) -> None:
        """
        Args:
            hash_block_size: tokens a block; only events ask.
            enable_kv_cache_events: record stores and evictions for `take_events`. May be set and
                cleared between steps, which is how a trace begins and ends.
        """
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[KVCacheEvent] = []

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """A block with this content, held or free; None on a miss."""
        return self.cached_block_hash_to_block.get_one_block(block_hash)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
    ) -> None:
        """Publish blocks [num_cached_blocks, num_full_blocks) of `request` under their hashes.

        This happens while the step is being scheduled, before the model has filled the blocks: a
        request later in the same step may hit them. That is sound because every layer writes the
        whole batch's keys and values before its attention reads any.

        Args:
            blocks: the request's whole block table.
        """
        for i in range(num_cached_blocks, num_full_blocks):
            block = blocks[i]
            assert block.block_hash is None and not block.is_null
            block.block_hash = request.block_hashes[i]
            self.cached_block_hash_to_block.insert(block.block_hash, block)
        if self.enable_kv_cache_events and num_cached_blocks < num_full_blocks:
            start, end, size = num_cached_blocks, num_full_blocks, self.hash_block_size
            self.kv_event_queue.append(
                BlockStored(
                    block_hashes=request.block_hashes[start:end],
                    parent_block_hash=request.block_hashes[start - 1] if start else None,
                    token_ids=request.all_token_ids[start * size : end * size],
                    block_size=size,
                    block_ids=[block.block_id for block in blocks[start:end]],
                )
            )

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks off the free queue, evicting what they hold.

        Raises:
            ValueError: fewer than `num_blocks` are free.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            self._maybe_evict_cached_block(block)
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Make the block unfindable, if it could be found. True if it could."""
        if block.block_hash is None:
            return False
        evicted = self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
        assert evicted is block
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(BlockRemoved([block.block_hash], [block.block_id]))
        block.reset_hash()
        return True

    def evict_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make blocks unfindable, wherever they are: they do not hold what their hash says."""
        for block in blocks:
            self._maybe_evict_cached_block(block)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one holder to each block (a prefix hit); a free one leaves the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take one holder off each block; those without any join the free queue in the given order.

        A freed block keeps its hash: it can be hit until it is taken for something else.
        """
        freed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.append_n(freed)

    def reset_prefix_cache(self) -> bool:
        """Forget all contents. False, and nothing done, while any block is held."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, in order."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks (null block aside) that are held, 0.0 to 1.0."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0
