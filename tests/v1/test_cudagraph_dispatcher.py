"""Which batch sizes are recorded as CUDA graphs, and which graph a batch replays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.v1.cudagraph_dispatcher import CudagraphDispatcher, get_cudagraph_capture_sizes
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner


def recorded(capture_sizes: list[int]) -> CudagraphDispatcher:
    """A dispatcher that takes all sizes for recorded; nothing is replayed."""
    dispatcher = CudagraphDispatcher(capture_sizes)
    dispatcher.entries = dict.fromkeys(capture_sizes)  # type: ignore[arg-type]
    return dispatcher


@pytest.mark.parametrize(
    ("max_num_seqs", "max_capture_size", "sizes"),
    [
        (1, None, [1]),
        (3, None, [1, 2, 3]),
        (16, None, [1, 2, 4, 8, 16]),
        (40, None, [1, 2, 4, 8, 16, 24, 32, 40]),
        (20, None, [1, 2, 4, 8, 16, 20]),
        (256, 3, [1, 2, 3]),
        (2, 64, [1, 2]),
        (64, 0, []),
    ],
)
def test_sizes_are_small_ones_then_multiples_of_8_then_the_largest(
    max_num_seqs, max_capture_size, sizes
):
    """No larger than a batch can be, nor than asked for; the largest itself is always there."""
    assert get_cudagraph_capture_sizes(max_num_seqs, max_capture_size) == sizes


def test_beyond_256_sizes_are_16_apart_and_end_at_512():
    """Unless a larger one is asked for."""
    sizes = get_cudagraph_capture_sizes(1024, None)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-18:] == [248, *range(256, 513, 16)]
    assert get_cudagraph_capture_sizes(1024, 600)[-3:] == [576, 592, 600]


@given(max_num_seqs=st.integers(1, 600), max_capture_size=st.none() | st.integers(0, 600))
def test_every_decode_batch_up_to_the_largest_size_is_padded_to_the_next(
    max_num_seqs, max_capture_size
):
    """The smallest graph that holds it: fewer than 8 rows of padding up to 256, fewer than 16
    beyond. A larger batch has none."""
    sizes = get_cudagraph_capture_sizes(max_num_seqs, max_capture_size)
    assert sizes == sorted(set(sizes))
    limit = 512 if max_capture_size is None else max_capture_size
    assert max(sizes, default=0) == min(max_num_seqs, limit)
    dispatcher = recorded(sizes)
    for num_reqs in range(1, max_num_seqs + 1):
        size = dispatcher.dispatch(num_reqs, max_query_len=1)
        assert size == min((s for s in sizes if s >= num_reqs), default=None)
        assert size is None or size - num_reqs < (8 if num_reqs <= 256 else 16)


def test_a_batch_with_a_prompt_in_it_replays_nothing():
    """Its shape is not recorded, whatever its number of requests."""
    dispatcher = recorded([1, 2, 4, 8])
    assert dispatcher.dispatch(4, max_query_len=1) == 4
    assert dispatcher.dispatch(4, max_query_len=2) is None


def test_nothing_is_replayed_before_it_is_recorded():
    """The profile run and the runs that compile come first."""
    assert CudagraphDispatcher([1, 2, 4]).dispatch(1, max_query_len=1) is None


def test_graph_memory_is_the_first_one_s_and_as_much_as_the_second_s_for_each_other():
    """Two are recorded for trial, the largest first: it brings the pool that all share."""

    class Runner:
        """As much of a runner as profile_cudagraph_memory looks at."""

        def __init__(self, capture_sizes: list[int]) -> None:
            self.cudagraph_dispatcher = CudagraphDispatcher(capture_sizes)
            self.model_config = SimpleNamespace(get_num_layers=lambda: 2)
            self.kv_caches: list[torch.Tensor] = []

        def get_kv_cache_spec(self) -> None: ...

        def initialize_kv_cache(self, config: object) -> None:
            self.kv_caches = [torch.empty(1)]

        def _capture(self, dispatcher: CudagraphDispatcher) -> list[int]:
            tried.append(dispatcher.capture_sizes)
            return [1000, 30][: len(dispatcher.capture_sizes)]

    tried: list[list[int]] = []
    for sizes, expected in (([], 0), ([1], 1000), ([1, 2], 1030), ([1, 2, 4, 8], 1090)):
        runner = Runner(sizes)
        assert GPUModelRunner.profile_cudagraph_memory(runner) == expected  # type: ignore[arg-type]
        assert not runner.kv_caches and not runner.cudagraph_dispatcher.entries
    assert tried == [[1], [1, 2], [4, 8]]
