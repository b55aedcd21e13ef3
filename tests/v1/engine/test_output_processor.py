"""The core's tokens become RequestOutputs, and finished requests leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer, make_request

from nanovllm.exceptions import VLLMValidationError
from nanovllm.logprobs import Logprob
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from nanovllm.v1.engine.output_processor import OutputProcessor
from nanovllm.v1.engine.parallel_sampling import ParentRequest
from nanovllm.v1.metrics.stats import PrefillStats
from nanovllm.v1.outputs import LogprobsLists, LogprobsTensors

TOKENIZER = byte_level_tokenizer()
KINDS = list(RequestOutputKind)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def add(processor: OutputProcessor, request: EngineCoreRequest, prompt: str | None = None) -> None:
    """Add as LLMEngine does, fanned out for n > 1."""
    if request.sampling_params.n == 1:
        processor.add_request(request, prompt)
        return
    parent = ParentRequest(request)
    for index in range(parent.n):
        child_id, child_params = parent.get_child_info(index)
        child = EngineCoreRequest(
            child_id, request.prompt_token_ids, child_params, 0.0, external_req_id="x"
        )
        processor.add_request(child, prompt, parent, index)


def step(processor: OutputProcessor, *outputs: EngineCoreOutput) -> list[RequestOutput]:
    return processor.process_outputs(list(outputs), engine_core_timestamp=1.0).request_outputs


def run(
    processor: OutputProcessor, token_ids: list[int], request_id: str = "x", **last: Any
) -> list[RequestOutput]:
    """One token a step; `last` describes the output of the last."""
    shown = []
    for i, token_id in enumerate(token_ids):
        is_last = i == len(token_ids) - 1
        output = EngineCoreOutput(request_id, [token_id], **(last if is_last else {}))
        shown += step(processor, output)
    return shown


def assert_empty(processor: OutputProcessor) -> None:
    assert not processor.has_unfinished_requests()
    assert not processor.request_states
    assert not processor.external_req_ids
    assert not processor.parent_requests


# ---- what is shown when ----


@given(text=st.text(max_size=20).filter(bool), num_cut=st.integers(0, 3))
@settings(max_examples=50)
def test_deltas_join_to_the_cumulative_and_to_the_final_output(text: str, num_cut: int) -> None:
    """The three output kinds tell one story, whatever is generated."""
    token_ids = encode(text)
    token_ids = token_ids[: max(len(token_ids) - num_cut, 1)]
    shown = {}
    for kind in KINDS:
        processor = OutputProcessor(TOKENIZER)
        add(processor, make_request(output_kind=kind))
        shown[kind] = run(processor, token_ids, finish_reason=FinishReason.LENGTH)
        assert_empty(processor)
    (final,) = shown[RequestOutputKind.FINAL_ONLY]
    cumulative = shown[RequestOutputKind.CUMULATIVE]
    delta = shown[RequestOutputKind.DELTA]
    assert cumulative[-1].outputs[0] == final.outputs[0]
    assert "".join(o.outputs[0].text for o in delta) == final.outputs[0].text
    assert [i for o in delta for i in o.outputs[0].token_ids] == token_ids
    assert [o.outputs[0].token_ids for o in cumulative] == [
        token_ids[: i + 1] for i in range(len(token_ids))
    ]
    assert [o.finished for o in cumulative] == [False] * (len(token_ids) - 1) + [True]
    assert final.outputs[0].finish_reason == "length"


def test_an_output_says_what_the_request_was() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(encode("The cat"), request_id="story"), "The cat")
    prefill = PrefillStats()
    prefill.set(num_prompt_tokens=40, num_cached_tokens=32)
    (output,) = step(processor, EngineCoreOutput("story", encode(" a")[:1], prefill_stats=prefill))
    assert output.request_id == "story"
    assert output.prompt == "The cat"
    assert output.prompt_token_ids == encode("The cat")
    assert output.num_cached_tokens == 32
    assert not output.finished
    assert output.outputs[0].finish_reason is None
    (output,) = step(processor, EngineCoreOutput("story", encode(" a")[:1]))
    assert output.num_cached_tokens == 32  # told once, remembered


def test_an_output_is_not_changed_by_later_steps() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(logprobs=0))
    row = LogprobsLists(np.array([[7]]), np.array([[-1.0]], np.float32), np.array([1]))
    (first,) = step(processor, EngineCoreOutput("x", [7], new_logprobs=row))
    step(processor, EngineCoreOutput("x", [7], new_logprobs=row))
    assert first.outputs[0].token_ids == [7]
    assert len(first.outputs[0].logprobs or []) == 1


# ---- stop strings ----


def test_a_stop_string_ends_the_request_here_and_tells_the_core_to_abort_it() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(stop=["was"], output_kind=RequestOutputKind.FINAL_ONLY))
    token_ids = encode("The cat was happy")
    for token_id in token_ids:
        result = processor.process_outputs([EngineCoreOutput("x", [token_id])], 1.0)
        if result.request_outputs:
            break
    (output,) = result.request_outputs
    assert result.reqs_to_abort == ["x"]
    assert output.outputs[0].text == "The cat "
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "was")
    assert_empty(processor)
    assert step(processor, EngineCoreOutput("x", [token_ids[-1]])) == []  # too late


def test_a_request_that_the_core_ended_is_not_aborted_again() -> None:
    """The stop string may be completed by the very token that was the last one allowed."""
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(stop=["T"]))
    output = EngineCoreOutput("x", encode("T"), finish_reason=FinishReason.LENGTH)
    result = processor.process_outputs([output], 1.0)
    assert result.reqs_to_abort == []
    assert result.request_outputs[0].outputs[0].finish_reason == "stop"
    assert_empty(processor)


def test_eos_is_output_but_not_text_and_its_stop_reason_is_the_cores() -> None:
    for stop_reason in (None, TOKENIZER.eos_token_id):
        processor = OutputProcessor(TOKENIZER)
        add(processor, make_request(skip_special_tokens=False))
        token_ids = [*encode("cat"), TOKENIZER.eos_token_id]
        last = {"finish_reason": FinishReason.STOP, "stop_reason": stop_reason}
        output = run(processor, token_ids, **last)[-1].outputs[0]
        assert (output.text, output.token_ids) == ("cat", token_ids)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop_reason)


# ---- n > 1 ----


def test_n_samples_come_as_one_output_in_order_when_the_last_has_finished() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(n=3, output_kind=RequestOutputKind.FINAL_ONLY))
    assert processor.get_num_unfinished_requests() == 3
    a, b, c = encode("a")[0], encode("b")[0], encode("c")[0]
    end = {"finish_reason": FinishReason.LENGTH}
    assert step(processor, EngineCoreOutput("2_x", [c], **end)) == []
    assert step(processor, EngineCoreOutput("0_x", [a], **end)) == []
    (output,) = step(processor, EngineCoreOutput("1_x", [b], **end))
    assert output.finished
    assert output.request_id == "x"
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    assert_empty(processor)


def test_streamed_samples_come_one_by_one_and_only_the_last_finishes_the_request() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(n=2, output_kind=RequestOutputKind.DELTA))
    a = encode("a")[0]
    end = {"finish_reason": FinishReason.LENGTH}
    outputs = step(processor, EngineCoreOutput("0_x", [a], **end), EngineCoreOutput("1_x", [a]))
    assert [(o.outputs[0].index, o.finished) for o in outputs] == [(0, False), (1, False)]
    (output,) = step(processor, EngineCoreOutput("1_x", [a], **end))
    assert output.finished
    assert_empty(processor)


def test_aborting_drops_every_sample_and_says_which_the_core_must_drop() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(n=3))
    step(processor, EngineCoreOutput("1_x", [7], finish_reason=FinishReason.LENGTH))
    assert processor.abort_requests(["unknown", "x", "x"]) == ["0_x", "2_x"]
    assert_empty(processor)
    assert step(processor, EngineCoreOutput("0_x", [7])) == []


@pytest.mark.parametrize("n", [1, 2])
def test_an_id_that_is_in_use_is_refused_and_free_again_afterwards(n: int) -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(n=n))
    for other in (1, 2):
        with pytest.raises(VLLMValidationError, match="'x' is taken"):
            add(processor, make_request(n=other))
    assert processor.get_num_unfinished_requests() == n
    processor.abort_requests(["x"])
    add(processor, make_request(n=n))


# ---- logprobs ----


def sample_row(*candidates: tuple[int, float], rank: int = 1) -> LogprobsLists:
    token_ids, logprobs = zip(*candidates, strict=True)
    return LogprobsLists(np.array([token_ids]), np.array([logprobs]), np.array([rank]))


def test_logprobs_are_those_asked_for_with_the_sampled_token_first() -> None:
    """A batch computes as many as its greediest request wants; this one gets two and its own."""
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(logprobs=2))
    a, b, c, d = (encode(letter)[0] for letter in "abcd")
    row = sample_row((d, -3.0), (a, -0.5), (b, -1.0), (c, -2.0), rank=4)
    (output,) = step(processor, EngineCoreOutput("x", [d], new_logprobs=row))
    assert output.outputs[0].logprobs == [
        {d: Logprob(-3.0, 4, "d"), a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, 2, "b")}
    ]
    assert list(output.outputs[0].logprobs[0]) == [d, a, b]
    row = sample_row((a, -0.5), (a, -0.5), (b, -1.0), (c, -2.0))
    (output,) = step(processor, EngineCoreOutput("x", [a], new_logprobs=row))
    assert output.outputs[0].logprobs[1] == {a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, 2, "b")}
    assert output.outputs[0].cumulative_logprob == -3.5


def test_minus_one_asks_for_all_logprobs_and_none_for_nothing() -> None:
    row = sample_row((7, -3.0), (8, -0.5), (9, -1.0), (7, -3.0))
    for asked, number in ((-1, 3), (0, 1)):
        processor = OutputProcessor(TOKENIZER)
        add(processor, make_request(logprobs=asked))
        (output,) = step(processor, EngineCoreOutput("x", [7], new_logprobs=row))
        assert len(output.outputs[0].logprobs[0]) == number
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request())
    (output,) = step(processor, EngineCoreOutput("x", [7], new_logprobs=row))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_deltas_carry_only_their_own_logprobs() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(logprobs=0, output_kind=RequestOutputKind.DELTA))
    for token_id in (7, 8):
        row = sample_row((token_id, -1.0))
        (output,) = step(processor, EngineCoreOutput("x", [token_id], new_logprobs=row))
        assert [list(entry) for entry in output.outputs[0].logprobs] == [[token_id]]
    end = EngineCoreOutput("x", [], finish_reason=FinishReason.ABORT)
    (output,) = step(processor, end)
    assert output.outputs[0].logprobs == []


def prompt_tensors(rows: list[list[int]]) -> LogprobsTensors:
    token_ids = torch.tensor(rows)
    ranks = torch.arange(len(rows)) + 1
    return LogprobsTensors(token_ids, -token_ids.float(), ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_begin_with_none_and_are_streamed_once(kind: RequestOutputKind) -> None:
    processor = OutputProcessor(TOKENIZER)
    prompt = encode("abc")
    add(processor, make_request(prompt, prompt_logprobs=1, output_kind=kind))
    tensors = prompt_tensors([[prompt[1], 5], [prompt[2], 6]])
    first = EngineCoreOutput("x", [7], new_prompt_logprobs_tensors=tensors)
    last = EngineCoreOutput("x", [7], finish_reason=FinishReason.LENGTH)
    outputs = [*step(processor, first), *step(processor, last)]
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs[0] is None
    assert [list(entry) for entry in prompt_logprobs[1:]] == [[prompt[1], 5], [prompt[2], 6]]
    assert prompt_logprobs[2][prompt[2]] == Logprob(-float(prompt[2]), 2, "c")
    assert prompt_logprobs[2][6].rank == 1
    if kind == RequestOutputKind.DELTA:
        assert outputs[1].prompt_logprobs == []
    elif kind == RequestOutputKind.CUMULATIVE:
        assert outputs[1].prompt_logprobs == prompt_logprobs


def test_the_token_that_completes_a_character_shows_all_of_it() -> None:
    """Decoded tokens of a sequence join to its text, though each alone is half a character."""
    tokenizer = byte_fallback_tokenizer()
    text = "é\U0001f600a"
    token_ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    processor = OutputProcessor(tokenizer)
    add(processor, make_request(logprobs=0))
    for token_id in token_ids:
        row = sample_row((token_id, -1.0))
        (output,) = step(processor, EngineCoreOutput("x", [token_id], new_logprobs=row))
    decoded = [next(iter(entry.values())).decoded_token for entry in output.outputs[0].logprobs]
    assert decoded == ["", "é", "", "", "", "\U0001f600", "a"]


def test_without_detokenize_nothing_is_decoded() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request(detokenize=False, logprobs=0))
    row = sample_row((7, -1.0))
    (output,) = step(processor, EngineCoreOutput("x", [7], new_logprobs=row))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == [7]
    assert output.outputs[0].logprobs == [{7: Logprob(-1.0, 1, None)}]


# ---- metrics ----


def test_metrics_note_first_scheduling_first_token_and_last_token() -> None:
    """A preempted request is scheduled again; its first time counts."""
    processor = OutputProcessor(TOKENIZER)
    add(processor, make_request())
    kinds = EngineCoreEventType
    events = [EngineCoreEvent(kinds.QUEUED, 1.0), EngineCoreEvent(kinds.SCHEDULED, 2.0)]
    processor.process_outputs([EngineCoreOutput("x", [7], events=events)], 3.0)
    events = [EngineCoreEvent(kinds.PREEMPTED, 4.0), EngineCoreEvent(kinds.SCHEDULED, 5.0)]
    last = EngineCoreOutput("x", [7, 7], events=events, finish_reason=FinishReason.LENGTH)
    (output,) = processor.process_outputs([last], 6.0).request_outputs
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.queued_ts, metrics.scheduled_ts) == (1.0, 2.0)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (3.0, 6.0)
    assert metrics.num_generation_tokens == 3
    assert metrics.first_token_latency > 0  # since arrival_time 0, the epoch


def test_metrics_can_be_turned_off() -> None:
    processor = OutputProcessor(TOKENIZER, log_stats=False)
    add(processor, make_request())
    (output,) = step(processor, EngineCoreOutput("x", [7]))
    assert output.metrics is None
