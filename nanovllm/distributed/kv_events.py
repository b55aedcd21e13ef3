"""What happened to cached blocks: stored (can be found from now on), removed, all cleared.

A router that sends requests to the engine that has their prefix listens to these; here traces do.

Upstream: vllm/distributed/kv_events.py (0.23.0). `block_ids` is ours: hashes name contents, and two
blocks may hold the same.
Left out: msgspec structs, batches and their publishers (ZMQ), LoRA, media other than the GPU, extra
keys, KV-cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.v1.core.kv_cache_utils import BlockHash


@dataclass
class KVCacheEvent:
    """Base of the events."""


@dataclass
class BlockStored(KVCacheEvent):
    """Consecutive blocks of one sequence were published; `block_size` tokens each."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the block before the first; None: it begins the text
    token_ids: list[int]
    block_size: int
    block_ids: list[int]


@dataclass
class BlockRemoved(KVCacheEvent):
    """Blocks can no longer be found: they will hold something else, or were never filled."""

    block_hashes: list[BlockHash]
    block_ids: list[int]


@dataclass
class AllBlocksCleared(KVCacheEvent):
    """The whole prefix cache was forgotten."""
