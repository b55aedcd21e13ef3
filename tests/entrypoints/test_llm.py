"""LLM: prompts in, outputs out, in order; and whatever fails leaves a clean engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import MAX_MODEL_LEN, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

import nanovllm
from nanovllm import LLM, RequestOutputKind, SamplingParams, VLLMValidationError
from nanovllm.outputs import RequestOutput

NUM_BLOCKS = 60
# Long enough that a prompt fills whole blocks, short enough to leave room.
LONG = "a cat sat on the mat and looked at the dog "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", num_gpu_blocks_override=NUM_BLOCKS)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, which every test must leave as empty as it found it."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    assert_clean(shared_llm)


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def assert_clean(llm: LLM) -> None:
    """No request on either side, every block free."""
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert not llm.llm_engine.output_processor.external_req_ids
    scheduler = scheduler_of(llm)
    assert not scheduler.requests
    assert not scheduler.running
    assert not len(scheduler.waiting)
    assert scheduler.kv_cache_manager.usage == 0.0


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def run(llm: LLM, prompts: Any, params: Any = None, **kwargs: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **kwargs)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


# ---- what comes out ----


def test_greedy_tokens_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    prompts = ["a cat", LONG, "z", "\U0001f600"]
    tokenizer = llm.get_tokenizer()
    for output, prompt in zip(run(llm, prompts, greedy(16)), prompts, strict=True):
        input_ids = torch.tensor([tokenizer.encode(prompt)])
        expected = model.generate(
            input_ids, max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert list(output.outputs[0].token_ids) == expected[0, input_ids.shape[1] :].tolist()
        assert output.prompt == prompt
        assert output.finished


def test_results_are_in_the_order_of_the_prompts_whatever_finishes_first(llm: LLM) -> None:
    lengths = [9, 1, 5, 3]
    outputs = run(llm, ["a", "b", "c", "d"], [greedy(length) for length in lengths])
    assert [output.prompt for output in outputs] == ["a", "b", "c", "d"]
    assert [len(ids) for ids in tokens(outputs)] == lengths


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    prompts = ["a cat", LONG, "dog", [5, 6, 7]]
    assert tokens(run(llm, prompts)) == [tokens(run(llm, prompt))[0] for prompt in prompts]


def test_a_list_of_ids_is_one_prompt_and_an_empty_list_none(llm: LLM) -> None:
    (output,) = run(llm, [5, 6, 7])
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6, 7])
    assert len(run(llm, [[5, 6], [7]])) == 2
    assert run(llm, []) == []


def test_dicts_carry_salt_and_priority(llm: LLM) -> None:
    """Prompts share cached blocks only within one salt."""
    first = run(llm, {"prompt": LONG, "cache_salt": "alice", "priority": 1})
    again = run(llm, {"prompt": LONG, "cache_salt": "alice"})
    other = run(llm, {"prompt": LONG, "cache_salt": "bob"})
    assert [out.num_cached_tokens for out in first + again + other] == [0, 32, 0]
    assert tokens(first) == tokens(again) == tokens(other)


def test_n_samples_come_in_one_output_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (first,), (second,) = run(llm, "a cat", params), run(llm, "a cat", params)
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert first.outputs == second.outputs
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 3


def test_a_stop_string_cuts_the_text_and_frees_the_request_at_once(llm: LLM) -> None:
    """It runs over two tokens, for a token of this model is a byte."""
    (whole,) = run(llm, "z", greedy(40))
    text = whole.outputs[0].text
    start = next(i for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    stop = text[start : start + 2]
    (output,) = run(llm, "z", greedy(40, stop=stop))
    sample = output.outputs[0]
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert len(sample.token_ids) < 40


def test_a_request_stops_at_max_model_len_with_reason_length(llm: LLM) -> None:
    (output,) = run(llm, [5] * 120, greedy(500))
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 120
    assert output.outputs[0].finish_reason == "length"


def test_logprobs_and_prompt_logprobs_are_there_when_asked_for(llm: LLM) -> None:
    (output,) = run(llm, "a cat", greedy(4, logprobs=2, prompt_logprobs=1))
    sample = output.outputs[0]
    assert sample.logprobs is not None
    assert [next(iter(entry)) for entry in sample.logprobs] == sample.token_ids
    sampled = [next(iter(entry.values())) for entry in sample.logprobs]
    assert all(logprob.rank == 1 for logprob in sampled)
    assert sample.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sampled))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    following = [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry]
    assert following == output.prompt_token_ids[1:]


def test_metrics_are_there_and_in_order(llm: LLM) -> None:
    (output,) = run(llm, "a cat")
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 8
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts < metrics.last_token_ts
    assert 0 < metrics.first_token_latency < 60


def test_lower_priority_values_run_first(folder: Path) -> None:
    llm = LLM(
        str(folder),
        device="cpu",
        num_gpu_blocks_override=NUM_BLOCKS,
        scheduling_policy="priority",
        max_num_seqs=1,
    )
    outputs = run(llm, ["a", "b", "c"], priority=[2, 0, 1])
    outputs += run(llm, ["d", {"prompt": "e", "priority": -1}])
    began = [output.metrics.scheduled_ts for output in outputs if output.metrics]
    a, b, c, d, e = began
    assert b < c < a
    assert e < d


def test_default_parameters_are_the_models(llm: LLM) -> None:
    """generation_config.json says top_k=50; what it does not say is vLLM's default."""
    params = llm.get_default_sampling_params()
    assert (params.top_k, params.top_p, params.max_tokens) == (50, 1.0, 16)
    (output,) = llm.generate("a", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_the_users_parameters_are_not_changed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)
    run(llm, [5] * 100, params)
    assert params == SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)


def test_the_progress_bar_shows_input_and_output_speed(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], greedy())
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert "tok/s" in captured.err
    assert captured.out == ""


# ---- chat ----

CONVERSATION = [{"role": "user", "content": "hello"}]


def test_chat_is_generate_on_what_the_template_writes(llm: LLM) -> None:
    (output,) = llm.chat(CONVERSATION, greedy(), use_tqdm=False)
    text = "<|user|>hello<|end|><|assistant|>"
    token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert (output.prompt, output.prompt_token_ids) == (text, token_ids)
    assert tokens([output]) == tokens(run(llm, token_ids))


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
    other = [{"role": "user", "content": parts}]
    outputs = llm.chat([CONVERSATION, other], greedy(2), use_tqdm=False)
    assert ["hello" in out.prompt for out in outputs] == [True, False]
    assert "two\nlines" in outputs[1].prompt


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": "Once"}]
    (output,) = llm.chat(
        messages,
        greedy(2),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt.endswith("Once")


@pytest.mark.parametrize(
    ("messages", "kwargs", "message"),
    [
        ([], {}, None),
        ([[]], {}, "non-empty list"),
        ("hello", {}, "must be a list, not str"),
        (["hello"], {}, "non-empty list of dicts"),
        ([{"content": "hello"}], {}, "message 0 must be a dict with a 'role'"),
        ([{"role": "user", "content": 3}], {}, "message 0 must have a str"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "text parts"),
        ([{"role": "tool", "content": "x"}], {}, "does not accept these messages: no tools here"),
        (CONVERSATION, {"continue_final_message": True}, "exclude each other"),
        (CONVERSATION, {"chat_template": "no.jinja"}, "neither a file nor a Jinja template"),
    ],
)
def test_bad_messages_are_refused(
    llm: LLM, messages: Any, kwargs: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert llm.chat(messages, greedy(), use_tqdm=False, **kwargs) == []
        return
    with pytest.raises(VLLMValidationError, match=message):
        llm.chat(messages, greedy(), use_tqdm=False, **kwargs)


def test_a_model_without_a_template_needs_one_given_as_text_or_file(
    tmp_path: Path,
) -> None:
    """What the template writes gets no BOS; a text of `generate` does."""
    bare = save_tiny_checkpoint(tmp_path / "bare", chat_template=None, bos=True)
    llm = LLM(str(bare), device="cpu", num_gpu_blocks_override=NUM_BLOCKS)
    with pytest.raises(VLLMValidationError, match="no chat template"):
        llm.chat(CONVERSATION, greedy(), use_tqdm=False)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (output,) = llm.chat(CONVERSATION, greedy(2), use_tqdm=False, chat_template=template)
    assert output.prompt == "[hello]"
    (text_output,) = run(llm, "[hello]", greedy(2))
    bos = llm.get_tokenizer().eos_token_id
    assert text_output.prompt_token_ids == [bos, *output.prompt_token_ids]
    file = tmp_path / "template.jinja"
    file.write_text(template)
    (output,) = llm.chat(CONVERSATION, greedy(2), use_tqdm=False, chat_template=str(file))
    assert output.prompt == "[hello]"


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("prompts", "params", "kwargs", "message"),
    [
        (["a", "b", ""], None, {}, "is empty"),
        (["a", [5] * MAX_MODEL_LEN], None, {}, "max_model_len 128"),
        (["a", [9999]], None, {}, "outside the model's vocabulary"),
        (["a", 3], None, {}, "of type int"),
        (3, None, {}, "prompts must be a prompt or a list"),
        (["a", "b"], [SamplingParams()], {}, "as many as the prompts .2., but there are 1"),
        (["a", "b"], [SamplingParams(), None], {}, "must be SamplingParams"),
        (["a", "b"], None, {"priority": [1]}, "priority must be as many as"),
        (["a", "b"], None, {"priority": 1}, "priority must be a list"),
    ],
)
def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(
    llm: LLM, prompts: Any, params: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        run(llm, prompts, params, **kwargs)
    assert_clean(llm)
    assert len(run(llm, ["a", "b"])) == 2


def test_a_refused_request_does_not_disturb_those_that_run(llm: LLM) -> None:
    """At the engine's own interface: the others go on to the same tokens."""
    expected = tokens(run(llm, "a cat"))
    engine = llm.llm_engine
    engine.add_request("good", "a cat", greedy())
    engine.step()
    for request_id, prompt in (("bad", ""), ("good", "dog"), (5, "dog")):
        with pytest.raises(VLLMValidationError):
            engine.add_request(request_id, prompt, greedy())
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert tokens(outputs) == expected


@pytest.mark.parametrize("error", [RuntimeError("the device is on fire"), KeyboardInterrupt()])
def test_a_step_that_fails_frees_what_it_held_and_raises(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    expected = tokens(run(llm, [LONG, "b"]))
    worker = llm.llm_engine.engine_core.engine_core.model_executor
    execute_model, steps = worker.execute_model, iter(range(100))

    def fail_in_the_third_step(scheduler_output: Any) -> Any:
        if next(steps) == 2:
            raise error
        return execute_model(scheduler_output)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "execute_model", fail_in_the_third_step)
        with pytest.raises(type(error)) as raised:
            run(llm, [LONG, "b"])
    assert raised.traceback[-1].name == "fail_in_the_third_step"
    assert_clean(llm)
    assert tokens(run(llm, [LONG, "b"])) == expected


def test_a_failed_step_of_the_engine_itself_drops_every_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.llm_engine
    engine.add_request("x", "a cat", SamplingParams(n=2))
    engine.add_request("y", LONG, greedy())

    def fail(outputs: Any, timestamp: float) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.output_processor, "process_outputs", fail)
        with pytest.raises(RuntimeError, match="no"):
            engine.step()
    assert_clean(llm)


def test_an_error_of_the_core_at_add_time_leaves_no_ghost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of three samples: the two before it go, too."""
    core = llm.llm_engine.engine_core
    add_request, calls = core.add_request, iter(range(3))

    def fail_at_the_third(request: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("no")
        add_request(request)

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request", fail_at_the_third)
        with pytest.raises(RuntimeError, match="no"):
            run(llm, "a", SamplingParams(n=3))
    assert_clean(llm)


def test_an_aborted_request_is_gone_and_the_others_go_on(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("stay", "a cat", greedy())
    engine.add_request("go", LONG, SamplingParams(n=2, max_tokens=8))
    engine.step()
    engine.abort_request(["go", "never seen"])
    seen = set()
    while engine.has_unfinished_requests():
        seen |= {output.request_id for output in engine.step()}
    assert seen == {"stay"}


def test_requests_added_to_the_engine_directly_run_along(llm: LLM) -> None:
    llm.llm_engine.add_request("mine", "a cat", greedy(2))
    assert len(run(llm, ["a", "b"])) == 2


# ---- construction ----


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": "no/such/folder"}, "neither a folder nor a known name"),
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"chat_template": "no.jinja"}, "neither a file"),
        ({"num_gpu_blocks_override": 8}, "too few for one request of max_model_len 128"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_start(
    folder: Path, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        LLM(**{"model": str(folder), "device": "cpu"} | kwargs)


def test_without_a_tokenizer_ids_go_in_and_come_out(folder: Path) -> None:
    llm = LLM(
        str(folder), device="cpu", num_gpu_blocks_override=NUM_BLOCKS, skip_tokenizer_init=True
    )
    (output,) = run(llm, [5, 6, 7])
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == ""
    with pytest.raises(VLLMValidationError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_the_start_names_device_dtype_backend_and_the_caches_size(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="nanovllm"):
        LLM(str(folder), device="cpu", num_gpu_blocks_override=NUM_BLOCKS)
    text = caplog.text
    for part in ("Qwen3ForCausalLM", "on cpu", "threads", "float32", "CPU_ATTN"):
        assert part in text
    # 60 blocks less the null block; 59 * 16 = 944 tokens = 7.4 times 128.
    assert "59 blocks of 16 tokens = 944 tokens, 7.4 requests of max_model_len 128" in text


def test_importing_the_package_is_instant_and_loads_no_torch() -> None:
    program = (
        "import time; start = time.perf_counter(); import nanovllm; "
        "elapsed = time.perf_counter() - start; import sys; "
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules); "
        "assert elapsed < 0.3, elapsed"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_can_be_imported() -> None:
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
    assert set(dir(nanovllm)) >= {"LLM", "SamplingParams"}
    assert nanovllm.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = nanovllm.LLMM
