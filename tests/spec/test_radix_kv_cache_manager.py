"""RadixKVCacheManager: the same calls as KVCacheManager's, answered out of SGLang's radix tree."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis.stateful import invariant

from nanovllm.v1.core.kv_cache_utils import KVCacheBlock
from nanovllm.v1.core.radix_cache import RadixKVCacheManager, TreeNode
from nanovllm.v1.request import Request
from tests.spec.managers import MAX_MODEL_LEN, Manager
from tests.spec.support import Context, ci_examples


class RadixManager(Manager):
    """Beside the manager, `evicted`: the blocks that the tree has let go of, in order."""

    manager: RadixKVCacheManager

    def make_manager(self, num_blocks: int, block_size: int) -> None:
        self.manager = RadixKVCacheManager(num_blocks, block_size, MAX_MODEL_LEN)
        self.evicted: list[list[KVCacheBlock]] = []
        cache = self.manager.radix_cache
        free = cache._free

        def free_and_note(slots: list[int]) -> None:
            blocks = [self.manager.block_pool.blocks[slot // block_size] for slot in slots]
            self.evicted.append(blocks[::block_size][::-1])
            free(slots)

        cache._free = free_and_note
        self.seen: set[Context] = set()  # pages that have been in the tree at some time

    def pages(self) -> list[tuple[TreeNode, Context, int]]:
        """Every page of the tree: its node, its content and its block."""
        found = []
        stack: list[tuple[TreeNode, tuple[int, ...]]] = [(self.manager.radix_cache.root_node, ())]
        while stack:
            node, before = stack.pop()
            tokens = (*before, *node.key.token_ids)
            for i in range(0, len(node.value), self.block_size):
                end = len(before) + i + self.block_size
                slots = node.value[i : i + self.block_size]
                first = slots[0]
                assert slots == list(range(first, first + self.block_size)), "a page is a block"
                context = (node.key.extra_key, tokens[:end])
                found.append((node, context, first // self.block_size))
            stack.extend((child, tokens) for child in node.children.values())
        return found

    def findable(self) -> list[tuple[Context | None, int]]:
        return [(context, block_id) for _, context, block_id in self.pages()]

    def blocks_of_the_tree(self) -> list[int]:
        return [block_id for _, _, block_id in self.pages()]

    def locked(self) -> set[Context]:
        """Brute force: every page that a running request has found or published, and what is
        above it."""
        stood_on: set[Context] = set()
        for state in self.manager.req_to_state.values():
            for end in range(self.block_size, state.num_cached_tokens + 1, self.block_size):
                stood_on.add(self.context(state.request, end))
        return stood_on

    def num_available(self, hit: Sequence[KVCacheBlock]) -> int:
        hit_ids = {block.block_id for block in hit}
        locked = self.locked()
        evictable = [i for _, context, i in self.pages() if context not in locked]
        return len(self.free_ids()) + len(set(evictable) - hit_ids)

    def num_publishable(self, request: Request) -> int:
        return min(request.num_computed_tokens, request.num_tokens)

    def give_back_evicted(self) -> list[int]:
        evicted = [block for blocks in self.evicted for block in blocks]
        for blocks in self.evicted:
            self.give_back(blocks)
        self.evicted.clear()
        return [block.block_id for block in evicted]

    @invariant()
    def a_page_is_published_after_the_step_that_computes_it(self) -> None:
        """No block that the planned step is to fill is in the tree."""
        for req_id, num_new in self.planned.items():
            request = self.requests[req_id]
            table = self.manager.get_block_ids(req_id)
            first = request.num_computed_tokens // self.block_size
            planned = table[first : (request.num_computed_tokens + num_new) // self.block_size]
            assert not set(planned) & set(self.blocks_of_the_tree())

    @invariant()
    def what_a_request_stands_on_is_in_the_tree_and_locked(self) -> None:
        """A page that a running request has found or published is locked, and so not evicted."""
        pages = {context: node for node, context, _ in self.pages()}
        for context in self.locked():
            assert context in pages, "evicted under a running request"
            assert pages[context].lock_ref > 0

    @invariant()
    def all_that_ran_is_published(self) -> None:
        """After a step, every full page of a running request can be found; of one whose next page
        somebody else has published before it, those before that page."""
        cached = {context for _, context, _ in self.pages()}
        self.seen |= cached
        if self.planned:
            return
        for state in self.manager.req_to_state.values():
            request, until = state.request, self.num_publishable(state.request)
            if state.is_private:
                until = state.num_cached_tokens
                assert self.context(request, until + self.block_size) in self.seen
            for end in range(self.block_size, until + 1, self.block_size):
                assert self.context(request, end) in cached

    @invariant()
    def a_duplicate_stays_private_and_is_never_freed_early(self) -> None:
        """Of equal pages the tree holds one; another copy is its request's until that ends."""
        pages = {context: block_id for _, context, block_id in self.pages()}
        assert len(set(pages.values())) == len(pages)
        free = set(self.free_ids())
        for table in self.tables():
            assert not free & {block.block_id for block in table}

    @invariant()
    def sizes_equal_a_recount(self) -> None:
        """Evictable and protected tokens are those of pages without and with a request on them."""
        contexts = {context for _, context, _ in self.pages()}
        locked = contexts & self.locked()
        cache = self.manager.radix_cache
        assert cache.protected_size() == len(locked) * self.block_size
        assert cache.evictable_size() == (len(contexts) - len(locked)) * self.block_size
        free = len(self.free_ids()) + len(contexts) - len(locked)
        assert self.manager.get_num_free_blocks() == free


TestRadixManager = RadixManager.TestCase
TestRadixManager.settings = ci_examples(100)
