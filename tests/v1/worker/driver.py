"""A scheduler of a few lines, to drive a model runner by hand."""

from __future__ import annotations

from nanovllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from nanovllm.v1.outputs import ModelRunnerOutput
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 61, 64, 4, 64


def make_config(path: str, *, max_num_seqs: int = 6, **cache) -> VllmConfig:
    return VllmConfig(
        ModelConfig(path, enforce_eager=True),
        CacheConfig(block_size=BLOCK_SIZE, **cache),
        SchedulerConfig(
            max_num_batched_tokens=128, max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN
        ),
        DeviceConfig("cpu"),
    )


class Driver:
    """Plays the scheduler: keeps every request's tokens and blocks, and is told whom to run.

    step({"a": 3, "b": 1}) computes 3 tokens of a and 1 of b. Blocks are dealt out of order.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self.runner = runner
        self.free_blocks = [1 + (i * 37) % (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS - 1)]
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.started: set[str] = set()
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.previous: set[str] = set()

    def add(self, req_id: str, prompt: list[int], params: SamplingParams | None = None) -> None:
        self.params[req_id] = params or SamplingParams(temperature=0, ignore_eos=True)
        self.prompts[req_id], self.tokens[req_id] = prompt, list(prompt)
        self.blocks[req_id], self.num_computed[req_id] = [], 0

    def outputs(self, req_id: str) -> list[int]:
        return self.tokens[req_id][len(self.prompts[req_id]) :]

    def preempt(self, req_id: str) -> None:
        """Take the blocks away; what they held is lost."""
        for kv_cache in self.runner.kv_caches:
            kv_cache[self.blocks[req_id]] = float("nan")
        self.free_blocks += self.blocks.pop(req_id)
        self.blocks[req_id], self.num_computed[req_id] = [], 0
        self.preempted.add(req_id)

    def finish(self, req_id: str) -> None:
        self.free_blocks += self.blocks.pop(req_id)
        self.started.discard(req_id)
        self.finished.add(req_id)

    def schedule(self, num_tokens: dict[str, int]) -> SchedulerOutput:
        new, cached = [], CachedRequestData.make_empty()
        for req_id, n in num_tokens.items():
            num_computed = self.num_computed[req_id]
            needed = -(-(num_computed + n) // BLOCK_SIZE) - len(self.blocks[req_id])
            new_blocks = [self.free_blocks.pop(0) for _ in range(needed)]
            self.blocks[req_id] += new_blocks
            if req_id not in self.started:
                new.append(
                    NewRequestData(
                        req_id,
                        self.prompts[req_id],
                        self.params[req_id],
                        self.blocks[req_id],
                        num_computed,
                    )
                )
                self.started.add(req_id)
                continue
            cached.req_ids.append(req_id)
            cached.new_block_ids.append(new_blocks or None)
            cached.num_computed_tokens.append(num_computed)
            cached.num_output_tokens.append(len(self.outputs(req_id)))
            if req_id in self.preempted:
                cached.resumed_req_ids.add(req_id)
            if req_id not in self.previous:
                cached.all_token_ids[req_id] = self.tokens[req_id]
        output = SchedulerOutput(
            new, cached, num_tokens, sum(num_tokens.values()), set(), self.finished
        )
        self.finished, self.previous = set(), set(num_tokens)
        self.preempted -= set(num_tokens)
        return output

    def step(self, num_tokens: dict[str, int]) -> ModelRunnerOutput:
        scheduler_output = self.schedule(num_tokens)
        output = self.runner.execute_model(scheduler_output)
        if output is None:
            output = self.runner.sample_tokens()
        self.check_block_tables()
        for req_id, n in num_tokens.items():
            self.num_computed[req_id] += n
            self.tokens[req_id] += output.sampled_token_ids[output.req_id_to_index[req_id]]
        return output

    def check_block_tables(self) -> None:
        """The runner's tables are the scheduler's, for every request that has a row."""
        batch = self.runner.input_batch
        for row, req_id in enumerate(batch.req_ids):
            num_blocks = batch.block_table.num_blocks_per_row[row]
            table = batch.block_table.get_numpy_array()[row, :num_blocks].tolist()
            assert table == self.runner.requests[req_id].block_ids == self.blocks[req_id]

    def remaining(self, req_id: str) -> int:
        return len(self.tokens[req_id]) - self.num_computed[req_id]
