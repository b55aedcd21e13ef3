"""BlockStored, BlockRemoved and AllBlocksCleared, as the pool and the radix tree record them."""

from __future__ import annotations

import subprocess
import sys

from nanovllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.kv_cache_manager import KVCacheManager
from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
from nanovllm.v1.core.radix_cache import RadixCache, RadixKey, RadixKVCacheManager
from nanovllm.v1.request import Request

Manager = KVCacheManager | RadixKVCacheManager


def make_request(name: str, token_ids: list[int], salt: str | None = None) -> Request:
    hasher = get_request_block_hasher(2)
    params = SamplingParams(max_tokens=1)
    return Request(name, token_ids, params, cache_salt=salt, block_hasher=hasher)


def run(manager: Manager, request: Request) -> None:
    """Admit, compute, end."""
    blocks, num_cached = manager.get_computed_blocks(request)
    num_new_tokens = request.num_tokens - num_cached
    assert manager.allocate_slots(request, num_new_tokens, num_cached, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    manager.free(request)


def test_the_pool_tells_of_stores_evictions_and_clearing() -> None:
    manager = KVCacheManager(4, 2, 16)
    manager.enable_kv_cache_events(True)
    first = make_request("a", [1, 2, 3, 4, 5])
    run(manager, first)
    assert manager.take_events() == [BlockStored(first.block_hashes, None, [1, 2, 3, 4], 2, [1, 2])]
    # A hit on the first block; 2 held the second, and is taken after 3 (a's tail went first).
    second = make_request("b", [1, 2, 6, 7, 8, 9])
    run(manager, second)
    h1, h2 = first.block_hashes
    assert manager.take_events() == [
        BlockRemoved([h2], [2]),
        BlockStored(second.block_hashes[1:], h1, [6, 7, 8, 9], 2, [3, 2]),
    ]
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.take_events() == []


def test_the_tree_tells_the_same_by_the_same_hashes() -> None:
    """Whole leaves are evicted; the tree's own splits are no event."""
    manager = RadixKVCacheManager(4, 2, 16)
    manager.enable_kv_cache_events(True)
    first = make_request("a", [1, 2, 3, 4, 5])
    run(manager, first)
    assert manager.take_events() == [BlockStored(first.block_hashes, None, [1, 2, 3, 4], 2, [1, 2])]
    second = make_request("b", [1, 2, 6, 7, 8, 9])
    run(manager, second)
    h1, h2 = first.block_hashes
    assert manager.take_events() == [
        BlockRemoved([h2], [2]),
        BlockStored(second.block_hashes[1:], h1, [6, 7, 8, 9], 2, [3, 2]),
    ]
    assert manager.reset_prefix_cache()
    removed = [
        event.block_ids for event in manager.take_events() if isinstance(event, BlockRemoved)
    ]
    assert sorted(i for ids in removed for i in ids) == [1, 2, 3]


def test_salted_pages_have_the_hashes_of_salted_blocks() -> None:
    request = make_request("a", [1, 2, 3, 4], salt="tenant")
    cache = RadixCache(page_size=2, enable_kv_cache_events=True)
    cache.take_events()
    cache.insert(RadixKey([1, 2, 3, 4], "tenant"), [2, 3, 4, 5])
    assert cache.take_events() == [BlockStored(request.block_hashes, None, [1, 2, 3, 4], 2, [1, 2])]


def test_nothing_is_recorded_unless_asked_for() -> None:
    for manager in (KVCacheManager(4, 2, 16), RadixKVCacheManager(4, 2, 16)):
        run(manager, make_request("a", [1, 2, 3, 4, 5]))
        run(manager, make_request("b", [1, 2, 6, 7, 8, 9]))
        manager.reset_prefix_cache()
        assert manager.take_events() == []


def test_the_events_need_no_torch() -> None:
    code = "import sys, nanovllm.distributed.kv_events; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
