"""What the specs share: requests, a model that really reads its paged cache, ways to draw.

Nothing here imports torch: the core has no need of it, and neither has its specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.strategies import SearchStrategy

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.request import Request

VOCAB = 5  # few tokens, so that prompts begin alike by chance
Context = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens from the sequence's start


class Machine(RuleBasedStateMachine):
    """A state machine whose printed programs list what was done, not every check in between."""

    def check_invariants(self, settings: Any, output: Any, *rest: Any) -> None:
        super().check_invariants(settings, lambda line: None, *rest)


def ci_examples(n: int) -> settings:
    """Settings with `n` examples where the profile has its ci size, else the profile's own."""
    default = settings()
    return settings(max_examples=n) if default.max_examples == 100 else default


def one_of_its(attribute: str) -> SearchStrategy[Any]:
    """One element of a state machine's own collection, as it stands now.

    Printed programs then name what was picked, not its place in a list.
    """
    return st.runner().flatmap(lambda machine: st.sampled_from(list(getattr(machine, attribute))))


# Prompts repeat a short motif, so that many of them share beginnings of several lengths.
PROMPTS = st.builds(
    lambda motif, length, tail: [motif[i % len(motif)] for i in range(length)] + tail,
    st.sampled_from([[1, 2], [1, 2, 3]]),
    st.integers(0, 9),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2),
)
SALTS = st.sampled_from([None, None, "salt", "pepper"])


def make_request(
    request_id: str,
    prompt: Sequence[int],
    block_hasher: Callable[[Request], list[Any]] | None,
    salt: str | None = None,
    max_tokens: int = 16,
    priority: int = 0,
    arrival_time: float = 0.0,
    eos_token_id: int | None = None,
    stop_token_ids: list[int] | None = None,
    min_tokens: int = 0,
) -> Request:
    """A request as the engine core makes it."""
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids
    )
    params.update_from_generation_config({}, eos_token_id)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        arrival_time=arrival_time,
        cache_salt=salt,
        priority=priority,
        block_hasher=block_hasher,
    )


# ---- a model whose next token depends on everything in its cache ---------------------------------


@lru_cache(maxsize=100_000)
def digest(tokens: tuple[int, ...]) -> int:
    """What PagedModel's last layer makes of `tokens`, computed without any cache."""
    layer_1 = [i * VOCAB + token for i, token in enumerate(tokens)]
    layer_2 = [hash(tuple(layer_1[: i + 1])) for i in range(len(tokens))]
    return hash(tuple(layer_2))


def next_token(tokens: Sequence[int]) -> int:
    """The one token that may follow `tokens`."""
    return digest(tuple(tokens)) % VOCAB


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """All tokens `request` must generate, and why it then ends ("stop" or "length")."""
    params = request.sampling_params
    tokens, output = list(request.prompt_token_ids), []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if len(output) < params.min_tokens and len(tokens) < max_model_len:
            continue
        if len(output) < params.min_tokens:
            return output, "length"
        if token == params.eos_token_id or token in (params.stop_token_ids or ()):
            return output, "stop"
        if len(output) >= request.max_tokens or len(tokens) >= max_model_len:
            return output, "length"


@dataclass
class ScriptedOutput:
    """A ModelRunnerOutput (whose module would import torch)."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: None = None
    prompt_logprobs_dict: dict[str, Any] = field(default_factory=dict)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {req_id: i for i, req_id in enumerate(self.req_ids)}


class PagedModel:
    """A model of two layers over a simulated paged cache, and the runner that feeds it.

        layer 1 writes a token's position and id to its slot, for the whole batch
        layer 2 reads layer 1's context through the block table and writes a digest of it
        the output reads layer 2's context; the next token is a function of all that was read

    So a block that is stale, foreign, half full or overwritten, or a position counted wrongly,
    changes what is read. `misreads` collects every row that did not read exactly its own context.

    The runner knows only what SchedulerOutputs told it, and the tokens it has sampled itself.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.layers: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.misreads: list[str] = []

    def execute(self, output: SchedulerOutput) -> ScriptedOutput:
        """Run one step."""
        starts = self._update_states(output)
        rows = {
            req_id: range(starts[req_id], starts[req_id] + n)
            for req_id, n in output.num_scheduled_tokens.items()
        }
        for req_id, positions in rows.items():
            if positions.stop > len(self.tokens[req_id]):
                self.misreads.append(f"{req_id} is to compute a token that nobody knows")
                self.tokens[req_id] += [0] * (positions.stop - len(self.tokens[req_id]))
        layer_1, layer_2 = self.layers
        written: set[int] = set()
        for req_id, positions in rows.items():
            for position in positions:
                slot = self._slot(req_id, position)
                if slot in written:
                    self.misreads.append(f"{req_id} writes slot {slot} a second time in this step")
                written.add(slot)
                layer_1[slot] = position * VOCAB + self.tokens[req_id][position]
        for req_id, positions in rows.items():
            for position in positions:
                layer_2[self._slot(req_id, position)] = self._read(layer_1, req_id, position + 1)

        sampled: list[list[int]] = []
        for req_id, positions in rows.items():
            tokens = self.tokens[req_id]
            got = self._read(layer_2, req_id, positions.stop)
            if got != digest(tuple(tokens[: positions.stop])):
                self.misreads.append(f"{req_id} did not read its own {positions.stop} tokens")
            is_chunk = positions.stop < len(tokens)
            sampled.append([] if is_chunk else [got % VOCAB])
            tokens.extend(sampled[-1])
        return ScriptedOutput(list(rows), sampled)

    def _update_states(self, output: SchedulerOutput) -> dict[str, int]:
        """Take in who is new, who has which new blocks; where does each of them start?"""
        for req_id in output.finished_req_ids:
            self.tables.pop(req_id, None)
            self.tokens.pop(req_id, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids)
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            new_block_ids = cached.new_block_ids[i] or []
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = list(new_block_ids)
                self.tokens[req_id] = list(cached.all_token_ids[req_id])
            else:
                self.tables[req_id].extend(new_block_ids)
            starts[req_id] = cached.num_computed_tokens[i]
        return starts

    def _slot(self, req_id: str, position: int) -> int:
        """The slot of a position; -1 where the table has no block for it."""
        index, offset = divmod(position, self.block_size)
        table = self.tables[req_id]
        return table[index] * self.block_size + offset if index < len(table) else -1

    def _read(self, layer: dict[int, int], req_id: str, num_tokens: int) -> int:
        slots = (self._slot(req_id, position) for position in range(num_tokens))
        return hash(tuple(layer.get(slot, -1) for slot in slots))
