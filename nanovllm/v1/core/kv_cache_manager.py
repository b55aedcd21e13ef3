"""Block tables: which blocks each request holds, and in which order.

The scheduler asks three things: how much of this prompt is cached (`get_computed_blocks`), may this
request have room for so many more tokens (`allocate_slots`), and take it all back (`free`).

Upstream: vllm/v1/core/kv_cache_manager.py (0.23.0), merged with its kv_cache_coordinator.py and
single_type_kv_cache_manager.py (FullAttentionManager), which exist to serve several kinds of
attention. Left out: sliding windows, external (KV-connector) tokens, lookahead slots for
speculative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.distributed.kv_events import KVCacheEvent
from nanovllm.v1.core.block_pool import BlockPool
from nanovllm.v1.core.kv_cache_utils import KVCacheBlock, cdiv
from nanovllm.v1.metrics.stats import PrefixCacheStats

if TYPE_CHECKING:
    from nanovllm.v1.request import Request


@dataclass(slots=True)
class KVCacheBlocks:
    """Blocks on their way from the manager to the scheduler, which only passes their ids on."""

    blocks: Sequence[KVCacheBlock]

    def get_block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


class KVCacheManager:
    """Gives requests blocks to write their keys and values to, and finds the ones already written.

    A request's block table during one `allocate_slots` call, with block size 4:

        tokens   0 1 2 3   4 5 6 7   8 9 . .   . . . .
        blocks     b5        b2        b9        b4
                 |<-- comp / new_comp -->|<---- new ---->|
                 | touched: cached hit,  | slots for tokens that this
                 | or held already       | step computes
                 |<- published under their hashes ->|     (full blocks only)

    comp: computed in earlier steps. new_comp: found in the prefix cache just now. new: to be
    computed in this step. Slots are given to a step's input tokens, whose keys and values it will
    write; the token that it samples gets its slot in the next step, as that one's input. A block is
    allocated whole when its first slot is needed, so for a decoding request before the tokens that
    will fill it exist.

    Block tables only grow at the end while a request runs (`req_to_blocks`), so the runner is sent
    additions only.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        log_stats: bool = False,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats()
        self.block_pool = BlockPool(num_gpu_blocks, enable_caching, block_size)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # How many blocks of each table are published, counted from the start.
        self.num_cached_block: dict[str, int] = {}
        self.empty_kv_cache_blocks = KVCacheBlocks(())

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """Hit counts since the last call."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def enable_kv_cache_events(self, enabled: bool) -> None:
        """Record stores and evictions from now on, or stop. (Upstream decides when it is made.)"""
        self.block_pool.enable_kv_cache_events = enabled

    def take_events(self) -> list[KVCacheEvent]:
        """What was stored and evicted since the last call."""
        return self.block_pool.take_events()

    def new_step_starts(self) -> None:
        """A step is about to be scheduled. Nothing to do: allocating a block publishes it."""

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the longest cached prefix of `request`.

        Returns:
            The blocks, not yet touched (another allocation may still evict the free ones among
            them), and the number of tokens they hold: a multiple of the block size, and less than
            the request has.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # The last token is always computed, cached or not: its hidden state gives the next token.
        # Since hits are whole blocks, a fully cached prompt recomputes its whole last block.
        max_cache_hit_length = request.num_tokens - 1
        computed_blocks = self._find_longest_cache_hit(request, max_cache_hit_length)
        num_computed_tokens = len(computed_blocks) * self.block_size
        if self.log_stats:
            self.prefix_cache_stats.record(
                request.num_tokens, num_computed_tokens, preempted=request.num_preemptions > 0
            )
        return KVCacheBlocks(computed_blocks), num_computed_tokens

    def _find_longest_cache_hit(self, request: Request, max_length: int) -> list[KVCacheBlock]:
        """Follow the request's hash chain to its first miss: later hashes depend on that block."""
        computed_blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: max_length // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            computed_blocks.append(block)
        return computed_blocks

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Give `request` room for `num_new_tokens` more tokens. The class docstring draws it.

        Args:
            num_new_tokens: tokens this step computes.
            num_new_computed_tokens: tokens just found by `get_computed_blocks` (a new request's).
            new_computed_blocks: the blocks that hold those.
            full_sequence_must_fit: also require room for the whole request as it stands now, though
                only a chunk of it is allocated. Without it, several long prompts can be admitted
                that cannot all finish, and preempt one another in turn.

        Returns:
            The newly allocated blocks, or None if too few are free; then nothing has changed.
        """
        assert num_new_tokens > 0
        computed = new_computed_blocks.blocks if new_computed_blocks is not None else ()
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = min(num_computed_tokens + num_new_tokens, self.max_model_len)
        req_blocks = self.req_to_blocks.get(request.request_id)
        num_held = len(computed) if req_blocks is None else len(req_blocks)
        num_new_blocks = cdiv(num_tokens, self.block_size) - num_held

        num_must_fit = num_new_blocks
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            num_must_fit = max(num_new_blocks, cdiv(whole, self.block_size) - num_held)
        # A hit on a free block costs one as well: touching it takes it off the free queue.
        num_evictable = sum(block.ref_cnt == 0 for block in computed) if computed else 0
        if max(num_must_fit, 0) + num_evictable > self.block_pool.get_num_free_blocks():
            return None

        if req_blocks is None:
            # Touch the hits before taking new blocks: they may be free, and would be evicted.
            self.block_pool.touch(computed)
            req_blocks = self.req_to_blocks[request.request_id] = list(computed)
            self.num_cached_block[request.request_id] = len(computed)
        allocated = self.empty_kv_cache_blocks
        if num_new_blocks > 0:
            new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
            req_blocks.extend(new_blocks)
            allocated = KVCacheBlocks(new_blocks)

        if self.enable_caching:
            # Async scheduling gives tokens to compute that are not known yet; those have no hash.
            self.cache_blocks(
                request, min(num_computed_tokens + num_new_tokens, request.num_tokens)
            )
        return allocated

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's blocks that its first `num_computed_tokens` tokens fill."""
        if not self.enable_caching:
            return
        num_cached_blocks = self.num_cached_block[request.request_id]
        num_full_blocks = num_computed_tokens // self.block_size
        if num_full_blocks > num_cached_blocks:
            self.block_pool.cache_full_blocks(
                request, self.req_to_blocks[request.request_id], num_cached_blocks, num_full_blocks
            )
            self.num_cached_block[request.request_id] = num_full_blocks

    def free(self, request: Request) -> None:
        """Give back the request's blocks, tail first, so that tails are evicted before heads."""
        req_blocks = self.req_to_blocks.pop(request.request_id, [])
        num_cached_blocks = self.num_cached_block.pop(request.request_id, 0)
        # Preempted by a request that comes after it in the very step that was to fill them (with
        # priorities): published, never computed. Upstream leaves them, and a later hit reads
        # garbage.
        num_computed_blocks = request.num_computed_tokens // self.block_size
        self.block_pool.evict_blocks(req_blocks[num_computed_blocks:num_cached_blocks])
        self.block_pool.free_blocks(reversed(req_blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole block table."""
        return KVCacheBlocks(self.req_to_blocks.get(request_id, ()))

    def get_block_ids(self, request_id: str) -> list[int]:
        """The ids in the request's block table."""
        return self.get_blocks(request_id).get_block_ids()
