"""LLMEngine: all of it, with a model so small and so random that any misstep changes tokens."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.arg_utils import DEFAULT_MODEL, EngineArgs
from nanovllm.inputs import TokensPrompt
from nanovllm.outputs import CompletionOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine.llm_engine import LLMEngine
from tests.spec.support import ci_examples

VOCAB_SIZE = 61
MAX_MODEL_LEN = 24
END_TOKENS = [3, 7, 11]
# Where the two best logits are closer than this, another batch may round them the other way.
TIE = 1e-4

SETTINGS = st.sampled_from(
    [
        {"block_size": 1, "prefix_cache_backend": "radix"},
        {"block_size": 2, "num_gpu_blocks_override": 13},
        {"block_size": 3, "num_gpu_blocks_override": 10, "prefix_cache_backend": "radix"},
        {"block_size": 4, "max_num_batched_tokens": 4, "max_num_seqs": 3},
        {"block_size": 4, "long_prefill_token_threshold": 3, "num_gpu_blocks_override": 9},
        {"block_size": 5, "enable_prefix_caching": False, "num_gpu_blocks_override": 7},
        {"block_size": 4, "async_scheduling": True, "max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"block_size": 16, "scheduling_policy": "priority", "max_num_seqs": 2},
    ]
)
PROMPTS = st.builds(
    lambda length, tail: [(5 * i + 1) % VOCAB_SIZE for i in range(length)] + tail,
    st.integers(0, 14),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=2),
)


NUMBERS = count()  # of requests: a name is used once


class Client(NamedTuple):
    """A request, when it arrives, and after how many more steps its sender gives up (0: never)."""

    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    patience: int = 0
    seed: int | None = None  # None: greedy


CLIENTS = st.lists(
    st.builds(
        Client,
        PROMPTS,
        st.integers(1, 8),
        st.integers(0, 8),
        st.sampled_from([0, 0, 0, 1, 4]),
        st.sampled_from([None, None, 1, 2]),
    ),
    min_size=2,
    max_size=6,
)


@cache
def checkpoint() -> str:
    """A folder with a random Qwen3; generation_config.json lists several end tokens."""
    from dense_backend import save_random_checkpoint  # tests/models, on pytest's path
    from transformers import Qwen3Config

    folder = Path(tempfile.mkdtemp(prefix="spec-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=END_TOKENS[0],
    )
    save_random_checkpoint(folder, config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKENS}))
    return str(folder)


@cache
def make_engine(arguments: tuple[tuple[str, Any], ...], model: str | None = None) -> LLMEngine:
    """One engine for each of the settings; every example starts with its cache empty."""
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model or checkpoint(),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64} | dict(arguments),
        )
    )


def make_params(client: Client, ignore_eos: bool, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=client.max_tokens,
        temperature=0.0 if client.seed is None else 1.0,
        seed=client.seed,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )


def serve(
    engine: LLMEngine, clients: Sequence[Client], ignore_eos: bool = True
) -> list[CompletionOutput | None]:
    """Everybody's completion; None for those who gave up."""
    try:
        return _serve(engine, clients, ignore_eos)
    except BaseException:
        make_engine.cache_clear()  # the next example starts with a fresh engine
        raise


def _serve(
    engine: LLMEngine, clients: Sequence[Client], ignore_eos: bool
) -> list[CompletionOutput | None]:
    assert engine.reset_prefix_cache()
    names = [f"r{next(NUMBERS)}" for _ in clients]
    results: dict[str, CompletionOutput] = {}
    to_come = dict(zip(names, clients, strict=True))
    leaving = {name: c.arrives + c.patience for name, c in to_come.items() if c.patience}
    for step in range(1000):
        for name, client in list(to_come.items()):
            if client.arrives <= step:
                prompt = TokensPrompt(prompt_token_ids=client.prompt)
                engine.add_request(name, prompt, make_params(client, ignore_eos))
                del to_come[name]
        for name in [name for name, when in leaving.items() if when <= step]:
            engine.abort_request([name])
            del leaving[name]
        if not (to_come or engine.has_unfinished_requests()):
            settle(engine)
            return [results.get(name) for name in names]
        for output in engine.step():
            if output.finished:
                results[output.request_id] = output.outputs[0]
                leaving.pop(output.request_id, None)
    raise AssertionError("requests that never end")


def settle(engine: LLMEngine) -> None:
    """Let the runner hear who has ended, and the last planned step come back."""
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    while core.scheduler.has_requests() or core.batch_queue:
        engine.step()


class Alone(NamedTuple):
    """What a request gets when it has the engine to itself, without any cache."""

    tokens: list[int]
    is_certain: list[bool]  # of a greedy token: is the next best logit clearly smaller?


@cache
def alone(
    prompt: tuple[int, ...], max_tokens: int, seed: int | None, model: str | None = None
) -> Alone:
    engine = make_engine((("enable_prefix_caching", False),), model)
    client = Client(list(prompt), max_tokens, seed=seed)
    tokens = TokensPrompt(prompt_token_ids=client.prompt)
    engine.add_request("alone", tokens, make_params(client, True, 2))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (completion,) = outputs[0].outputs
    is_certain = []
    for entry in completion.logprobs or ():
        best, second = sorted((value.logprob for value in entry.values()), reverse=True)[:2]
        is_certain.append(seed is not None or best - second > TIE)
    return Alone(list(completion.token_ids), is_certain)


def assert_same(client: Client, tokens: Sequence[int], model: str | None = None) -> None:
    """`tokens` begin as the client's tokens alone do, up to the first that rounding decides."""
    expected = alone(tuple(client.prompt), client.max_tokens, client.seed, model)
    for token, right, is_certain in zip(tokens, *expected, strict=False):
        if not is_certain:
            break
        assert token == right


@ci_examples(60)
@given(arguments=SETTINGS, clients=CLIENTS)
def test_a_request_gets_the_same_tokens_in_any_company(
    arguments: dict[str, Any], clients: list[Client]
) -> None:
    """Greedy or seeded, batched, chunked, cached, preempted, beside aborted ones: as if alone."""
    results = serve(make_engine(tuple(arguments.items())), clients)
    for client, result in zip(clients, results, strict=True):
        if result is not None:
            assert len(result.token_ids) == min(
                client.max_tokens, MAX_MODEL_LEN - len(client.prompt)
            )
            assert_same(client, result.token_ids)
        else:
            assert client.patience, "unanswered"


@ci_examples(10)
@given(arguments=SETTINGS, clients=CLIENTS)
def test_the_embedded_model_tells_the_same_story_in_any_company(
    arguments: dict[str, Any], clients: list[Client]
) -> None:
    """The model that comes with the package, which is trained, is as little impressed by others."""
    results = serve(make_engine(tuple(arguments.items()), DEFAULT_MODEL), clients)
    for client, result in zip(clients, results, strict=True):
        if result is not None:
            assert_same(client, result.token_ids, DEFAULT_MODEL)


@ci_examples(25)
@given(arguments=SETTINGS, client=CLIENTS.map(lambda clients: clients[0]))
def test_a_conversation_continues_as_one_text(arguments: dict[str, Any], client: Client) -> None:
    """An answer sent back in the next prompt is read from the cache and goes on the same."""
    first = client._replace(seed=None, arrives=0, patience=0, max_tokens=8)
    whole = alone(tuple(first.prompt), 8, None)
    cut = len(whole.tokens) // 2
    again = Client(
        first.prompt + whole.tokens[:cut], max_tokens=len(whole.tokens) - cut, arrives=30
    )
    if not all(whole.is_certain) or not cut:
        return
    _, result = serve(make_engine(tuple(arguments.items())), [first, again])
    assert result is not None
    assert list(result.token_ids) == whole.tokens[cut:]


@ci_examples(25)
@given(arguments=SETTINGS, clients=CLIENTS)
def test_an_answer_ends_at_the_first_end_token(
    arguments: dict[str, Any], clients: list[Client]
) -> None:
    """Any token that generation_config.json lists ends it, is its last token, and says "stop"."""
    patient = [client._replace(patience=0, max_tokens=8) for client in clients]
    results = serve(make_engine(tuple(arguments.items())), patient, ignore_eos=False)
    for client, result in zip(patient, results, strict=True):
        assert result is not None
        tokens = list(result.token_ids)
        assert_same(client, tokens)
        assert not set(tokens[:-1]) & set(END_TOKENS), "it went on after its end"
        assert result.finish_reason == ("stop" if tokens[-1] in END_TOKENS else "length")


@ci_examples(25)
@given(
    arguments=SETTINGS,
    prompt=PROMPTS,
    seeds=st.lists(st.integers(0, 1000), min_size=3, max_size=4, unique=True),
)
def test_seeds_of_neighbours_are_their_own(
    arguments: dict[str, Any], prompt: list[int], seeds: list[int]
) -> None:
    """One prompt with several seeds, in one batch, gets several answers, each repeatable."""
    clients = [Client(prompt, max_tokens=6, seed=seed) for seed in seeds]
    results = serve(make_engine(tuple(arguments.items())), clients)
    tokens = [tuple(result.token_ids) for result in results if result is not None]
    for client, answer in zip(clients, tokens, strict=True):
        assert_same(client, answer)
    assert len(set(tokens)) > 1


@ci_examples(25)
@given(arguments=SETTINGS, clients=CLIENTS)
def test_an_idle_engine_remembers_nobody(arguments: dict[str, Any], clients: list[Client]) -> None:
    """When all have ended and the runner knows, no queue, table, row or front end has one."""
    engine = make_engine(tuple(arguments.items()))
    serve(engine, clients)
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    scheduler, runner = core.scheduler, core.model_executor.model_runner
    assert not scheduler.requests
    assert not scheduler.kv_cache_manager.req_to_blocks
    assert not runner.requests
    assert runner.input_batch.num_reqs == 0
    assert engine.get_num_unfinished_requests() == 0
    assert engine.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
