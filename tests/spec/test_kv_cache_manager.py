"""KVCacheManager: block tables, and vLLM's prefix cache of hash chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis.stateful import invariant

from nanovllm.v1.core.kv_cache_manager import KVCacheManager
from nanovllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher
from nanovllm.v1.request import Request
from tests.spec.managers import MAX_MODEL_LEN, Manager
from tests.spec.support import Context, ci_examples


class HashManager(Manager):
    """Beside the manager, `names`: which content every hash ever computed stands for."""

    manager: KVCacheManager

    def make_manager(self, num_blocks: int, block_size: int) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, MAX_MODEL_LEN)
        self.names: dict[bytes, Context] = {}
        self.hasher = get_request_block_hasher(block_size)

    def block_hasher(self) -> Any:
        return self.hasher

    def note_names(self, request: Request) -> None:
        for i, name in enumerate(request.block_hashes):
            context = self.context(request, (i + 1) * self.block_size)
            assert self.names.setdefault(name, context) == context, "one hash, two contents"

    def findable(self) -> list[tuple[Context | None, int]]:
        found = []
        for name, blocks in self.pool.cached_block_hash_to_block._cache.items():
            for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
                found.append((self.names.get(name), block.block_id))
        return found

    def num_available(self, hit: Sequence[KVCacheBlock]) -> int:
        free = set(self.free_ids())
        return len(free - {block.block_id for block in hit})

    def num_publishable(self, request: Request) -> int:
        return min(self.num_given(request), request.num_tokens)

    @invariant()
    def one_content_has_one_name(self) -> None:
        """A hash depends on the tokens, on all tokens before them, on the salt, on nothing else."""
        assert len(set(self.names.values())) == len(self.names)

    @invariant()
    def a_full_block_is_published_by_the_schedule_that_completes_it(self) -> None:
        """Found is each full block whose tokens are known and given to compute, and no other."""
        for req_id, request in self.requests.items():
            num_full = self.num_publishable(request) // self.block_size
            for i, block in enumerate(self.manager.req_to_blocks[req_id]):
                assert (block.block_hash is not None) == (i < num_full), (req_id, i)

    @invariant()
    def a_block_bears_the_hash_it_is_found_by(self) -> None:
        """The index of hashes and the blocks' own hashes say the same."""
        found = {block_id for _, block_id in self.findable()}
        assert found == {b.block_id for b in self.pool.blocks if b.block_hash is not None}


TestHashManager = HashManager.TestCase
TestHashManager.settings = ci_examples(100)
