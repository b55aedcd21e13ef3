"""BlockPool: who holds a block, what it contains, and which block is given away next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.v1.core.block_pool import BlockPool
from nanovllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from tests.spec.blocks import BlockAccounting
from tests.spec.support import ci_examples, one_of_its

HASHES = st.sampled_from([BlockHash(name) for name in (b"A", b"B", b"C")])


class Hashed:
    """As much of a request as the pool looks at."""

    def __init__(self, block_hashes: list[BlockHash]) -> None:
        self.block_hashes = block_hashes


class Pool(BlockAccounting):
    """Holders are lists of blocks; `published` says which blocks bear a hash, oldest first."""

    @initialize(num_blocks=st.integers(2, 8))
    def a_pool_is_made(self, num_blocks: int) -> None:
        """All blocks but the null block are free, and nothing can be found."""
        self.pool = BlockPool(num_blocks, enable_caching=True)
        self.held: dict[int, list[KVCacheBlock]] = {}
        self.published: dict[BlockHash, list[int]] = {}
        self.free_order = list(range(1, num_blocks))
        self.num_holders = 0

    def tables(self) -> list[Sequence[KVCacheBlock]]:
        return list(self.held.values())

    def _hold(self, blocks: list[KVCacheBlock]) -> None:
        self.held[self.num_holders] = blocks
        self.num_holders += 1

    def _forget(self, block_id: int) -> None:
        for block_hash, block_ids in list(self.published.items()):
            if block_id in block_ids:
                block_ids.remove(block_id)
                if not block_ids:
                    del self.published[block_hash]

    @rule(n=st.integers(1, 4))
    def blocks_are_taken(self, n: int) -> None:
        """get_new_blocks gives the first of the free queue; what they held is found no more."""
        if n > len(self.free_order):
            with pytest.raises(ValueError):
                self.pool.get_new_blocks(n)
            return
        blocks = self.pool.get_new_blocks(n)
        assert [block.block_id for block in blocks] == self.free_order[:n]
        del self.free_order[:n]
        for block in blocks:
            self._forget(block.block_id)
        self._hold(blocks)

    @precondition(lambda self: self.held)
    @rule(holder=one_of_its("held"), names=st.lists(HASHES, min_size=4, max_size=4))
    def blocks_are_published(self, holder: int, names: list[BlockHash]) -> None:
        """cache_full_blocks makes a holder's unnamed blocks findable, beside any equal ones."""
        blocks = self.held[holder]
        start = sum(1 for block in blocks if block.block_hash is not None)
        if any(block.block_hash is None for block in blocks[:start]):
            return  # Named out of order by somebody who shares them: no request does that.
        self.pool.cache_full_blocks(
            cast(Any, Hashed(names)), blocks, num_cached_blocks=start, num_full_blocks=len(blocks)
        )
        for block, name in zip(blocks[start:], names[start:], strict=False):
            self.published.setdefault(name, []).append(block.block_id)

    @precondition(lambda self: self.published)
    @rule(name=one_of_its("published"))
    def a_block_is_hit(self, name: BlockHash) -> None:
        """A found block gets one holder more; if it was free, it leaves the free queue."""
        block = self.pool.get_cached_block(name)
        assert block is not None
        self.pool.touch([block])
        if block.block_id in self.free_order:
            self.free_order.remove(block.block_id)
        self._hold([block])

    @precondition(lambda self: self.held)
    @rule(holder=one_of_its("held"))
    def a_holder_lets_go(self, holder: int) -> None:
        """Blocks that nobody else holds join the end of the free queue, in the order given."""
        blocks = self.held.pop(holder)
        self.pool.free_blocks(blocks)
        still_held = self.holders()
        self.free_order += [b.block_id for b in blocks if b.block_id not in still_held]

    @rule()
    def the_cache_is_reset(self) -> None:
        """reset_prefix_cache forgets all contents, but refuses while any block is held."""
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.published.clear()

    @invariant()
    def the_free_queue_is_in_the_order_of_freeing(self) -> None:
        """Blocks leave in the order in which they were freed: least recently used first."""
        assert self.free_ids() == self.free_order

    @invariant()
    def exactly_the_published_blocks_can_be_found(self) -> None:
        """Of blocks with one content, the one published first is found, while it lives."""
        for name in (BlockHash(b"A"), BlockHash(b"B"), BlockHash(b"C")):
            found = self.pool.get_cached_block(name)
            expected = self.published.get(name, [None])[0]
            assert (found.block_id if found else None) == expected
        assert len(self.pool.cached_block_hash_to_block) == len(self.published)

    @invariant()
    def a_block_knows_the_hash_it_is_published_under(self) -> None:
        """Several live blocks may bear one hash; losing one of them leaves the others findable."""
        names = {i: name for name, block_ids in self.published.items() for i in block_ids}
        assert {
            b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash is not None
        } == names

    @invariant()
    def usage_is_the_share_of_held_blocks(self) -> None:
        """get_usage is 0 with nothing held and 1 with everything held, the null block aside."""
        total = self.pool.num_gpu_blocks - 1
        assert self.pool.get_usage() == pytest.approx(len(self.holders()) / total)


TestPool = Pool.TestCase
TestPool.settings = ci_examples(60)
