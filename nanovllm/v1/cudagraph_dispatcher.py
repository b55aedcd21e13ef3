"""CUDA graphs: a decode step's kernels, recorded once and launched together.

A decode step of a small model is a few hundred kernels of a few microseconds each. Launching them
one by one from Python takes the host longer than the device needs to run them. A CUDA graph is the
list of all these launches, kernels and arguments, recorded once: replaying it is one launch.

    recorded for 1, 2, 4, 8, 16, 24, ... requests            a batch of 13 replays the graph for 16

            row 0 .. 12   the requests
            row 13 .. 15  padding: slot -1 (nothing is written), context length 0 (nothing is read)

What a graph can and cannot do decides where it is used. Arguments are frozen, so all inputs have to
come in the same memory each time (the runner's persistent buffers), and shapes are frozen, so only
batches in which each request computes one token are replayed; a batch with a prompt in it has a
shape of its own nearly every time, and enough work for the device to hide its launches.

Upstream: vllm/v1/cudagraph_dispatcher.py and vllm/compilation/cuda_graph.py (0.23.0), which also
replay the parts between attention calls of mixed batches (piecewise graphs), for models that
torch.compile has cut up.
Left out: piecewise graphs, graphs for speculative decoding, LoRA cases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch


def get_cudagraph_capture_sizes(max_num_seqs: int, max_capture_size: int | None) -> list[int]:
    """The batch sizes to record, ascending: 1, 2, 4, multiples of 8 up to 256, of 16 beyond, and
    the largest.

    Args:
        max_num_seqs: no decode batch is larger.
        max_capture_size: no graph is larger; 0: none are recorded. None: 512.

    Source: VllmConfig._set_cudagraph_sizes (vllm/config/vllm.py). Its default reaches to twice
    max_num_seqs, for mixed batches, which run kernel by kernel here.
    """
    largest = min(max_num_seqs, 512 if max_capture_size is None else max_capture_size)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8)) if size <= largest]
    sizes += range(256, largest + 1, 16)
    if sizes and sizes[-1] < largest:
        sizes.append(largest)
    return sizes


@dataclass
class CUDAGraphEntry:
    """One recorded batch size."""

    graph: torch.cuda.CUDAGraph
    hidden_states: torch.Tensor  # [size, hidden_size], where each replay leaves its result


class CudagraphDispatcher:
    """Holds the graphs and knows which one a batch replays.

    All graphs share one memory pool: no two replay at once, so the activations of one may lie where
    those of another lay. Only `hidden_states` is kept of each.
    """

    def __init__(self, capture_sizes: list[int]) -> None:
        """
        Args:
            capture_sizes: ascending.
        """
        self.capture_sizes = capture_sizes
        self.entries: dict[int, CUDAGraphEntry] = {}

    def dispatch(self, num_reqs: int, max_query_len: int) -> int | None:
        """The size of the graph that this batch replays; None: it runs kernel by kernel."""
        if max_query_len != 1 or not self.entries:
            return None
        index = bisect_left(self.capture_sizes, num_reqs)
        return self.capture_sizes[index] if index < len(self.capture_sizes) else None

    def capture(self, model_forward: Callable[[int], torch.Tensor]) -> list[int]:
        """Record every size, the largest first, so that the others find its memory in the pool.

        Args:
            model_forward: runs a decode batch of the given size on the persistent buffers and
                returns its hidden states. It is called twice a size: the first time compiles what
                has to be compiled, which cannot be recorded.

        Returns:
            Bytes of device memory that each graph took, in the order of recording.
        """
        memory_used = []
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for size in reversed(self.capture_sizes):
            free_before, _ = torch.cuda.mem_get_info()
            with torch.cuda.stream(stream):
                model_forward(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden_states = model_forward(size)
            self.entries[size] = CUDAGraphEntry(graph, hidden_states)
            memory_used.append(max(free_before - torch.cuda.mem_get_info()[0], 0))
        torch.cuda.current_stream().wait_stream(stream)
        return memory_used

    def replay(self, size: int) -> torch.Tensor:
        """Run the graph of this size: [size, hidden_size], overwritten by the next replay."""
        entry = self.entries[size]
        entry.graph.replay()
        return entry.hidden_states
