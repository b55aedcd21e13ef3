"""Block tables: rows of block ids, and the slot of every token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.v1.utils import CpuGpuBuffer
from nanovllm.v1.worker.block_table import BlockTable

MAX_BLOCKS = 8


def make_table(block_size: int = 4, max_num_reqs: int = 4) -> BlockTable:
    return BlockTable(
        block_size, max_num_reqs, MAX_BLOCKS, 1024, pin_memory=False, device=torch.device("cpu")
    )


def row(table: BlockTable, index: int) -> list[int]:
    return table.get_numpy_array()[index, : table.num_blocks_per_row[index]].tolist()


def test_a_buffer_s_faces_share_memory_on_a_cpu():
    """Writing through numpy is seen by the host tensor and by the device's twin, without a copy."""
    buffer = CpuGpuBuffer(3, 2, dtype=torch.int32, device=torch.device("cpu"))
    buffer.np[1] = [5, 6]
    assert buffer.cpu.tolist() == [[0, 0], [5, 6], [0, 0]]
    assert buffer.copy_to_gpu(2).data_ptr() == buffer.cpu.data_ptr()
    assert buffer.copy_to_gpu(2).shape == (2, 2)


@given(st.data())
def test_rows_do_what_lists_do(data):
    """Any sequence of append, add, clear and move leaves what plain lists would hold."""
    table, model = make_table(), [[] for _ in range(4)]
    rows, block_ids = st.integers(0, 3), st.lists(st.integers(1, 99), max_size=MAX_BLOCKS)
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.sampled_from(["append", "add", "clear", "move"]))
        a, b, ids = data.draw(rows), data.draw(rows), data.draw(block_ids)
        if name == "append":
            ids = ids[: MAX_BLOCKS - len(model[a])]
            table.append_row(ids, a)
            model[a] = model[a] + ids
        elif name == "add":
            table.add_row(ids, a)
            model[a] = ids
        elif name == "clear":
            table.clear_row(a)
            model[a] = []
        else:
            table.move_row(a, b)
            model[b] = list(model[a])
        assert [row(table, i) for i in range(4)] == model


def test_a_cleared_row_points_at_the_null_block():
    """What is left of a cleared row is harmless to follow."""
    table = make_table()
    table.add_row([7, 8, 9], 2)
    table.clear_row(2)
    assert not table.get_numpy_array()[2].any()


@given(
    st.integers(1, 32),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_slots_are_block_id_times_block_size_plus_offset(block_size, spans, seed):
    """The vectorised slot mapping equals the definition, token by token, for any block size."""
    spans = [(min(start, MAX_BLOCKS * block_size - 1), length) for start, length in spans]
    rng = np.random.default_rng(seed)
    table = make_table(block_size)
    tokens = []
    for i, (start, length) in enumerate(spans):
        table.add_row(rng.integers(1, 2**31 // 32, MAX_BLOCKS).tolist(), i)
        end = min(start + length, MAX_BLOCKS * block_size)
        tokens += [(i, position) for position in range(start, end)]
    expected = [
        row(table, i)[position // block_size] * block_size + position % block_size
        for i, position in tokens
    ]
    req_indices, positions = (np.array(column) for column in zip(*tokens, strict=True))
    assert table.compute_slot_mapping(req_indices, positions).tolist() == expected


def test_slots_beyond_32_bits_do_not_overflow():
    """Block ids are int32, slots are not: a huge cache has slots above 2**31."""
    table = make_table(block_size=32)
    table.add_row([2**30], 0)
    slots = table.compute_slot_mapping(np.array([0]), np.array([5]))
    assert slots.dtype == torch.int64 and slots.item() == 2**35 + 5


def test_commit_returns_the_rows_in_use():
    """[num_reqs, max_num_blocks_per_req], int32, as kernels expect it."""
    table = make_table()
    table.add_row([3, 4], 1)
    committed = table.commit_block_table(2)
    assert committed.dtype == torch.int32 and committed.shape == (2, MAX_BLOCKS)
    assert committed[1, :2].tolist() == [3, 4]
