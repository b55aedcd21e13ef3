"""A core in a process of its own gives what the one in this thread does; its end is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.exceptions import VLLMValidationError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine import EngineCoreRequest, FinishReason
from nanovllm.v1.engine.async_llm import AsyncLLM
from nanovllm.v1.engine.core_client import InprocClient
from nanovllm.v1.engine.exceptions import EngineDeadError

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

LIMITS = {"num_gpu_blocks_override": 400, "max_model_len": 256, "max_num_seqs": 16}
PROMPTS = ["Once there was a cat", "I saw a boy who", "The little dog", "Mom said"]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=3),
    SamplingParams(n=2, seed=3, max_tokens=20, logit_bias={300: 4.0}, stop=["the", "and"]),
    SamplingParams(seed=4, max_tokens=20, min_tokens=5, bad_words=["was"], logprobs=0),
    SamplingParams(seed=5, max_tokens=20, frequency_penalty=0.5, stop_token_ids=[260], top_k=50),
]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """What the core in this thread makes of the prompts."""
    llm = LLM(**LIMITS)
    assert isinstance(llm.llm_engine.engine_core, InprocClient)
    return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS), client="mp")
    yield engine
    engine.shutdown()


def process_of(engine: Any) -> Any:
    return engine.engine_core._process.process


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def collect(engine: AsyncLLM, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


async def assert_clean(engine: AsyncLLM) -> None:
    while not await engine.is_idle():
        await asyncio.sleep(0.002)
    assert await engine.reset_prefix_cache()  # only if no request holds a block


def endless() -> SamplingParams:
    return SamplingParams(max_tokens=240, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """All but the moments; logprobs up to what another batch does to the last digits."""
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.finished
    assert_same_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
    for completion, other in zip(output.outputs, expected.outputs, strict=True):
        assert replace(completion, logprobs=None, cumulative_logprob=None) == replace(
            other, logprobs=None, cumulative_logprob=None
        )
        assert_same_logprobs(completion.logprobs, other.logprobs)
        assert completion.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def assert_same_logprobs(logprobs: Any, expected: Any) -> None:
    assert (logprobs is None) == (expected is None)
    for position, other in zip(logprobs or (), expected or (), strict=True):
        if other is None:
            assert position is None
            continue
        assert list(position) == list(other)
        for token_id, logprob in position.items():
            assert logprob.rank == other[token_id].rank
            assert logprob.decoded_token == other[token_id].decoded_token
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


# ---- AsyncMPClient ----


def test_the_process_gives_the_same_outputs(
    engine: AsyncLLM, expected: list[RequestOutput]
) -> None:
    async def test() -> None:
        streams = await asyncio.gather(
            *(collect(engine, PROMPTS[i], SAMPLING[i], f"r{i}") for i in range(4))
        )
        for stream, output in zip(streams, expected, strict=True):
            by_index = {c.index: c for o in stream for c in o.outputs}  # cumulative: the last
            whole = replace(stream[-1], outputs=[by_index[c.index] for c in output.outputs])
            assert_same(whole, output)
            assert stream[-1].metrics is not None
            assert stream[-1].metrics.last_token_ts > stream[-1].metrics.queued_ts > 0
        await assert_clean(engine)

    run(test)


def test_cancelled_requests_hold_nothing_in_the_process(
    engine: AsyncLLM, expected: list[RequestOutput]
) -> None:
    async def test() -> None:
        tasks = [
            asyncio.create_task(collect(engine, f"A {i}", endless(), f"doomed-{i}"))
            for i in range(20)
        ]
        good = asyncio.create_task(collect(engine, PROMPTS[0], SAMPLING[0], "good"))
        for task in tasks:
            await asyncio.sleep(0.005)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert_same((await good)[-1], expected[0])
        await assert_clean(engine)

    run(test)


def test_an_id_used_again_at_once_gets_nothing_of_the_request_before(
    engine: AsyncLLM, expected: list[RequestOutput]
) -> None:
    async def test() -> None:
        for _ in range(5):
            stream = engine.generate("Something else", endless(), "x")
            await anext(stream)
            await stream.aclose()
            outputs = await collect(engine, PROMPTS[0], SAMPLING[0], "x")
            assert_same(outputs[-1], expected[0])

    run(test)


def test_a_request_that_the_core_cannot_take_in_ends_with_an_error(engine: AsyncLLM) -> None:
    """Its client is told, and no other."""
    bad = EngineCoreRequest("bad", [1, 2, 3], SamplingParams(max_tokens=None), time.time())

    async def test() -> None:
        await engine.engine_core.add_request_async(bad)
        while not (outputs := await engine.engine_core.get_output_async()).outputs:
            pass  # statistics of a step before
        (output,) = outputs.outputs
        assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
        assert "AssertionError" in str(output.stop_reason)

    run(test)  # in an event loop without an output handler, which would take the output
    assert not engine.errored


def test_a_utility_that_fails_raises_here(engine: AsyncLLM) -> None:
    async def test() -> None:
        with pytest.raises(RuntimeError, match="no_such_method"):
            await engine.engine_core.call_utility_async("no_such_method")
        await engine.check_health()

    run(test)


def test_a_killed_process_is_reported_to_everyone_once(engine: AsyncLLM) -> None:
    """The last test that uses the shared process."""

    async def test() -> None:
        streams = [engine.generate(PROMPTS[i], endless(), f"r{i}") for i in range(4)]
        for stream in streams:
            await anext(stream)
        os.kill(process_of(engine).pid, signal.SIGKILL)

        async def drain(stream: Any) -> None:
            async for _ in stream:
                pass

        results = await asyncio.gather(*map(drain, streams), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert all("exit code -9" in str(result) for result in results)
        for call in (engine.check_health(), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError):
                await call
        with pytest.raises(EngineDeadError):
            await collect(engine, PROMPTS[0], SAMPLING[0], "late")
        assert not engine.output_processor.request_states

    run(test)
    engine.shutdown()


def test_a_step_that_fails_in_the_process_is_named() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS), client="mp")
    bad = EngineCoreRequest("bad", [10**6], SamplingParams(max_tokens=3), time.time())

    async def test() -> None:
        stream = engine.generate(PROMPTS[0], endless(), "x")
        await anext(stream)
        await engine.engine_core.add_request_async(bad)  # no such token: the step fails
        with pytest.raises(EngineDeadError, match="IndexError"):
            async for _ in stream:
                pass
        while process_of(engine).is_alive():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="IndexError"):
            await engine.check_health()

    run(test)
    engine.shutdown()


def test_settings_that_cannot_be_used_are_refused_by_the_process() -> None:
    with pytest.raises(VLLMValidationError, match="too few for one request") as raised:
        AsyncLLM.from_engine_args(EngineArgs(num_gpu_blocks_override=2), client="mp")
    assert raised.value.parameter == "max_model_len"


def test_an_unknown_client_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="'inproc' or 'mp'"):
        AsyncLLM.from_engine_args(EngineArgs(**LIMITS), client="thread")  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "nanovllm.v1.engine.core_client_mp", raising=False)
    monkeypatch.delitem(sys.modules, "nanovllm.v1.engine.core_proc", raising=False)
    with pytest.raises(VLLMValidationError, match=r"needs zmq: pip install 'nanovllm\[serve\]'"):
        AsyncLLM.from_engine_args(EngineArgs(**LIMITS), client="mp")


# ---- SyncMPClient ----


def test_llm_over_a_process(expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = LLM(**LIMITS)
    engine = llm.llm_engine
    for _ in range(2):
        outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        for output, other in zip(outputs, expected, strict=True):
            assert_same(output, other)
    assert engine.vllm_config.cache_config.num_gpu_blocks == 400
    with pytest.raises(VLLMValidationError, match="unset NANOVLLM"):
        _ = engine.engine_core.engine_core

    # Half-way aborted, and the id used again at once.
    engine.add_request("x", "Something else", endless())
    while not engine.step():  # (The first may be the tail of the run before.)
        pass
    assert not llm.reset_prefix_cache()
    engine.abort_request(["x"])
    engine.add_request("x", PROMPTS[0], SAMPLING[0])
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert_same(outputs[-1], expected[0])
    assert llm.reset_prefix_cache()

    # The process dies.
    engine.add_request("y", PROMPTS[0], endless())
    engine.step()
    os.kill(process_of(engine).pid, signal.SIGKILL)

    def step_for_ever() -> None:
        while True:
            engine.step()

    with pytest.raises(EngineDeadError, match="exit code -9"):
        step_for_ever()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.reset_prefix_cache()
    engine.shutdown()


def test_the_process_ends_with_its_client() -> None:
    """Even if that is killed and cannot say goodbye."""
    script = """
import os, sys, time
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.v1.engine.async_llm import AsyncLLM
if __name__ == "__main__":
    engine = AsyncLLM.from_engine_args(EngineArgs(num_gpu_blocks_override=100), client="mp")
    print(engine.engine_core._process.process.pid, flush=True)
    time.sleep(60)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    client.kill()
    client.wait()
    client.stdout.close()
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the core's process outlived its client")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
