"""RadixCache: SGLang's tree of cached token sequences, with locks and LRU eviction of leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.v1.core.radix_cache import RadixCache, RadixKey, TreeNode
from tests.spec.support import Context, Machine, ci_examples

# Long common beginnings, left at any point: nodes are split often.
TOKENS = st.builds(
    lambda length, tail: [0, 1, 2, 0, 1, 2, 0, 1, 2][:length] + tail,
    st.integers(0, 9),
    st.lists(st.integers(0, 2), max_size=2),
)
NAME_SPACES = st.sampled_from([None, None, "salt"])


class Lock(NamedTuple):
    """A locked node, and the content down to it at the time of locking."""

    node: TreeNode
    context: Context


class Radix(Machine):
    """Beside the tree, `stored`: the slots of every page that was inserted and not evicted.

    A page's key is its context: the name space, and all tokens from the start to the page's end.
    """

    @initialize(page_size=st.integers(1, 3))
    def a_tree_is_made(self, page_size: int) -> None:
        """It is empty."""
        self.page_size = page_size
        self.freed: list[list[int]] = []
        self.now = 0
        self.cache = RadixCache(page_size, free=self.freed.append, clock=self._tick)
        self.stored: dict[Context, tuple[int, ...]] = {}
        self.locks: list[Lock] = []
        self.num_slots = 0
        self.most_locked = 0

    def _tick(self) -> int:
        self.now += 1
        return self.now

    # ---- brute force -----------------------------------------------------------------------------

    def _prefixes(self, context: Context) -> Iterator[Context]:
        """Every page on the way to the end of `context`, first to last."""
        name_space, tokens = context
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            yield name_space, tokens[:end]

    def _longest_match(self, context: Context) -> list[Context]:
        match: list[Context] = []
        for page in self._prefixes(context):
            if page not in self.stored:
                break
            match.append(page)
        return match

    def _locked_pages(self) -> set[Context]:
        return {page for lock in self.locks for page in self._prefixes(lock.context)}

    def _nodes(self) -> list[TreeNode]:
        """Every node but the root."""
        nodes, stack = [], list(self.cache.root_node.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
        return nodes

    def _context_of(self, node: TreeNode) -> Context:
        tokens: list[int] = []
        name_space = node.key.extra_key
        while node.parent is not None:
            tokens = node.key.token_ids + tokens
            node = node.parent
        return name_space, tuple(tokens)

    def _path_was_used_after(self, node: TreeNode, time: int) -> bool:
        while node.parent is not None:
            if node.last_access_time <= time:
                return False
            node = node.parent
        return True

    # ---- what may happen -------------------------------------------------------------------------

    @rule(tokens=TOKENS, name_space=NAME_SPACES)
    def a_sequence_is_inserted(self, tokens: list[int], name_space: str | None) -> None:
        """insert says how much was there already; the tree takes over the slots of the rest."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        context = (name_space, tuple(tokens))
        slots = list(range(self.num_slots, self.num_slots + len(tokens)))
        self.num_slots += len(tokens)
        known = self._longest_match(context)
        num_known = self.cache.insert(RadixKey(tokens, name_space), slots)
        assert num_known == len(known) * self.page_size
        for i, page in enumerate(self._prefixes(context)):
            start = i * self.page_size
            self.stored.setdefault(page, tuple(slots[start : start + self.page_size]))

    @rule(tokens=TOKENS, name_space=NAME_SPACES)
    def a_prefix_is_looked_up(self, tokens: list[int], name_space: str | None) -> None:
        """match_prefix finds the longest match, ends it at a node, and marks the path used."""
        self._look_up(tokens, name_space)

    @rule(tokens=TOKENS, name_space=NAME_SPACES, insert=st.booleans())
    def a_request_stands_on_a_prefix(
        self, tokens: list[int], name_space: str | None, insert: bool
    ) -> None:
        """Its match, or all it has just inserted, is locked from the last node up to the root."""
        if insert:
            self.a_sequence_is_inserted(tokens, name_space)
        lock = self._look_up(tokens, name_space)
        self.cache.inc_lock_ref(lock.node)
        self.locks.append(lock)
        self.most_locked = max(self.most_locked, len(self._locked_pages()))

    def _look_up(self, tokens: list[int], name_space: str | None) -> Lock:
        time = self.now
        match = self.cache.match_prefix(RadixKey(tokens, name_space))
        pages = self._longest_match((name_space, tuple(tokens)))
        assert match.device_indices == [slot for page in pages for slot in self.stored[page]]
        node = match.last_device_node
        context = pages[-1] if pages else (name_space, ())
        assert self._context_of(node)[1] == context[1]
        assert self._path_was_used_after(node, time)
        return Lock(node, context)

    @precondition(lambda self: self.locks)
    @rule(which=st.runner().flatmap(lambda m: st.integers(0, len(m.locks) - 1)))
    def a_lock_is_released(self, which: int) -> None:
        """Locks are counted: what another lock still holds stays protected."""
        self.cache.dec_lock_ref(self.locks.pop(which).node)

    @rule(num_tokens=st.integers(0, 6))
    def tokens_are_evicted(self, num_tokens: int) -> None:
        """evict frees the least recently used unlocked leaf, again and again, till it is enough."""
        locked = self._locked_pages()
        left = {id(node): node for node in self._nodes()}
        num_children = {key: len(node.children) for key, node in left.items()}
        expected: list[list[int]] = []
        while sum(map(len, expected)) < num_tokens:
            leaves = [
                node
                for key, node in left.items()
                if not num_children[key] and self._context_of(node) not in locked
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda node: node.last_access_time)
            expected.append(list(oldest.value))
            del left[id(oldest)]
            if oldest.parent is not None and id(oldest.parent) in left:
                num_children[id(oldest.parent)] -= 1

        self.freed.clear()
        num_evicted = self.cache.evict(num_tokens)
        assert self.freed == expected, "least recent leaf first"
        assert num_evicted == sum(map(len, expected))
        gone = {slot for slots in expected for slot in slots}
        for page, slots in list(self.stored.items()):
            if gone.intersection(slots):
                assert page not in locked, "a locked node is never evicted"
                del self.stored[page]

    # ---- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_tree_holds_what_was_inserted_and_not_evicted(self) -> None:
        """Read from the root, the tree's sequences and slots are the stored ones, and no others."""
        found: dict[Context, tuple[int, ...]] = {}
        for node in self._nodes():
            name_space, tokens = self._context_of(node)
            start = len(tokens) - len(node.key)
            for i in range(0, len(node.key), self.page_size):
                page = (name_space, tokens[: start + i + self.page_size])
                found[page] = tuple(node.value[i : i + self.page_size])
        assert found == self.stored

    @invariant()
    def sizes_equal_a_recount(self) -> None:
        """Protected are the pages on the way to a lock, evictable all others; total is both."""
        locked = self._locked_pages()
        assert self.cache.protected_size() == len(locked) * self.page_size
        assert self.cache.evictable_size() == (len(self.stored) - len(locked)) * self.page_size
        assert self.cache.total_size() == len(self.stored) * self.page_size

    @invariant()
    def a_node_is_locked_as_often_as_somebody_stands_on_it_or_below(self) -> None:
        """lock_ref counts the locks from the node down, also after nodes were split."""
        for node in self._nodes():
            page = self._context_of(node)
            standing = [lock for lock in self.locks if page in self._prefixes(lock.context)]
            assert node.lock_ref == len(standing)

    @invariant()
    def exactly_the_unlocked_leaves_can_be_evicted(self) -> None:
        """A node is a candidate for eviction when it has no children and no locks."""
        locked = self._locked_pages()
        leaves = {n for n in self._nodes() if not n.children and self._context_of(n) not in locked}
        assert self.cache.evictable_leaves == leaves

    @invariant()
    def what_is_locked_is_there(self) -> None:
        """No page on the way from the root to a locked node has been evicted."""
        assert self._locked_pages() <= set(self.stored)

    @invariant()
    def siblings_differ_in_their_first_page(self) -> None:
        """A node is as long as can be without a branch inside, and no two children begin alike."""
        for node in [self.cache.root_node, *self._nodes()]:
            starts = {
                (child.key.extra_key, tuple(child.key.token_ids[: self.page_size]))
                for child in node.children.values()
            }
            assert len(starts) == len(node.children)
            assert all(child.parent is node for child in node.children.values())
            assert len(node.key) % self.page_size == 0

    def teardown(self) -> None:
        """Prefer programs that lock much of a large tree."""
        if hasattr(self, "most_locked"):
            target(float(self.most_locked), label="pages locked at once")


TestRadix = Radix.TestCase
TestRadix.settings = ci_examples(100)
