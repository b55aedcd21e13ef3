"""The pieces the KV cache is kept in order with: blocks, the queue of free ones, hashes, sizes.

Upstream: vllm/v1/core/kv_cache_utils.py (0.23.0)
Left out: several KV-cache groups (a block hash needs no group id), extra keys for LoRA, images and
prompt embeddings, hash functions other than SHA-256.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NewType

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.request import Request

BlockHash = NewType("BlockHash", bytes)

# Parent of every first block. Upstream draws it at random unless PYTHONHASHSEED is set, so that
# hashes cannot be precomputed by a stranger sharing the cache; ours is fixed so that runs repeat
# exactly.
NONE_HASH = BlockHash(hashlib.sha256(b"nanovllm: no parent block").digest())

TOKEN_ID_BYTES = 8
HASHES_REMEMBERED = 1 << 16  # about 25 MB when full, with blocks of 16


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


@dataclass(eq=False, slots=True)
class KVCacheBlock:
    """What the scheduler knows about one block of the paged KV cache.

    `block_id` is the block's row in every layer's cache tensor. The two links belong to
    FreeKVCacheBlockQueue alone.
    """

    block_id: int
    # Number of block tables that hold the block. 0: it is in the free queue (the null block aside).
    ref_cnt: int = 0
    # Set when the block is full and published for reuse; survives in the free queue until evicted.
    block_hash: BlockHash | None = None
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None
    is_null: bool = False

    def reset_hash(self) -> None:
        """Forget what the block holds (it is being evicted)."""
        self.block_hash = None

    def __repr__(self) -> str:  # the links would recurse through the whole queue
        name = None if self.block_hash is None else self.block_hash.hex()[:8]
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={name})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be taken: a doubly linked list through them.

        head <-> b3 <-> b7 <-> b1 <-> tail        num_free_blocks = 3
         |       ^ taken next  ^ freed last
         fake, never taken

    A deque would do for taking from the left and freeing to the right. But a prefix-cache hit takes
    a block out of the middle, and with links that costs O(1) and allocates nothing. The fake head
    and tail spare every operation the question of whether it stands at an end.

    Order is the eviction policy: blocks are freed to the right, so the left end is the least
    recently used; KVCacheManager.free hands over a request's blocks tail first, so that of one
    request the tail goes before the head, which more requests can share.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the block that is first in line.

        Raises:
            ValueError: no block is free.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the `n` first blocks, in order.

        Raises:
            ValueError: fewer than `n` blocks are free; none is taken.
        """
        if n > self.num_free_blocks:
            raise ValueError(f"cannot take {n} free blocks: {self.num_free_blocks} are free")
        if n == 0:
            return []
        blocks: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        for _ in range(n):
            assert block is not None
            blocks.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self.fake_free_list_head.next_free_block = block
        block.prev_free_block = self.fake_free_list_head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` from wherever it stands in the queue (it was hit by a prefix).

        Raises:
            RuntimeError: the block is not in the queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"{block} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the end of the line, the first of them first."""
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = last
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The whole queue in order (for tests and traces; walks every link)."""
        blocks: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks


def hash_block_tokens(
    parent_block_hash: BlockHash | None,
    token_ids: Sequence[int],
    extra_keys: tuple[str, ...] = (),
) -> BlockHash:
    """Name a full block by everything its keys and values depend on.

    A token's key and value depend on all tokens before it, so the hash chains: parent, tokens, and
    what else tells one context from another (`extra_keys`: the cache salt, in the first block; the
    chain carries it on). Two blocks with one hash hold the same keys and values, up to SHA-256
    collisions.
    """
    return _hash_block(parent_block_hash, array("q", token_ids).tobytes(), extra_keys)


def _hash_block(
    parent_block_hash: BlockHash | None, tokens: bytes, extra_keys: tuple[str, ...]
) -> BlockHash:
    """`hash_block_tokens` of token ids as bytes, TOKEN_ID_BYTES each."""
    name = (parent_block_hash or NONE_HASH) + tokens
    for key in extra_keys:
        encoded = key.encode()
        name += len(encoded).to_bytes(8, "little") + encoded
    return BlockHash(hashlib.sha256(name).digest())


def get_request_block_hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    """Make the function with which a request hashes its blocks as they fill up.

    It returns the hashes of blocks that are full but not in `request.block_hashes` yet. Only tokens
    that are known count: a partly filled block has no hash.
    """
    # Prompts that share a beginning ask for the same hashes, and looking one up is quicker.
    hash_block = lru_cache(maxsize=HASHES_REMEMBERED)(_hash_block)

    def request_block_hasher(request: Request) -> list[BlockHash]:
        start = len(request.block_hashes) * block_size
        if start + block_size > request.num_tokens:
            return []
        hashes: list[BlockHash] = []
        parent = request.block_hashes[-1] if request.block_hashes else None
        # The salt enters the first block only; every later hash has it through its parent.
        salted = start == 0 and request.cache_salt is not None
        extra_keys: tuple[str, ...] = (request.cache_salt,) if salted else ()  # type: ignore[assignment]
        # As bytes at once: a prompt of thousands of tokens is hashed before its first step.
        tokens = array("q", request.all_token_ids[start:]).tobytes()
        block_bytes = block_size * TOKEN_ID_BYTES
        for i in range(0, len(tokens) - block_bytes + 1, block_bytes):
            parent = hash_block(parent, tokens[i : i + block_bytes], extra_keys)
            extra_keys = ()
            hashes.append(parent)
        return hashes

    return request_block_hasher


def get_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_spec: FullAttentionSpec, available_memory: int
) -> KVCacheConfig:
    """Turn bytes into blocks, and make sure that one request of full length fits.

    Args:
        available_memory: bytes the worker can spare for the KV cache.

    Raises:
        VLLMValidationError: the cache could not hold a single request of `max_model_len` tokens,
            which would then wait for ever. The null block does not count: it never holds tokens.
    """
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    num_layers = model_config.get_num_layers()
    num_blocks = cache_config.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = max(available_memory, 0) // (num_layers * kv_cache_spec.page_size_bytes)

    max_model_len = vllm_config.scheduler_config.max_model_len
    num_needed = cdiv(max_model_len, kv_cache_spec.block_size) + 1
    if num_blocks < num_needed:
        longest = max(num_blocks - 1, 0) * kv_cache_spec.block_size
        raise VLLMValidationError(
            f"the KV cache has {num_blocks} blocks of {kv_cache_spec.block_size} tokens (one of "
            "them the null block), too few for one request of max_model_len "
            f"{max_model_len}, which needs {num_needed}; the longest that fits is {longest}: "
            "lower max_model_len to that, or raise num_gpu_blocks_override, kv_cache_memory_bytes "
            "or gpu_memory_utilization.",
            parameter="max_model_len",
            value=max_model_len,
        )
    return KVCacheConfig(num_blocks=num_blocks, num_layers=num_layers, kv_cache_spec=kv_cache_spec)
