"""Replay recorded decisions of the real vLLM scheduler and SGLang radix cache through ours.

    python scripts/replay_golden.py tests/golden/vllm_scheduler.jsonl
    python scripts/replay_golden.py tests/golden/*.jsonl

Step by step, block id by block id; tests/golden/README.md says what the files hold. On the first
difference of a trace, its seed, the operation, what was expected, what came instead and the state
of the pool are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import CacheConfig, SchedulerConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
from nanovllm.v1.core.radix_cache import RadixCache, RadixKey, TreeNode
from nanovllm.v1.core.sched.async_scheduler import AsyncScheduler
from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.engine import EngineCoreOutput
from nanovllm.v1.request import Request, RequestStatus


@dataclass
class FakeRunnerOutput:
    """A ModelRunnerOutput whose tokens come from the trace (that module would import torch)."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs = None
    prompt_logprobs_dict: dict[str, Any]


class Mismatch(Exception):
    """Ours decided otherwise than the recorded system."""

    def __init__(self, op_index: int, op: str, field: str, expected: Any, got: Any) -> None:
        super().__init__(f"operation {op_index} ({op}): {field}")
        self.op_index, self.op, self.field = op_index, op, field
        self.expected, self.got = expected, got


class Replay:
    """One trace, and our counterpart of the recorded system going through it.

    A subclass has a method `op_NAME` for every operation; it does the operation and yields what is
    to be compared: (field, expected, got).
    """

    def __init__(self, trace: dict[str, Any]) -> None:
        self.trace = trace

    def run(self) -> int:
        """Replay to the end.

        Returns:
            The number of operations.

        Raises:
            Mismatch: at the first difference.
        """
        for i, op in enumerate(self.trace["ops"]):
            for field, expected, got in getattr(self, "op_" + op["op"])(op):
                if expected != got:
                    raise Mismatch(i, op["op"], field, expected, got)
        return len(self.trace["ops"])

    def describe_state(self) -> str:
        """Our side's state, as text."""
        raise NotImplementedError


class SchedulerReplay(Replay):
    """A trace of the vLLM scheduler."""

    def __init__(self, trace: dict[str, Any]) -> None:
        super().__init__(trace)
        config = trace["config"]
        scheduler_config = SchedulerConfig(
            **{k: v for k, v in config.items() if k in SchedulerConfig.__dataclass_fields__}
        )
        cache_config = CacheConfig(
            block_size=config["block_size"],
            num_gpu_blocks=config["num_gpu_blocks"],
            enable_prefix_caching=config["enable_prefix_caching"],
        )
        scheduler_cls = AsyncScheduler if config["async_scheduling"] else Scheduler
        self.scheduler = scheduler_cls(scheduler_config, cache_config)
        self.block_hasher = (
            get_request_block_hasher(config["block_size"])
            if config["enable_prefix_caching"]
            else None
        )
        self.in_flight: deque[SchedulerOutput] = deque()

    def op_add(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        params = SamplingParams(
            max_tokens=op["max_tokens"],
            min_tokens=op["min_tokens"],
            ignore_eos=op["ignore_eos"],
            stop_token_ids=op["stop_token_ids"],
        )
        params.update_from_generation_config({}, self.trace["eos_token_id"])
        request = Request(
            request_id=op["request_id"],
            prompt_token_ids=op["prompt_token_ids"],
            sampling_params=params,
            arrival_time=op["arrival_time"],
            cache_salt=op["cache_salt"],
            priority=op["priority"],
            block_hasher=self.block_hasher,
        )
        self.scheduler.add_request(request)
        yield from ()

    def op_abort(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        self.scheduler.finish_requests(op["req_id"], RequestStatus.FINISHED_ABORTED)
        yield from ()

    def op_schedule(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        got = scheduler_output_as_recorded(output)
        for field, expected in op["output"].items():
            yield field, expected, got[field]
        # Dicts compare equal in any order; the order of scheduling is a decision too.
        expected_order = list(op["output"]["num_scheduled_tokens"])
        yield "scheduling order", expected_order, list(got["num_scheduled_tokens"])

    def op_update(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        sampled = op["sampled"]
        req_ids = list(sampled)
        runner_output = FakeRunnerOutput(
            req_ids, {r: i for i, r in enumerate(req_ids)}, [sampled[r] for r in req_ids], {}
        )
        outputs = self.scheduler.update_from_output(self.in_flight.popleft(), runner_output)
        yield "outputs", op["outputs"], [output_as_recorded(o) for o in outputs.outputs]
        pool = self.scheduler.kv_cache_manager.block_pool
        yield "num_free_blocks", op["num_free_blocks"], pool.get_num_free_blocks()
        yield "running", op["running"], [r.request_id for r in self.scheduler.running]
        yield "waiting", op["waiting"], [r.request_id for r in self.scheduler.waiting]

    def describe_state(self) -> str:
        """The queues, every block table and the free queue, as text."""
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        lines = [f"  running {scheduler.running}", f"  waiting {list(scheduler.waiting)}"]
        for req_id in manager.req_to_blocks:
            lines.append(f"  blocks of {req_id}: {manager.get_block_ids(req_id)}")
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        marked = [f"{b.block_id}{'c' if b.block_hash else ''}" for b in free]
        lines.append(f"  {len(free)} free, next first (c: cached): {' '.join(marked)}")
        return "\n".join(lines)


class RadixCacheReplay(Replay):
    """A trace of the SGLang radix cache, on a logical clock that ticks at every read."""

    def __init__(self, trace: dict[str, Any]) -> None:
        super().__init__(trace)
        self.freed: list[list[int]] = []
        self.cache = RadixCache(trace["page_size"], free=self.freed.append)
        self.locks: dict[int, TreeNode] = {}

    def op_insert(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        key = RadixKey(op["token_ids"], op["extra_key"])
        yield "prefix_len", op["prefix_len"], self.cache.insert(key, op["value"])
        yield from self._sizes(op)

    def op_match_prefix(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        match = self.cache.match_prefix(RadixKey(op["token_ids"], op["extra_key"]))
        if "lock" in op:
            self.locks[op["lock"]] = match.last_device_node
            self.cache.inc_lock_ref(match.last_device_node)
        yield "indices", op["indices"], match.device_indices
        yield from self._sizes(op)

    def op_unlock(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        self.cache.dec_lock_ref(self.locks.pop(op["lock"]))
        yield from self._sizes(op)

    def op_evict(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        self.freed.clear()
        yield "num_tokens_evicted", op["num_tokens_evicted"], self.cache.evict(op["num_tokens"])
        yield "freed", op["freed"], self.freed
        yield from self._sizes(op)

    def _sizes(self, op: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        yield "evictable_size", op["evictable_size"], self.cache.evictable_size()
        yield "protected_size", op["protected_size"], self.cache.protected_size()
        yield "total_size", op["total_size"], self.cache.total_size()

    def describe_state(self) -> str:
        """The tree, one node a line."""
        lines: list[str] = []
        stack = [(self.cache.root_node, 1)]
        while stack:
            node, depth = stack.pop()
            lines.append(f"{'  ' * depth}{node} slots {node.value} t={node.last_access_time}")
            stack.extend((child, depth + 1) for child in node.children.values())
        return "\n".join(lines)


def make_replay(trace: dict[str, Any]) -> Replay:
    """The replay for a trace of either kind."""
    return RadixCacheReplay(trace) if "page_size" in trace else SchedulerReplay(trace)


def scheduler_output_as_recorded(output: SchedulerOutput) -> dict[str, Any]:
    """A SchedulerOutput in the form of the golden files."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [
            {
                "req_id": new.req_id,
                "block_ids": new.block_ids,
                "num_computed_tokens": new.num_computed_tokens,
            }
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            {
                "req_id": req_id,
                "resumed": req_id in cached.resumed_req_ids,
                "new_block_ids": cached.new_block_ids[i] or [],
                "num_computed_tokens": cached.num_computed_tokens[i],
            }
            for i, req_id in enumerate(cached.req_ids)
        ],
        "num_scheduled_tokens": output.num_scheduled_tokens,
        "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
        "preempted": sorted(output.preempted_req_ids),
        "finished": sorted(output.finished_req_ids),
    }


def output_as_recorded(output: EngineCoreOutput) -> dict[str, Any]:
    """An EngineCoreOutput in the form of the golden files."""
    return {
        "req_id": output.request_id,
        "new_token_ids": output.new_token_ids,
        "finish_reason": None if output.finish_reason is None else str(output.finish_reason),
        "stop_reason": output.stop_reason,
    }


def report(trace: dict[str, Any], replay: Replay, error: Exception) -> None:
    """Print a failed trace so that a person can see what went wrong."""
    print(f"MISMATCH in the trace with seed {trace['seed']} ({trace['engine']})")
    print(f"  settings { {k: v for k, v in trace.items() if k not in ('ops', 'engine', 'seed')} }")
    print(f"  {error}")
    if isinstance(error, Mismatch):
        print(f"  operation {json.dumps(trace['ops'][error.op_index])[:600]}")
        print(f"  expected  {error.expected}\n  got       {error.got}")
    print(replay.describe_state())


def replay_file(path: Path, stop_at_first: bool) -> tuple[int, int]:
    """Replay every trace of one file.

    Returns:
        (traces replayed without a difference, traces in the file).
    """
    replayed = total = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            trace = json.loads(line)
            total += 1
            replay = make_replay(trace)
            try:
                replay.run()
                replayed += 1
            except Exception as error:
                report(trace, replay, error)
                if not isinstance(error, Mismatch):
                    raise
                if stop_at_first:
                    break
    return replayed, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-x", "--stop-at-first", action="store_true", help="stop at a mismatch")
    args = parser.parse_args()
    results = [replay_file(path, args.stop_at_first) for path in args.files]
    replayed, total = (sum(column) for column in zip(*results, strict=True))
    print(f"{replayed}/{total} replayed")
    return 0 if replayed == total else 1


if __name__ == "__main__":
    sys.exit(main())
