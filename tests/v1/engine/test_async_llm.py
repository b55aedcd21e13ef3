"""AsyncLLM: many streams at once give what LLM gives, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.exceptions import VLLMValidationError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine.async_llm import AsyncLLM
from nanovllm.v1.engine.core_client import AsyncInprocClient
from nanovllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from nanovllm.v1.metrics.stats import IterationStats, SchedulerStats

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LIMITS = {"num_gpu_blocks_override": 400, "max_model_len": 256, "max_num_seqs": 16}
PROMPTS = [
    f"{start} a {thing} who" for start in ("Once there was", "I saw") for thing in ("cat", "boy")
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**LIMITS)


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS))
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine: AsyncLLM) -> Iterator[AsyncLLM]:
    yield shared_engine
    assert not shared_engine.errored
    assert_clean(shared_engine)


@pytest.fixture
def own_engine() -> Iterator[AsyncLLM]:
    """For tests that kill it."""
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS))
    yield engine
    engine.shutdown()


def core_of(engine: AsyncLLM) -> Any:
    assert isinstance(engine.engine_core, AsyncInprocClient)
    return engine.engine_core.engine_core


def assert_clean(engine: AsyncLLM) -> None:
    """Nothing unfinished, all blocks but the null block free, the runner without rows."""

    async def until_idle() -> None:
        while not await engine.is_idle():
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(until_idle(), 60))
    processor, core = engine.output_processor, core_of(engine)
    assert not processor.request_states
    assert not processor.external_req_ids
    assert not processor.parent_requests
    assert not core.scheduler.requests
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not core.model_executor.model_runner.requests


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 90))


def params(max_tokens: int = 24, n: int = 1, **kwargs: Any) -> SamplingParams:
    """Greedy; n > 1 samples by seed."""
    temperature = 0.0 if n == 1 else 1.0
    return SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens, n=n, **kwargs)


async def collect(engine: AsyncLLM, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args, **kwargs)]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int]]:
    """Text and tokens of the deltas of one sample."""
    parts = [c for output in outputs for c in output.outputs if c.index == index]
    return "".join(c.text for c in parts), [t for c in parts for t in c.token_ids]


# ---- what comes out ----


def test_many_streams_at_once_give_the_offline_tokens(llm: LLM, engine: AsyncLLM) -> None:
    prompts = [f"{prompt} {number}" for number in range(10) for prompt in PROMPTS]
    sampling = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=8 + i, stop=["the"] if i % 3 else None)
        for i in range(len(prompts))
    ]
    offline = llm.generate(prompts, sampling, use_tqdm=False)

    async def test() -> None:
        for sampling_params in sampling:
            sampling_params.output_kind = DELTA
        streams = await asyncio.gather(
            *(collect(engine, prompt, sampling[i], f"r{i}") for i, prompt in enumerate(prompts))
        )
        for expected, stream in zip(offline, streams, strict=True):
            completion = expected.outputs[0]
            assert joined(stream) == (completion.text, completion.token_ids)
            assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
            last = stream[-1].outputs[0]
            assert last.finish_reason == completion.finish_reason
            assert last.stop_reason == completion.stop_reason

    run(test)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_output_kinds(llm: LLM, engine: AsyncLLM, kind: RequestOutputKind) -> None:
    (expected,) = llm.generate([PROMPTS[0]], params(), use_tqdm=False)
    completion = expected.outputs[0]

    async def test() -> None:
        outputs = await collect(engine, PROMPTS[0], params(output_kind=kind), "x")
        if kind == FINAL_ONLY:
            assert len(outputs) == 1
        if kind == DELTA:
            assert joined(outputs) == (completion.text, completion.token_ids)
        else:
            assert outputs[-1].outputs == expected.outputs
            for output in outputs:
                assert completion.text.startswith(output.outputs[0].text)
        assert outputs[-1].finished

    run(test)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_n_samples_are_those_of_the_offline_engine(
    llm: LLM, engine: AsyncLLM, kind: RequestOutputKind
) -> None:
    sampling = SamplingParams(n=3, seed=7, max_tokens=12, logprobs=1)
    (expected,) = llm.generate([PROMPTS[1]], sampling, use_tqdm=False)
    sampling.output_kind = kind

    async def test() -> None:
        outputs = await collect(engine, PROMPTS[1], sampling, "x")
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for completion in expected.outputs:
            if kind == DELTA:
                assert joined(outputs, completion.index) == (completion.text, completion.token_ids)
            else:
                seen = [c for o in outputs for c in o.outputs if c.index == completion.index]
                assert seen[-1].token_ids == completion.token_ids
                assert seen[-1].logprobs is not None
                assert len(seen[-1].logprobs) == len(completion.token_ids)

    run(test)


def test_a_slow_consumer_finds_deltas_joined(llm: LLM, engine: AsyncLLM) -> None:
    """It gets fewer outputs than there are tokens, and misses nothing."""
    sampling = SamplingParams(n=2, seed=3, max_tokens=40, logprobs=2, prompt_logprobs=1)
    (expected,) = llm.generate([PROMPTS[0]], sampling, use_tqdm=False)
    sampling.output_kind = DELTA

    async def test() -> None:
        outputs = []
        async for output in engine.generate(PROMPTS[0], sampling, "x"):
            outputs.append(output)
            while engine.output_processor.has_unfinished_requests():
                await asyncio.sleep(0.005)
        assert len(outputs) <= 3
        for completion in expected.outputs:
            assert joined(outputs, completion.index) == (completion.text, completion.token_ids)
            pieces = [c for o in outputs for c in o.outputs if c.index == completion.index]
            logprobs = [entry for c in pieces for entry in c.logprobs or ()]
            assert [list(entry) for entry in logprobs] == [list(e) for e in completion.logprobs]
            assert pieces[-1].finish_reason == completion.finish_reason
            assert pieces[-1].cumulative_logprob == pytest.approx(completion.cumulative_logprob)
        prompt_logprobs = next(o.prompt_logprobs for o in outputs if o.prompt_logprobs)
        assert len(prompt_logprobs) == len(expected.prompt_token_ids)

    run(test)


def test_a_consumer_that_never_reads_holds_nobody_up(engine: AsyncLLM) -> None:
    async def test() -> None:
        queue = await engine.add_request("silent", PROMPTS[0], params(200, output_kind=DELTA))
        outputs = await collect(engine, PROMPTS[1], params(), "reader")
        assert outputs[-1].finished
        while engine.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.005)
        assert isinstance(queue.output, RequestOutput)
        assert len(queue.output.outputs[0].token_ids) <= 200

    run(test)


# ---- cancelling ----


def test_requests_cancelled_at_random_leave_nothing_and_change_nothing(
    llm: LLM, engine: AsyncLLM
) -> None:
    rng = random.Random(0)
    prompts = [f"{PROMPTS[i % 4]} {i}" for i in range(60)]
    sampling = [params(30, output_kind=DELTA, n=1 + i % 2) for i in range(60)]
    offline = llm.generate(prompts, sampling, use_tqdm=False)

    async def one(i: int, limit: int | None) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        async for output in engine.generate(prompts[i], sampling[i], f"r{i}"):
            outputs.append(output)
            if len(outputs) == limit:
                await asyncio.sleep(3600)  # until it is cancelled
        return outputs

    async def test() -> None:
        limits = [rng.randrange(1, 20) if rng.random() < 0.3 else None for _ in prompts]
        tasks = [asyncio.create_task(one(i, limit)) for i, limit in enumerate(limits)]
        doomed = [task for task, limit in zip(tasks, limits, strict=True) if limit is not None]
        assert len(doomed) >= 10
        for task in doomed:
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result, limit, expected in zip(results, limits, offline, strict=True):
            if limit is not None:
                assert isinstance(result, asyncio.CancelledError)
                continue
            assert not isinstance(result, BaseException)
            for completion in expected.outputs:
                assert joined(result, completion.index)[1] == completion.token_ids

    run(test)


def test_a_closed_generator_frees_its_blocks_before_the_next_step_is_over(
    engine: AsyncLLM,
) -> None:
    core = core_of(engine)
    schedule, held = core.scheduler.schedule, []

    def look_and_schedule() -> Any:
        held.append({r.split("-")[0] for r in core.scheduler.requests})
        return schedule()

    async def test() -> None:
        core.scheduler.schedule = look_and_schedule
        try:
            stream = engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "x")
            await anext(stream)
            await stream.aclose()
            num_steps = len(held)
            while not await engine.is_idle():
                await asyncio.sleep(0.001)
            # The step that was under way, perhaps, and the one that tells the runner.
            assert all("x" not in requests for requests in held[num_steps + 1 :])
            assert len(held) - num_steps <= 3
        finally:
            del core.scheduler.schedule

    run(test)


def test_a_generator_that_is_dropped_is_aborted(engine: AsyncLLM) -> None:
    async def test() -> None:
        async for _ in engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "x"):
            break
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not engine.output_processor.has_unfinished_requests()

    run(test)


def test_the_end_of_the_event_loop_aborts_what_is_under_way(engine: AsyncLLM) -> None:
    """And in the next one the engine goes on."""
    tasks = []

    async def test() -> None:
        tasks.append(asyncio.create_task(collect(engine, PROMPTS[0], params(200), "x")))
        while not engine.output_processor.has_unfinished_requests():
            await asyncio.sleep(0)

    for _ in range(2):
        run(test)
        assert tasks.pop().cancelled()


def test_with_async_scheduling_too(llm: LLM) -> None:
    offline = llm.generate(PROMPTS, params(), use_tqdm=False)
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS, async_scheduling=True))

    async def test() -> None:
        doomed = engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "doomed")
        await anext(doomed)
        good = [collect(engine, prompt, params(), prompt) for prompt in PROMPTS]
        streams = asyncio.gather(*good)
        await doomed.aclose()
        for outputs, expected in zip(await streams, offline, strict=True):
            assert outputs[-1].outputs == expected.outputs

    run(test)
    assert_clean(engine)
    engine.shutdown()


@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_from_elsewhere_ends_the_stream(engine: AsyncLLM, n: int) -> None:
    async def test() -> None:
        sampling = params(200, output_kind=DELTA, n=n)
        stream = engine.generate(PROMPTS[0], sampling, "x")
        outputs = [await anext(stream)]
        await engine.abort(["x", "unknown"])
        outputs += [output async for output in stream]
        assert outputs[-1].finished
        assert {c.finish_reason for c in outputs[-1].outputs} == {"abort"}
        assert len(outputs[-1].outputs) == n

    run(test)


def test_an_old_consumer_does_not_abort_a_new_request_of_its_id(engine: AsyncLLM) -> None:
    async def test() -> None:
        stream = engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "x")
        await anext(stream)
        await engine.abort("x")
        later = asyncio.create_task(collect(engine, PROMPTS[0], params(), "x"))
        await asyncio.sleep(0)
        await stream.aclose()
        assert (await later)[-1].outputs[0].finish_reason != "abort"

    run(test)


# ---- errors of one request ----


def test_a_request_that_cannot_run_is_refused_alone(engine: AsyncLLM) -> None:
    async def test() -> None:
        good = asyncio.create_task(collect(engine, PROMPTS[0], params(), "good"))
        await asyncio.sleep(0)
        for prompt, sampling, request_id, message in [
            ("", params(), "a", "empty"),
            ([10**6], params(), "b", "vocabulary"),
            ([5] * 256, params(), "c", "max_model_len"),
            (PROMPTS[0], "greedy", "d", "SamplingParams"),
            (PROMPTS[0], params(), "good", "taken"),
            (PROMPTS[0], params(n=2), "good", "taken"),
            (PROMPTS[0], params(), 7, "request_id"),
        ]:
            with pytest.raises(VLLMValidationError, match=message):
                await collect(engine, prompt, sampling, request_id)
        assert (await good)[-1].finished

    run(test)


def test_an_error_of_the_detokenizer_reaches_its_request_alone(engine: AsyncLLM) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such token")

    async def test() -> None:
        bad = engine.generate(PROMPTS[0], params(100, output_kind=DELTA, n=2), "bad")
        good = asyncio.create_task(collect(engine, PROMPTS[1], params(), "good"))
        await anext(bad)
        processor = engine.output_processor
        state = processor.request_states[processor.external_req_ids["bad"][1]]
        state.detokenizer.update = fail  # type: ignore[method-assign]
        with pytest.raises(EngineGenerateError, match="KeyError: 'no such token'"):
            async for _ in bad:
                pass
        assert (await good)[-1].finished

    run(test)


def test_an_error_of_the_core_at_add_time_reaches_its_request_alone(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(engine)
    add_request = core.add_request

    def fail_for_bad(request: Any) -> None:
        if request.request_id.startswith("2_bad"):
            raise MemoryError("no room")
        add_request(request)

    async def test() -> None:
        good = asyncio.create_task(collect(engine, PROMPTS[1], params(), "good"))
        with pytest.raises(EngineGenerateError, match="MemoryError: no room"):
            await collect(engine, PROMPTS[0], params(n=3), "bad")
        assert (await good)[-1].finished

    monkeypatch.setattr(core, "add_request", fail_for_bad)
    run(test)


# ---- the end of the engine ----


def test_a_step_that_fails_is_reported_to_everyone_once(own_engine: AsyncLLM) -> None:
    engine, core = own_engine, core_of(own_engine)

    def fail(scheduler_output: Any) -> None:
        raise RuntimeError("device lost")

    async def test() -> None:
        await engine.check_health()
        assert engine.is_running
        streams = [
            engine.generate(PROMPTS[i], params(200, output_kind=DELTA, n=1 + i % 2), f"r{i}")
            for i in range(4)
        ]
        for stream in streams:
            await anext(stream)
        core.model_executor.execute_model = fail

        async def drain(stream: Any) -> None:
            async for _ in stream:
                pass

        results = await asyncio.gather(*map(drain, streams), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert all("RuntimeError: device lost" in str(result) for result in results)
        assert len({id(result) for result in results}) == 4
        for stream in streams:  # and no second time
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

        assert engine.errored
        for call in (
            engine.check_health(),
            engine.reset_prefix_cache(),
            collect(engine, PROMPTS[0], params(), "late"),
        ):
            with pytest.raises(EngineDeadError, match="device lost"):
                await call
        await engine.abort("r0")
        assert not engine.output_processor.request_states

    run(test)


def test_an_error_of_the_output_handler_itself_ends_the_engine(own_engine: AsyncLLM) -> None:
    class BrokenLogger:
        def record(self, *args: Any) -> None:
            raise OSError("disk full")

    async def test() -> None:
        own_engine.logger_manager = BrokenLogger()  # type: ignore[assignment]
        with pytest.raises(EngineDeadError, match="disk full"):
            await collect(own_engine, PROMPTS[0], params(200), "x")
        assert own_engine.errored
        while core_of(own_engine).scheduler.requests:  # nobody will take their outputs
            await asyncio.sleep(0.001)

    run(test)


def test_shutdown_ends_streams_and_the_thread(own_engine: AsyncLLM) -> None:
    async def test() -> None:
        stream = own_engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "x")
        await anext(stream)
        own_engine.shutdown()
        own_engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass

    thread = own_engine.engine_core._thread  # type: ignore[attr-defined]
    run(test)
    assert not thread.is_alive()


def test_an_engine_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    engine = AsyncLLM.from_engine_args(EngineArgs(**LIMITS))
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_cannot_be_built_says_why() -> None:
    with pytest.raises(VLLMValidationError, match="too few for one request"):
        AsyncLLM.from_engine_args(EngineArgs(num_gpu_blocks_override=2))


# ---- the engine as a whole ----


def test_the_prefix_cache_is_reset_only_while_idle(engine: AsyncLLM) -> None:
    async def test() -> None:
        stream = engine.generate(PROMPTS[0], params(200, output_kind=DELTA), "x")
        await anext(stream)
        assert not await engine.is_idle()
        assert not await engine.reset_prefix_cache()
        await stream.aclose()
        while not await engine.is_idle():
            await asyncio.sleep(0.001)
        assert await engine.reset_prefix_cache()

    run(test)


def test_an_unknown_utility_says_so(engine: AsyncLLM) -> None:
    async def test() -> None:
        with pytest.raises(RuntimeError, match="no_such_method"):
            await engine.engine_core.call_utility_async("no_such_method")

    run(test)


def test_priorities_reach_the_scheduler() -> None:
    engine = AsyncLLM.from_engine_args(
        EngineArgs(**(LIMITS | {"max_num_seqs": 1, "scheduling_policy": "priority"}))
    )
    order: list[str] = []

    async def one(request_id: str, priority: int) -> None:
        await collect(engine, PROMPTS[0], params(), request_id, priority=priority)
        order.append(request_id)

    async def test() -> None:
        await asyncio.gather(one("first", 5), one("last", 9), one("third", 3), one("second", 1))

    run(test)
    engine.shutdown()
    assert order.index("second") < order.index("third") < order.index("last")


def test_the_loggers_get_the_statistics_of_every_step(engine: AsyncLLM) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.records: list[tuple[SchedulerStats | None, IterationStats | None]] = []

        def record(self, *stats: Any) -> None:
            self.records.append(stats)

    recorder = Recorder()

    async def test() -> None:
        loggers, engine.logger_manager = engine.logger_manager, recorder  # type: ignore
        try:
            await asyncio.gather(
                collect(engine, PROMPTS[0], params(9, ignore_eos=True), "x"),
                collect(engine, PROMPTS[1], params(7, ignore_eos=True, n=2), "y"),
            )
            while not await engine.is_idle():
                await asyncio.sleep(0.001)
        finally:
            engine.logger_manager = loggers

    run(test)
    iterations = [i for _, i in recorder.records if i is not None]
    schedulers = [s for s, _ in recorder.records if s is not None]
    assert sum(i.num_generation_tokens for i in iterations) == 9 + 2 * 7
    assert sum(len(i.time_to_first_tokens_iter) for i in iterations) == 3
    assert sum(len(i.inter_token_latencies_iter) for i in iterations) == 8 + 2 * 6
    finished = [f for i in iterations for f in i.finished_requests]
    assert sorted((f.request_id, f.num_generation_tokens) for f in finished) == [
        ("x", 9),
        ("y", 7),
        ("y", 7),
    ]
    assert all(f.e2e_latency >= f.inference_time >= f.decode_time > 0 for f in finished)
    assert sorted(n for i in iterations for n in i.n_params_iter) == [1, 2]
    assert sorted(m for i in iterations for m in i.max_num_generation_tokens_iter) == [7, 9]
    assert max(s.num_running_reqs for s in schedulers) == 3
    assert schedulers[-1].num_running_reqs == 0
