"""The sampler's kernels on the GPU: right first, then how fast.

    python scripts/bench_sampler.py --out sampler.jsonl

For a vocabulary of 151,936 and bfloat16 logits: random rows and greedy ones, each filter on flat
rows (standard normal logits, of which top-p 0.9 keeps most) and on peaked ones (ten times as wide),
and penalties. Beside each time stand that of the torch code, which sorts, and the floor: one read
of the logits at the read bandwidth, which is measured first. Kernels are timed in a CUDA graph, the
torch code by events. The logits of small batches are found in the L2 cache, as they are in an
engine that has just computed them; their share of the floor says little, the microseconds count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.v1.sample.ops.gumbel import gumbel_sample
from nanovllm.v1.sample.ops.penalties import apply_all_penalties, make_output_matrix
from nanovllm.v1.sample.ops.seeded_noise import row_keys, step_keys
from nanovllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

VOCAB, TEMPERATURE = 151_936, 0.6
BATCHES = (1, 8, 32, 256)
CALLS = 10  # in a graph, so that its launch does not count
# name -> (top-k, top-p, min-p)
FILTERS: dict[str, tuple[int | None, float | None, float | None]] = {
    "unfiltered": (None, None, None),
    "top-k 50": (50, None, None),
    "top-p 0.9": (None, 0.9, None),
    "top-k 50, top-p 0.9": (50, 0.9, None),
    "min-p 0.05": (None, None, 0.05),
}


def event_us(run: Callable[[], object], repeat: int, calls: int = 1) -> float:
    """Median microseconds of one call."""
    times = []
    for i in range(repeat + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def graph_us(run: Callable[[], object]) -> float:
    """Median microseconds of one call in a CUDA graph of several, over 30 replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return event_us(graph.replay, 30, CALLS)


class Batch:
    """Logits, keys and parameters of one batch."""

    def __init__(self, num_reqs: int, scale: float) -> None:
        generator = torch.Generator("cuda").manual_seed(num_reqs)
        logits = torch.randn(num_reqs, VOCAB, device="cuda", generator=generator)
        self.logits = (logits * scale * TEMPERATURE).to(torch.bfloat16)
        self.seeds = torch.arange(num_reqs, device="cuda")
        self.positions = self.seeds * 3
        self.keys = row_keys(self.seeds, self.positions)
        self.temperature = torch.full((num_reqs,), TEMPERATURE, device="cuda")
        self.sampler = TopKTopPSampler()

    def columns(self, name: str) -> list[torch.Tensor | None]:
        k, p, min_p = FILTERS[name]
        return [
            None if k is None else torch.full_like(self.seeds, k, dtype=torch.int32),
            None if p is None else torch.full_like(self.temperature, p),
            None if min_p is None else torch.full_like(self.temperature, min_p).log(),
        ]

    def cuda(self, k: Any, p: Any, log_min_p: Any) -> torch.Tensor:
        """With the kernel that makes the keys, as in a step."""
        keys = step_keys(self.seeds, self.seeds, self.positions)
        return self.sampler.forward_cuda(self.logits, keys, k, p, self.temperature, log_min_p)

    def native(self, k: Any, p: Any, log_min_p: Any) -> torch.Tensor:
        logits = self.logits.to(torch.float32).div_(self.temperature.unsqueeze(1))
        if log_min_p is not None:
            floor = logits.amax(dim=-1, keepdim=True) + log_min_p.unsqueeze(1)
            logits.masked_fill_(logits < floor, -float("inf"))
        return self.sampler.forward_native(logits, self.keys, k, p)


def penalties(num_reqs: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(with the outputs as a matrix on the device, with lists): 500 tokens of prompt, 500 more."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (num_reqs, 1000)).astype(np.int32)
    prompts = torch.from_numpy(tokens[:, :500].astype(np.int64)).cuda()
    lengths = np.full(num_reqs, 500), np.full(num_reqs, 1000)
    matrix = torch.from_numpy(make_output_matrix(tokens, *lengths, VOCAB)).cuda()
    last = torch.full((num_reqs,), -1, device="cuda")
    lists = tokens[:, 500:].tolist()
    columns = [torch.full((num_reqs,), value, device="cuda") for value in (0.1, 0.2, 1.1)]
    logits = torch.randn(num_reqs, VOCAB, device="cuda")
    one = apply_all_penalties(logits.clone(), prompts, *columns, matrix, last)
    other = apply_all_penalties(logits.clone(), prompts, *columns, lists)
    assert torch.equal(one, other)
    return (
        lambda: apply_all_penalties(logits, prompts, *columns, matrix, last),
        lambda: apply_all_penalties(logits, prompts, *columns, lists),
    )


class Report:
    """JSON lines, and a table at the end."""

    def __init__(self, out: str | None, read_bytes_per_s: float) -> None:
        self.out, self.read_bytes_per_s = out, read_bytes_per_s
        self.lines: list[dict[str, Any]] = []

    def add(self, workload: str, batch: int, us: float, torch_us: float, **more: Any) -> None:
        floor = batch * VOCAB * 2 / self.read_bytes_per_s * 1e6
        line = {
            "workload": f"sampler: {workload}",
            "batch": batch,
            "us": round(us, 2),
            "torch_us": round(torch_us, 1),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / us, 3),
            **more,
        }
        self.lines.append(line)
        if self.out:
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def print(self) -> None:
        print(f"{'':36}{'batch':>6}{'us':>9}{'torch us':>10}{'floor us':>10}{'share':>7}")
        for line in self.lines:
            print(
                f"{line['workload']:36}{line['batch']:6}{line['us']:9.1f}{line['torch_us']:10.1f}"
                f"{line['floor_us']:10.2f}{line['share_of_floor']:7.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="file that the JSON lines are appended to")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    args = parser.parse_args()

    x = torch.randn(1 << 28, device="cuda")
    bandwidth = x.numel() * 4 / event_us(x.sum, 20) * 1e6
    del x
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s")
    report = Report(args.out, bandwidth)
    for num_reqs in args.batches:
        repeat = 20
        for shape, scale in (("flat", 1.0), ("peaked", 10.0)):
            batch = Batch(num_reqs, scale)
            for name in FILTERS:
                if name == "unfiltered" and shape == "peaked":
                    continue
                columns = batch.columns(name)
                sampled, expected = batch.cuda(*columns), batch.native(*columns)
                # Others only where two scores, or a mass and p, are equal to rounding.
                wrong = int((sampled != expected).sum())
                assert wrong <= max(1, num_reqs // 50), f"{name}, {shape}: {wrong} tokens differ"
                us = graph_us(lambda b=batch, c=columns: b.cuda(*c))
                torch_us = event_us(lambda b=batch, c=columns: b.native(*c), repeat)
                report.add(f"{name}, {shape}", num_reqs, us, torch_us, other_tokens=wrong)
        best = batch.logits.argmax(dim=-1)
        assert torch.equal(gumbel_sample(batch.logits), best), "greedy tokens differ"
        report.add(
            "greedy",
            num_reqs,
            graph_us(lambda b=batch: gumbel_sample(b.logits)),
            event_us(lambda b=batch: b.logits.argmax(dim=-1), repeat),
        )
        matrix, lists = penalties(num_reqs)
        report.add("penalties alone", num_reqs, graph_us(matrix), event_us(lists, repeat))
    report.print()


if __name__ == "__main__":
    main()
