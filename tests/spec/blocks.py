"""The book-keeping of blocks: what holds in every component that hands them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import target
from hypothesis.stateful import invariant

from nanovllm.v1.core.block_pool import BlockPool
from nanovllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from tests.spec.support import Machine


def links_agree(queue: FreeKVCacheBlockQueue) -> bool:
    """Is the queue, read from its tail to its head, the reverse of itself?"""
    backwards: list[int] = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not None and block is not queue.fake_free_list_head:
        backwards.append(block.block_id)
        block = block.prev_free_block
    return backwards[::-1] == [b.block_id for b in queue.get_all_free_blocks()]


class BlockAccounting(Machine):
    """Every component with blocks: the pool, both managers and the scheduler."""

    pool: BlockPool
    peak_held = 0

    def tables(self) -> list[Sequence[KVCacheBlock]]:
        """Every block table there is."""
        raise NotImplementedError

    def blocks_of_the_tree(self) -> list[int]:
        """Ids of the blocks that a radix tree holds; none without one."""
        return []

    def free_ids(self) -> list[int]:
        """The free queue, next block first."""
        return [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]

    def holders(self) -> Counter[int]:
        """Block id -> how many tables, and the tree, hold it."""
        held = Counter(block.block_id for table in self.tables() for block in table)
        held.update(self.blocks_of_the_tree())
        self.peak_held = max(self.peak_held, len(held))
        return held

    @invariant()
    def free_held_and_null_blocks_make_all(self) -> None:
        """Blocks are conserved: each is the null block, or held, or once in the free queue."""
        everything = sorted([0, *self.free_ids(), *self.holders()])
        assert everything == list(range(self.pool.num_gpu_blocks))
        assert self.pool.get_num_free_blocks() == len(self.free_ids())

    @invariant()
    def a_block_is_free_exactly_when_its_ref_count_is_0(self) -> None:
        """A block other than the null block is in the free queue exactly when ref_cnt is 0."""
        unreferenced = {b.block_id for b in self.pool.blocks if b.ref_cnt == 0 and not b.is_null}
        assert set(self.free_ids()) == unreferenced

    @invariant()
    def a_ref_count_is_the_number_of_holders(self) -> None:
        """ref_cnt counts the tables that hold the block, and one more if the radix tree does."""
        holders = self.holders()
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == holders[block.block_id], block

    @invariant()
    def the_null_block_is_never_handed_out(self) -> None:
        """Block 0 is in no table and not in the free queue, and cannot be found."""
        null_block = self.pool.null_block
        assert null_block.block_id == 0
        assert null_block.is_null
        assert null_block.block_hash is None
        assert 0 not in self.holders()
        assert 0 not in self.free_ids()

    @invariant()
    def the_links_of_the_free_queue_agree_both_ways(self) -> None:
        """Read backwards, the free queue is the same queue; a held block has no links."""
        assert links_agree(self.pool.free_block_queue)
        for block_id in self.holders():
            block = self.pool.blocks[block_id]
            assert block.prev_free_block is None
            assert block.next_free_block is None

    def teardown(self) -> None:
        """Steer Hypothesis towards programs that hold many blocks at once."""
        if hasattr(self, "pool"):
            target(self.peak_held / self.pool.num_gpu_blocks, label="share of blocks held")
