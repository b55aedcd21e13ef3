"""Bytes moved against bytes needed, for every step of the staircase.

*Needed* is what any implementation must move: each input read once, each output written once.
*Moved* is what this one asks of the memory system (of the L2 cache or what lies behind it). Their
ratio is the most that a better arrangement of the same arithmetic can gain where memory is the
limit; FLOPs over needed bytes say whether it is.

Plain arithmetic, no tensors. The tests run the kernels and the torch code on small sizes, count
every element they load and store, and find these numbers.

Upstream: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SECTOR = 32
"""Bytes: the smallest piece in which a GPU's caches and memory are read."""

WARP = 32
"""Threads that issue one load together."""


@dataclass(frozen=True)
class Traffic:
    """What one way of computing something costs.

    Attributes:
        step: its name.
        needed: bytes no implementation can avoid.
        moved: bytes this one reads and writes.
        flops: floating-point operations, an exponential counted as one.
        note: where the bytes go.
    """

    step: str
    needed: int
    moved: int
    flops: int
    note: str = ""

    @property
    def ratio(self) -> float:
        """Bytes moved for each byte needed; 1 is ideal."""
        return self.moved / self.needed

    @property
    def intensity(self) -> float:
        """FLOPs for each byte needed."""
        return self.flops / self.needed


def strided_load(stride: int, itemsize: int) -> Traffic:
    """One load of one warp, thread i at element i * stride: whole sectors are fetched.

    Args:
        stride: elements between one thread's and the next one's.
        itemsize: bytes an element.
    """
    sectors: set[int] = set()
    for thread in range(WARP):
        first = thread * stride * itemsize
        sectors.update(range(first // SECTOR, (first + itemsize - 1) // SECTOR + 1))
    return Traffic(
        f"warp load, stride {stride}", WARP * itemsize, len(sectors) * SECTOR, 0,
        f"{len(sectors)} sectors of {SECTOR} bytes",
    )  # fmt: skip


def softmax_unfused(rows: int, cols: int, itemsize: int) -> Traffic:
    """`softmax_reference`: five operations, each from memory to memory."""
    matrix, column = rows * cols * itemsize, rows * itemsize
    moved = (
        (matrix + column)  # max
        + (2 * matrix + column)  # subtract
        + 2 * matrix  # exp
        + (matrix + column)  # sum
        + (2 * matrix + column)  # divide
    )
    return Traffic(
        "softmax, one call an operation", 2 * matrix, moved, 5 * rows * cols, "5 reads, 3 writes"
    )


def softmax_fused(rows: int, cols: int, itemsize: int) -> Traffic:
    """`softmax`: a row stays in registers."""
    matrix = rows * cols * itemsize
    return Traffic("softmax, fused", 2 * matrix, 2 * matrix, 5 * rows * cols, "1 read, 1 write")


def softmax_online(rows: int, cols: int, itemsize: int, num_splits: int = 1) -> Traffic:
    """`online_softmax`: a row does not stay; with several splits, states pass through memory."""
    matrix = rows * cols * itemsize
    states = rows * num_splits * 8 if num_splits > 1 else 0
    # Every split writes its state; every split reads the states of all.
    return Traffic(
        "softmax, online", 2 * matrix, 3 * matrix + states + states * num_splits, 8 * rows * cols,
        "2 reads, 1 write",
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a prefill: as many keys as queries, one dtype."""

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int
    causal: bool = True

    @property
    def query_bytes(self) -> int:
        """Of q, and of the output."""
        return self.batch * self.seq_len * self.num_heads * self.head_size * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of k and v together."""
        return 2 * self.batch * self.seq_len * self.num_kv_heads * self.head_size * self.itemsize

    @property
    def needed(self) -> int:
        return 2 * self.query_bytes + self.kv_bytes

    @property
    def flops(self) -> int:
        """Of the two products; half of them if causal, as benchmarks count."""
        pairs = self.batch * self.num_heads * self.seq_len**2
        return 4 * pairs * self.head_size // (2 if self.causal else 1)


def attention_unfused(shape: AttentionShape) -> Traffic:
    """`attention_reference`, each KV head with its own query head: scores pass through memory."""
    scores = shape.batch * shape.num_heads * shape.seq_len**2 * shape.itemsize
    moved = 2 * shape.query_bytes  # scale q
    moved += shape.query_bytes + shape.kv_bytes // 2 + scores  # q k^T
    if shape.causal:
        moved += 2 * scores + shape.seq_len**2  # mask; the mask itself is one byte a pair
    moved += 2 * scores  # softmax, itself fused
    moved += scores + shape.kv_bytes // 2 + shape.query_bytes  # probabilities times v
    note = f"{scores / 1e6:.3g} MB of scores, {6 if shape.causal else 4} times"
    return Traffic("attention, scores in memory", shape.needed, moved, shape.flops, note)


def attention_flash(shape: AttentionShape, block_m: int, block_n: int) -> Traffic:
    """`flash_attention`: keys and values once a tile of queries, mostly from the L2 cache."""
    keys = 0
    for first in range(0, shape.seq_len, block_m):
        seen = min(first + block_m, shape.seq_len) if shape.causal else shape.seq_len
        # A tile of keys is fetched whole, but not past the last key there is.
        keys += min(-(-seen // block_n) * block_n, shape.seq_len)
    kv = 2 * shape.batch * shape.num_heads * keys * shape.head_size * shape.itemsize
    return Traffic(
        f"FlashAttention, {block_m} queries a tile", shape.needed, 2 * shape.query_bytes + kv,
        shape.flops, "keys and values again for each tile and head, from L2",
    )  # fmt: skip


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of a decode step: one query a sequence, one dtype."""

    seq_lens: Sequence[int]
    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int

    @property
    def query_bytes(self) -> int:
        """Of q, and of the output."""
        return len(self.seq_lens) * self.num_heads * self.head_size * self.itemsize

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * self.itemsize

    @property
    def needed(self) -> int:
        return 2 * self.query_bytes + self.kv_bytes

    @property
    def flops(self) -> int:
        return 4 * sum(self.seq_lens) * self.num_heads * self.head_size


def decode_gathered(shape: DecodeShape) -> Traffic:
    """`paged_decode_reference` as one would batch it: pages copied together, heads repeated."""
    group = shape.num_heads // shape.num_kv_heads
    kv = shape.kv_bytes
    moved = 2 * kv  # copy the pages together
    if group > 1:
        moved += (1 + group) * kv  # repeat the heads
    moved += group * kv + 2 * shape.query_bytes  # attend
    return Traffic("decode, pages copied together", shape.needed, moved, shape.flops, "KV copied")


def decode_head_by_head(shape: DecodeShape) -> Traffic:
    """Pages read in place, by a program for every query head."""
    group = shape.num_heads // shape.num_kv_heads
    return Traffic(
        "paged decode, a program a query head", shape.needed,
        group * shape.kv_bytes + 2 * shape.query_bytes, shape.flops, f"KV read {group} times",
    )  # fmt: skip


def decode_paged(shape: DecodeShape, num_splits: int = 1) -> Traffic:
    """`paged_decode`: the query heads of a KV head share a program.

    The block table and the sequence lengths, 4 bytes a lookup, are not counted.
    """
    partial = len(shape.seq_lens) * shape.num_heads * num_splits * 4
    moved = shape.kv_bytes + shape.query_bytes * num_splits  # every split reads q
    moved += partial  # lse, written even if there is one split
    if num_splits > 1:
        moved += partial * shape.head_size  # partial outputs written,
        moved += partial * (shape.head_size + 1)  # and read, with lse
    moved += shape.query_bytes  # the output
    return Traffic(
        f"paged decode, heads shared, {num_splits} splits", shape.needed, moved, shape.flops,
        "KV read once",
    )  # fmt: skip
