"""What both KV-cache managers owe the scheduler, whichever way they find shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.v1.core.kv_cache_manager import KVCacheManager
from nanovllm.v1.core.kv_cache_utils import KVCacheBlock, cdiv
from nanovllm.v1.core.radix_cache import RadixKVCacheManager
from nanovllm.v1.request import Request
from tests.spec.blocks import BlockAccounting
from tests.spec.support import PROMPTS, SALTS, VOCAB, Context, make_request, one_of_its

MAX_MODEL_LEN = 24


class Manager(BlockAccounting):
    """KVCacheManager and RadixKVCacheManager alike.

    `contents` says what each block holds, or will hold once the steps planned so far have run: the
    salt, and all tokens from the start of the sequence to the last one in the block. `freed_at`
    says when each free block was freed: (time, minus its place in the table).
    """

    manager: KVCacheManager | RadixKVCacheManager

    def make_manager(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError

    def findable(self) -> list[tuple[Context | None, int]]:
        """(content that is looked for, id of the block that is then found), of all cached."""
        raise NotImplementedError

    def num_available(self, hit: Sequence[KVCacheBlock]) -> int:
        """Blocks that could be handed out if `hit` were held."""
        raise NotImplementedError

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(4, 12))
    def a_manager_is_made(self, block_size: int, num_blocks: int) -> None:
        """Everything is free, nothing cached."""
        self.block_size = block_size
        self.make_manager(num_blocks, block_size)
        self.pool = self.manager.block_pool
        self.requests: dict[str, Request] = {}
        self.planned: dict[str, int] = {}  # tokens given by the step that is being planned
        self.contents: dict[int, Context] = {}
        self.freed_at = {block_id: (0, block_id) for block_id in range(1, num_blocks)}
        self.clock = 0
        self.num_requests = 0

    # ---- what the rules need to know -------------------------------------------------------------

    def tables(self) -> list[Sequence[KVCacheBlock]]:
        return list(self.manager.req_to_blocks.values())

    @property
    def idle_requests(self) -> list[str]:
        """Requests that hold blocks and are not in the step being planned."""
        return [req_id for req_id in self.requests if req_id not in self.planned]

    @property
    def requests_to_extend(self) -> list[str]:
        """Idle requests with a token to compute: known, or (async) the one being sampled."""
        idle = [self.requests[req_id] for req_id in self.idle_requests]
        return [
            request.request_id
            for request in idle
            if request.num_computed_tokens <= min(request.num_tokens, MAX_MODEL_LEN - 1)
        ]

    @property
    def requests_to_sample(self) -> list[str]:
        """Requests all of whose known tokens are computed."""
        return [
            req_id
            for req_id, request in self.requests.items()
            if request.num_computed_tokens >= request.num_tokens < MAX_MODEL_LEN
        ]

    def num_given(self, request: Request) -> int:
        """Tokens computed, or given to be computed."""
        return request.num_computed_tokens + self.planned.get(request.request_id, 0)

    def context(self, request: Request, end: int) -> Context:
        return request.cache_salt, tuple(request.all_token_ids[:end])

    def longest_hit(self, request: Request) -> list[Context]:
        """Brute force: the request's full blocks, from the first on, that somebody has cached."""
        cached = {context for context, _ in self.findable()}
        hit: list[Context] = []
        for end in range(self.block_size, request.num_tokens, self.block_size):
            if self.context(request, end) not in cached:
                break
            hit.append(self.context(request, end))
        return hit

    def fill_blocks(self, request: Request) -> None:
        """Note what the request's blocks hold after the planned step."""
        num_tokens = min(self.num_given(request), request.num_tokens)
        for i, block in enumerate(self.manager.req_to_blocks[request.request_id]):
            end = min((i + 1) * self.block_size, num_tokens)
            if end > i * self.block_size:
                self.contents[block.block_id] = self.context(request, end)

    def allocate(
        self,
        request: Request,
        num_new: int,
        hit: Any = None,
        num_hit: int = 0,
        reserve: bool = False,
    ) -> bool:
        """allocate_slots, with everything that must be true of it. False: there is no room."""
        req_id = request.request_id
        hit_blocks = list(hit.blocks) if hit else []
        hit_ids = {block.block_id for block in hit_blocks}
        before = [b.block_id for b in self.manager.req_to_blocks.get(req_id, ())]
        queue_before = self.free_ids()
        available = self.num_available(hit_blocks)
        num_tokens = min(self.num_given(request) + num_hit + num_new, MAX_MODEL_LEN)
        num_needed = cdiv(num_tokens, self.block_size) - len(before) - len(hit_blocks)
        must_fit = max(num_tokens, request.num_tokens) if reserve else num_tokens
        num_must_fit = cdiv(must_fit, self.block_size) - len(before) - len(hit_blocks)

        new = self.manager.allocate_slots(
            request,
            num_new,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=hit,
            full_sequence_must_fit=reserve,
        )
        table = [b.block_id for b in self.manager.req_to_blocks.get(req_id, ())]
        if new is None:
            assert num_must_fit > available, "refused, though it fits"
            assert table == before, "a refused request keeps the table it had"
            assert self.free_ids() == queue_before, "a refusal changes nothing"
            return False

        assert num_must_fit <= available, "given more than there is"
        new_ids = new.get_block_ids()
        assert table == before + [b.block_id for b in hit_blocks] + new_ids
        assert len(new_ids) == max(num_needed, 0), "one block for every block_size tokens"
        in_line = [i for i in queue_before if i not in hit_ids] + self.give_back_evicted()
        assert new_ids == in_line[: len(new_ids)], "first in line, first taken"
        for block_id in [*hit_ids, *new_ids]:
            self.freed_at.pop(block_id, None)
        for block_id in new_ids:
            self.contents.pop(block_id, None)
        return True

    def give_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note when blocks, given back in this order, were freed."""
        self.clock += 1
        for place, block in enumerate(blocks):
            if block.ref_cnt == 0:
                self.freed_at[block.block_id] = (self.clock, place)

    # ---- what may happen -------------------------------------------------------------------------

    @rule(prompt=PROMPTS, salt=SALTS, chunk=st.integers(1, 12), reserve=st.booleans())
    def a_request_is_admitted(
        self, prompt: list[int], salt: str | None, chunk: int, reserve: bool
    ) -> None:
        """It gets the longest cached prefix, short of its last token, and blocks for its chunk."""
        request = make_request(f"r{self.num_requests}", prompt, self.block_hasher(), salt)
        self.num_requests += 1
        expected = self.longest_hit(request)
        holds = {block_id: context for context, block_id in self.findable()}

        hit, num_hit = self.manager.get_computed_blocks(request)
        assert num_hit == len(expected) * self.block_size, "the longest match there is"
        assert num_hit < request.num_tokens, "the last token is computed, cached or not"
        assert [holds.get(block_id) for block_id in hit.get_block_ids()] == expected
        self.note_names(request)

        num_new = min(request.num_tokens - num_hit, chunk)
        if self.allocate(request, num_new, hit, num_hit, reserve):
            self.requests[request.request_id] = request
            request.num_computed_tokens = num_hit
            self.planned[request.request_id] = num_new
            self.fill_blocks(request)

    @precondition(lambda self: self.requests_to_extend)
    @rule(req_id=one_of_its("requests_to_extend"), chunk=st.integers(1, 6))
    def a_running_request_goes_on(self, req_id: str, chunk: int) -> None:
        """Its table grows at the end, by blocks for tokens known or (async) just being sampled."""
        request = self.requests[req_id]
        todo = max(request.num_tokens - self.num_given(request), 1)
        num_new = min(todo, chunk)
        if self.allocate(request, num_new):
            self.planned[req_id] = num_new
            self.fill_blocks(request)

    @precondition(lambda self: self.planned)
    @rule()
    def the_planned_step_runs(self) -> None:
        """The tokens it was given count as computed, and the next step is planned."""
        for req_id, num_new in self.planned.items():
            self.requests[req_id].num_computed_tokens += num_new
        self.planned.clear()
        self.manager.new_step_starts()

    @precondition(lambda self: self.requests_to_sample)
    @rule(req_id=one_of_its("requests_to_sample"), token=st.integers(0, VOCAB - 1))
    def a_token_becomes_known(self, req_id: str, token: int) -> None:
        """A token sampled before its slot is given (sync) or after (async) may complete a block."""
        request = self.requests[req_id]
        request.append_output_token_ids(token)
        self.note_names(request)
        self.fill_blocks(request)
        self.manager.cache_blocks(request, self.num_publishable(request))

    @precondition(lambda self: self.idle_requests)
    @rule(req_id=one_of_its("idle_requests"))
    def a_request_ends_or_is_preempted(self, req_id: str) -> None:
        """Its blocks are given back, tail first; what others hold stays held."""
        request = self.requests.pop(req_id)
        table = list(self.manager.req_to_blocks[req_id])
        self.manager.free(request)
        self.give_back(table[::-1])
        assert req_id not in self.manager.req_to_blocks

    @rule()
    def the_prefix_cache_is_reset(self) -> None:
        """It forgets everything, but refuses while any request holds blocks."""
        assert self.manager.reset_prefix_cache() == (not self.requests)
        if not self.requests:
            assert self.findable() == []
            self.give_back_evicted()

    # ---- where the two differ --------------------------------------------------------------------

    def block_hasher(self) -> Any:
        return None

    def note_names(self, request: Request) -> None:
        """Remember which names (hashes) the request gives to its full blocks."""

    def give_back_evicted(self) -> list[int]:
        """Note, and return, the blocks that a tree has let go of since the last call."""
        return []

    def num_publishable(self, request: Request) -> int:
        """Tokens that count as computed when a token becomes known."""
        raise NotImplementedError

    # ---- what always holds -----------------------------------------------------------------------

    @invariant()
    def a_block_found_by_content_holds_that_content(self) -> None:
        """What is found was computed from the same tokens, after the same tokens, with one salt."""
        for context, block_id in self.findable():
            assert context is not None
            assert self.contents.get(block_id) == context

    @invariant()
    def a_partial_block_is_never_found(self) -> None:
        """Whatever can be found is full."""
        for context, _ in self.findable():
            assert context is not None
            assert len(context[1]) % self.block_size == 0

    @invariant()
    def free_blocks_wait_in_lru_order_tails_before_heads(self) -> None:
        """The free queue is in the order of freeing, and of one request the tail goes first."""
        assert self.free_ids() == sorted(self.freed_at, key=self.freed_at.__getitem__)

    @invariant()
    def tables_are_those_of_the_living(self) -> None:
        """Exactly the requests that were admitted and have not ended have a table, long enough."""
        assert set(self.manager.req_to_blocks) == set(self.requests)
        for req_id, request in self.requests.items():
            num_blocks = len(self.manager.get_block_ids(req_id))
            assert num_blocks == cdiv(self.num_given(request), self.block_size)
