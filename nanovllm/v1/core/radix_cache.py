"""The other way to find a shared prefix: SGLang's radix tree, and a KV-cache manager built on it.

Hash chains (block_pool.py) ask "who holds this block?" once a block. A radix tree keeps the cached
sequences themselves, one node a stretch of tokens that nobody has branched off from, and finds the
longest match by walking down it. Eviction removes the least recently used leaf; locks keep what
running requests stand on.

Upstream: sglang/srt/mem_cache/radix_cache.py (SGLang 0.5.10); RadixKVCacheManager is ours and
answers the calls of vllm/v1/core/kv_cache_manager.py. Events name contents by vLLM's hashes, one
event a leaf (SGLang: by hashes of its own, one event a page).
Left out: eviction policies other than LRU, priorities, host-memory copies, EAGLE's bigram keys.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from nanovllm.v1.core.block_pool import BlockPool
from nanovllm.v1.core.kv_cache_manager import KVCacheBlocks
from nanovllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, cdiv, hash_block_tokens
from nanovllm.v1.metrics.stats import PrefixCacheStats

if TYPE_CHECKING:
    from nanovllm.v1.request import Request


@dataclass(slots=True)
class RadixKey:
    """Tokens, and the name space they are looked up in (a cache salt, say)."""

    token_ids: list[int]
    extra_key: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> RadixKey:
        return RadixKey(self.token_ids[part], self.extra_key)


class TreeNode:
    """A stretch of cached tokens.

                      root  key []
                     /          \\
          [the, cat, sat]      [a, dog]
             /        \\
        [on, it]   [and, ate]       match [the, cat, sat, on, a]: 4 tokens; [on, it] is split

    `value[i]` is the cache slot of the token `key[i]`. Lengths are multiples of the page size. A
    node with `lock_ref` above 0 is used by that many requests, and so is every node between it and
    the root.
    """

    def __init__(
        self,
        parent: TreeNode | None,
        key: RadixKey,
        value: list[int],
        last_access_time: float,
        lock_ref: int = 0,
    ) -> None:
        self.parent = parent
        self.key = key
        self.value = value
        self.last_access_time = last_access_time
        self.lock_ref = lock_ref
        self.children: dict[tuple[str | None, tuple[int, ...]], TreeNode] = {}

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        return f"TreeNode({self.key.token_ids}, lock_ref={self.lock_ref})"


@dataclass(slots=True)
class MatchResult:
    """`device_indices`: the matched tokens' slots. `last_device_node`: where the match ends."""

    device_indices: list[int]
    last_device_node: TreeNode


class RadixCache:
    """SGLang's prefix cache: which token sequences have their keys and values in which slots.

    It owns the slots in its tree until `evict` hands them to `free`. Sizes are in tokens:
    evictable_size() + protected_size() = total_size(), protected being what locks hold.
    """

    def __init__(
        self,
        page_size: int = 1,
        free: Callable[[list[int]], None] = lambda slots: None,
        clock: Callable[[], float] | None = None,
        enable_kv_cache_events: bool = False,
    ) -> None:
        """
        Args:
            page_size: tokens are matched, stored and evicted in pages of this many.
            free: is handed the slots of each evicted leaf.
            clock: gives access times. SGLang reads time.monotonic(); a counter, the default, orders
                accesses as well and makes runs repeatable.
            enable_kv_cache_events: record stores and evictions for `take_events`; may be set and
                cleared at any time.
        """
        self.page_size = page_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[KVCacheEvent] = []
        self._free = free
        self._clock = clock if clock is not None else itertools.count(1).__next__
        self.reset()

    def reset(self) -> None:
        """Forget everything, without handing the slots to `free`."""
        self.root_node = TreeNode(None, RadixKey([]), [], self._clock(), lock_ref=1)
        self.evictable_leaves: set[TreeNode] = set()
        self.evictable_size_ = 0
        self.protected_size_ = 0
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())

    def evictable_size(self) -> int:
        return self.evictable_size_

    def protected_size(self) -> int:
        return self.protected_size_

    def total_size(self) -> int:
        """Tokens in the tree, counted node by node."""
        total, stack = 0, [self.root_node]
        while stack:
            node = stack.pop()
            total += len(node.value)
            stack.extend(node.children.values())
        return total

    # ---- looking up and storing ------------------------------------------------------------------

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Find the longest cached prefix of `key`, in whole pages, and mark it used just now.

        A match that ends inside a node splits the node, so that it ends at one: locks work on
        nodes.
        """
        key = key[: self._page_aligned(len(key))]
        node = self.root_node
        slots: list[int] = []
        if not len(key):
            return MatchResult(slots, node)
        access_time = self._clock()
        node.last_access_time = access_time
        while len(key):
            child = node.children.get(self._child_key(key))
            if child is None:
                break
            child.last_access_time = access_time
            prefix_len = self._key_match(child.key, key)
            node = self._split_node(child, prefix_len) if prefix_len < len(child.key) else child
            slots.extend(node.value)
            key = key[prefix_len:]
        return MatchResult(slots, node)

    def insert(self, key: RadixKey, value: Sequence[int]) -> int:
        """Store `key` (whole pages) with its slots.

        Returns:
            How many of its tokens were in the tree already. Their slots in `value` are not taken
            over: the caller still owns those, and the tree the rest.
        """
        assert len(key) % self.page_size == 0 and len(key) == len(value)
        node = self.root_node
        access_time = self._clock()
        node.last_access_time = access_time
        total_prefix_len = 0
        while len(key):
            child = node.children.get(self._child_key(key))
            if child is None:
                break
            child.last_access_time = access_time
            prefix_len = self._key_match(child.key, key)
            node = self._split_node(child, prefix_len) if prefix_len < len(child.key) else child
            total_prefix_len += prefix_len
            key, value = key[prefix_len:], value[prefix_len:]
        if len(key):
            # Later than the path to it: the clock is read anew, as upstream's node does when it is
            # made.
            leaf = TreeNode(node, key, list(value), self._clock())
            node.children[self._child_key(key)] = leaf
            self.evictable_size_ += len(key)
            self._update_leaf_status(node)
            self._update_leaf_status(leaf)
            if self.enable_kv_cache_events:
                self._record_store_event(leaf)
        return total_prefix_len

    def _page_aligned(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def _child_key(self, key: RadixKey) -> tuple[str | None, tuple[int, ...]]:
        """Siblings differ in their first page or in their name space."""
        return key.extra_key, tuple(key.token_ids[: self.page_size])

    def _key_match(self, a: RadixKey, b: RadixKey) -> int:
        """Length of the common prefix, in whole pages (it is at least one: see _child_key)."""
        length = min(len(a), len(b))
        if a.token_ids[:length] == b.token_ids[:length]:
            return length
        i = 0
        while a.token_ids[i : i + self.page_size] == b.token_ids[i : i + self.page_size]:
            i += self.page_size
        return i

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        """Cut `child` after `split_len` tokens and return the new node above it.

        The lower part stays the same object: requests that hold it as their last node go on holding
        the right one, and since locks count up to the root, the upper part is locked as often.
        """
        parent = child.parent
        assert parent is not None
        upper = TreeNode(
            parent, child.key[:split_len], child.value[:split_len], self._clock(), child.lock_ref
        )
        parent.children[self._child_key(child.key)] = upper
        child.parent = upper
        child.key = child.key[split_len:]
        child.value = child.value[split_len:]
        upper.children[self._child_key(child.key)] = child
        return upper

    # ---- locking and evicting --------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Lock `node` and all above it: what a request stands on cannot be evicted."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_size_ -= len(node.key)
                self.protected_size_ += len(node.key)
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undo one inc_lock_ref of `node`."""
        while node.parent is not None:
            assert node.lock_ref > 0
            if node.lock_ref == 1:
                self.evictable_size_ += len(node.key)
                self.protected_size_ -= len(node.key)
            node.lock_ref -= 1
            self._update_leaf_status(node)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` tokens' slots if so many are unlocked, oldest leaf first.

        A leaf goes whole; its parent may become a leaf by that and join the queue.

        Returns:
            The number of tokens freed.
        """
        heap = list(self.evictable_leaves)
        heapq.heapify(heap)
        num_evicted = 0
        while num_evicted < num_tokens and heap:
            leaf = heapq.heappop(heap)
            if self.enable_kv_cache_events:
                self._record_remove_event(leaf)
            self._free(leaf.value)
            num_evicted += len(leaf.value)
            parent = self._delete_leaf(leaf)
            if parent in self.evictable_leaves:
                heapq.heappush(heap, parent)
        return num_evicted

    def _delete_leaf(self, leaf: TreeNode) -> TreeNode:
        parent = leaf.parent
        assert parent is not None and not leaf.children and leaf.lock_ref == 0
        del parent.children[self._child_key(leaf.key)]
        self.evictable_size_ -= len(leaf.key)
        self.evictable_leaves.discard(leaf)
        self._update_leaf_status(parent)
        return parent

    def _update_leaf_status(self, node: TreeNode) -> None:
        """Keep `evictable_leaves` = nodes without children or locks (the root is locked)."""
        if node.lock_ref == 0 and not node.children:
            self.evictable_leaves.add(node)
        else:
            self.evictable_leaves.discard(node)

    # ---- events ----------------------------------------------------------------------------------

    def page_hashes(self, node: TreeNode) -> list[BlockHash]:
        """What vLLM would call the pages on the way from the root to the end of `node`."""
        path: list[TreeNode] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        hashes: list[BlockHash] = []
        for part in reversed(path):
            for start in range(0, len(part.key), self.page_size):
                salted = not hashes and part.key.extra_key is not None
                extra_keys = (part.key.extra_key,) if salted else ()
                page = part.key.token_ids[start : start + self.page_size]
                parent = hashes[-1] if hashes else None
                hashes.append(hash_block_tokens(parent, page, extra_keys))  # type: ignore[arg-type]
        return hashes

    def page_ids(self, node: TreeNode) -> list[int]:
        """The pages, which are the manager's blocks, that hold the tokens of `node`."""
        return [slot // self.page_size for slot in node.value[:: self.page_size]]

    def _record_store_event(self, node: TreeNode) -> None:
        hashes, page_ids = self.page_hashes(node), self.page_ids(node)
        num_before = len(hashes) - len(page_ids)
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=hashes[num_before:],
                parent_block_hash=hashes[num_before - 1] if num_before else None,
                token_ids=node.key.token_ids,
                block_size=self.page_size,
                block_ids=page_ids,
            )
        )

    def _record_remove_event(self, node: TreeNode) -> None:
        page_ids = self.page_ids(node)
        hashes = self.page_hashes(node)[-len(page_ids) :]
        self.kv_event_queue.append(BlockRemoved(hashes, page_ids))

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, in order."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events


@dataclass(slots=True)
class RadixKVCacheBlocks(KVCacheBlocks):
    """Hit blocks, and the node at which the match ended, to be locked when they are taken."""

    last_node: TreeNode


@dataclass(slots=True)
class _RequestState:
    """What the manager knows of a request that holds blocks.

    blocks      b5   b2   b9   b4
                |- cached ---|         num_cached_tokens: published, or found, up to here
                             ^ last_node, locked by this request
    """

    request: Request
    blocks: list[KVCacheBlock]
    last_node: TreeNode
    num_cached_tokens: int
    # Somebody else's copy of its next page is in the tree: it publishes no more until it ends.
    is_private: bool = False


class RadixKVCacheManager:
    """KVCacheManager's calls, answered out of a RadixCache; the scheduler cannot tell.

    One page is one block. A block's `ref_cnt` counts the block tables that hold it, and one more if
    the tree does, so it is in the free queue exactly when nobody can read it.

        free queue -- get_new_blocks --> table only -- published --> table and tree
             ^                               |                             |
             |   request ends: duplicates    |                             | request ends
             +-------- and partial pages ----+                             v
             +------------------------- evict (least recent leaf) ----- tree only

    Pages are published after the step that computes them, at the start of the next
    (`new_step_starts`), and when a request ends or is preempted. KVCacheManager publishes before,
    so two requests of one step share there and not here.

    Two departures from SGLang. `cache_unfinished_req` maps a running request onto the tree's copy
    when somebody else has published the same page meanwhile; here block tables are append-only, as
    the runner expects, so the request keeps its own copy, private, frees it when it ends or is
    preempted, and until then publishes nothing that follows. (mini-sglang issue 142 is what happens
    when it is freed while still mapped: another request overwrites it.) And decoded pages are
    published while the request runs, not only when it ends.
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
        # Contents are the tree's business, so the pool caches nothing.
        self.block_pool = BlockPool(num_gpu_blocks, enable_caching=False)
        self.radix_cache = RadixCache(block_size, free=self._free_evicted_slots)
        self.req_to_state: dict[str, _RequestState] = {}
        self.empty_kv_cache_blocks = RadixKVCacheBlocks((), self.radix_cache.root_node)

    @property
    def req_to_blocks(self) -> dict[str, list[KVCacheBlock]]:
        """Block tables, for traces and tests."""
        return {req_id: state.blocks for req_id, state in self.req_to_state.items()}

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0.0 to 1.0."""
        total = self.block_pool.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and those the tree would give up."""
        num_evictable = self.radix_cache.evictable_size() // self.block_size
        return self.block_pool.get_num_free_blocks() + num_evictable

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """Hit counts since the last call."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def enable_kv_cache_events(self, enabled: bool) -> None:
        """Record stores and evictions from now on, or stop."""
        self.radix_cache.enable_kv_cache_events = enabled

    def take_events(self) -> list[KVCacheEvent]:
        """What was stored and evicted since the last call."""
        return self.radix_cache.take_events()

    def new_step_starts(self) -> None:
        """Publish what the steps so far have computed for running requests."""
        for state in self.req_to_state.values():
            request = state.request
            self._publish(state, min(request.num_computed_tokens, request.num_tokens))

    def get_computed_blocks(self, request: Request) -> tuple[RadixKVCacheBlocks, int]:
        """Find the longest cached prefix; as KVCacheManager.get_computed_blocks."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # The last token is always computed: its hidden state gives the next token.
        key = RadixKey(request.all_token_ids[: request.num_tokens - 1], request.cache_salt)
        match = self.radix_cache.match_prefix(key)
        num_computed_tokens = len(match.device_indices)
        if self.log_stats:
            self.prefix_cache_stats.record(
                request.num_tokens, num_computed_tokens, preempted=request.num_preemptions > 0
            )
        blocks = self._blocks_of_slots(match.device_indices)
        return RadixKVCacheBlocks(blocks, match.last_device_node), num_computed_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Give `request` room for `num_new_tokens` more; as KVCacheManager.allocate_slots."""
        assert num_new_tokens > 0
        state = self.req_to_state.get(request.request_id)
        is_new = state is None
        if state is None:
            hit = new_computed_blocks or self.empty_kv_cache_blocks
            last_node = hit.last_node if isinstance(hit, RadixKVCacheBlocks) else None
            state = _RequestState(
                request,
                list(hit.blocks),
                last_node or self.radix_cache.root_node,
                num_new_computed_tokens,
            )
            # Locked before anything is evicted: the hit may be the oldest leaf.
            self.radix_cache.inc_lock_ref(state.last_node)

        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = min(num_computed_tokens + num_new_tokens, self.max_model_len)
        num_needed = cdiv(num_tokens, self.block_size) - len(state.blocks)
        num_must_fit = num_needed
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            num_must_fit = max(num_needed, cdiv(whole, self.block_size) - len(state.blocks))
        if num_must_fit > self.get_num_free_blocks():
            if is_new:
                self.radix_cache.dec_lock_ref(state.last_node)
            return None

        if is_new:
            self.block_pool.touch(state.blocks)
            self.req_to_state[request.request_id] = state
        if num_needed <= 0:
            return self.empty_kv_cache_blocks
        num_missing = num_needed - self.block_pool.get_num_free_blocks()
        if num_missing > 0:
            self.radix_cache.evict(num_missing * self.block_size)
        new_blocks = self.block_pool.get_new_blocks(num_needed)
        state.blocks.extend(new_blocks)
        return KVCacheBlocks(new_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the pages that the request's first `num_computed_tokens` tokens fill."""
        self._publish(self.req_to_state[request.request_id], num_computed_tokens)

    def free(self, request: Request) -> None:
        """Publish what the request has computed, then give back its table and its lock."""
        state = self.req_to_state.pop(request.request_id, None)
        if state is None:
            return
        num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_tokens = num_computed_tokens // self.block_size * self.block_size
        if self.enable_caching and num_tokens > state.num_cached_tokens:
            self._insert(state, num_tokens)
        self.radix_cache.dec_lock_ref(state.last_node)
        # The tree holds on to the published pages; duplicates and partial pages become free.
        self.block_pool.free_blocks(reversed(state.blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        if self.req_to_state:
            return False
        self.radix_cache.evict(self.radix_cache.total_size())
        return True

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole block table."""
        state = self.req_to_state.get(request_id)
        return KVCacheBlocks(state.blocks if state is not None else ())

    def get_block_ids(self, request_id: str) -> list[int]:
        """The ids in the request's block table."""
        return self.get_blocks(request_id).get_block_ids()

    def _publish(self, state: _RequestState, num_computed_tokens: int) -> None:
        """Insert a running request's full pages into the tree and stand on them."""
        num_tokens = num_computed_tokens // self.block_size * self.block_size
        if not self.enable_caching or state.is_private or num_tokens <= state.num_cached_tokens:
            return
        request = state.request
        key = RadixKey(request.all_token_ids[:num_tokens], request.cache_salt)
        num_found = len(self.radix_cache.match_prefix(key).device_indices)
        if num_found > state.num_cached_tokens:
            # Somebody has published these pages meanwhile. To lock that copy beside its own would
            # hold the content twice, and a request that just fits would not fit beside itself.
            state.is_private = True
            return
        self._insert(state, num_tokens)
        last_node = self.radix_cache.match_prefix(key).last_device_node
        self.radix_cache.inc_lock_ref(last_node)
        self.radix_cache.dec_lock_ref(state.last_node)
        state.last_node = last_node
        state.num_cached_tokens = num_tokens

    def _insert(self, state: _RequestState, num_tokens: int) -> None:
        """Give the tree those of the request's first `num_tokens` (whole pages) that it lacks."""
        request = state.request
        key = RadixKey(request.all_token_ids[:num_tokens], request.cache_salt)
        num_pages = num_tokens // self.block_size
        num_found = self.radix_cache.insert(key, self._slots_of_blocks(state.blocks[:num_pages]))
        # What was found is somebody's copy (or our own from before); the tree holds on to the rest.
        self.block_pool.touch(state.blocks[num_found // self.block_size : num_pages])

    def _slots_of_blocks(self, blocks: Sequence[KVCacheBlock]) -> list[int]:
        size = self.block_size
        return [slot for b in blocks for slot in range(b.block_id * size, (b.block_id + 1) * size)]

    def _blocks_of_slots(self, slots: Sequence[int]) -> list[KVCacheBlock]:
        pool, size = self.block_pool.blocks, self.block_size
        return [pool[slots[i] // size] for i in range(0, len(slots), size)]

    def _free_evicted_slots(self, slots: list[int]) -> None:
        """The tree lets go of a leaf. Its tail joins the free queue first, to be reused first."""
        self.block_pool.free_blocks(reversed(self._blocks_of_slots(slots)))
