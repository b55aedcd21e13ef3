"""FreeKVCacheBlockQueue: the free blocks, in the order in which they will be taken."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from nanovllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from tests.spec.blocks import links_agree
from tests.spec.support import Machine, ci_examples, one_of_its


class FreeQueue(Machine):
    """Beside the queue, a plain list in the same order: `waiting`. The rest is `taken`."""

    @initialize(num_blocks=st.integers(0, 8))
    def a_queue_is_made_of_all_blocks(self, num_blocks: int) -> None:
        """A new queue holds its blocks in the order of their ids."""
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)
        self.waiting = list(range(num_blocks))
        self.taken: list[int] = []
        self.operations = 0

    def _take(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.waiting.remove(block_id)
            self.taken.append(block_id)
        self.operations += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def one_block_is_taken(self) -> None:
        """popleft takes the block that is first in line."""
        first = self.waiting[0]
        block = self.queue.popleft()
        assert block.block_id == first
        self._take([first])

    @precondition(lambda self: self.waiting)
    @rule(share=st.integers(0, 100))
    def several_blocks_are_taken(self, share: int) -> None:
        """popleft_n takes the first n, in order; n may be 0."""
        n = len(self.waiting) * share // 100
        expected = self.waiting[:n]
        assert [block.block_id for block in self.queue.popleft_n(n)] == expected
        self._take(expected)

    @rule(excess=st.integers(1, 3))
    def more_blocks_are_asked_for_than_are_free(self, excess: int) -> None:
        """popleft_n refuses with ValueError when too few are free, and takes none."""
        with pytest.raises(ValueError):
            self.queue.popleft_n(len(self.waiting) + excess)

    @precondition(lambda self: self.waiting)
    @rule(block_id=one_of_its("waiting"))
    def a_block_in_the_middle_is_removed(self, block_id: int) -> None:
        """remove takes a block from wherever it stands (a prefix hit) and leaves the others."""
        self.queue.remove(self.blocks[block_id])
        self._take([block_id])

    @precondition(lambda self: self.taken)
    @rule(block_id=one_of_its("taken"))
    def a_taken_block_cannot_be_removed(self, block_id: int) -> None:
        """remove refuses, with RuntimeError, a block that is not in the queue."""
        with pytest.raises(RuntimeError):
            self.queue.remove(self.blocks[block_id])

    @precondition(lambda self: self.taken)
    @rule(block_ids=st.runner().flatmap(lambda m: st.lists(st.sampled_from(m.taken), unique=True)))
    def blocks_come_back(self, block_ids: list[int]) -> None:
        """append_n puts blocks at the end of the line, in the order given."""
        self.queue.append_n([self.blocks[block_id] for block_id in block_ids])
        self.waiting += block_ids
        self.taken = [block_id for block_id in self.taken if block_id not in block_ids]
        self.operations += 1

    @invariant()
    def the_order_is_that_of_a_plain_list(self) -> None:
        """Whatever was taken, removed and appended, the order is the list's and so is the count."""
        assert [b.block_id for b in self.queue.get_all_free_blocks()] == self.waiting
        assert self.queue.num_free_blocks == len(self.waiting)

    @invariant()
    def the_links_agree_both_ways(self) -> None:
        """Read backwards, the queue is the same queue."""
        assert links_agree(self.queue)

    @invariant()
    def a_taken_block_has_no_links(self) -> None:
        """A block outside the queue points into it no more."""
        for block_id in self.taken:
            block = self.blocks[block_id]
            assert block.prev_free_block is None
            assert block.next_free_block is None

    def teardown(self) -> None:
        """Prefer programs that really move blocks about."""
        if hasattr(self, "operations"):
            target(float(self.operations), label="blocks moved")


TestFreeQueue = FreeQueue.TestCase
TestFreeQueue.settings = ci_examples(60)
