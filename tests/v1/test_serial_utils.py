"""A message that went through bytes is the message it was."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from nanovllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from nanovllm.v1.outputs import LogprobsLists, LogprobsTensors

pytest.importorskip("msgspec")

from nanovllm.v1.serial_utils import (
    MAX_INLINE_BYTES,
    MsgpackDecoder,
    MsgpackEncoder,
    OOBTensorConsumer,
)


def through_bytes(message: Any, message_type: Any = None) -> Any:
    buffers = [bytes(buffer) for buffer in MsgpackEncoder().encode(message)]
    return MsgpackDecoder(message_type).decode(buffers)


def same(a: Any, b: Any) -> bool:
    """Equal, types and arrays included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


# ---- arrays ----

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=3),
    transposed=st.booleans(),
)
def test_a_tensor_is_the_same_afterwards(
    dtype: torch.dtype, shape: list[int], transposed: bool
) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    if transposed and tensor.dim() >= 2:
        tensor = tensor.transpose(0, 1)
    (result,) = through_bytes([tensor])
    assert same(result, tensor)
    result.zero_()  # it belongs to the receiver


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(["f4", "f8", "f2", "i8", "i4", "u1", "?", ">i4"]),
    shape=st.lists(st.integers(0, 9), max_size=3),
)
def test_an_array_is_the_same_afterwards(dtype: str, shape: list[int]) -> None:
    array = np.asarray(np.random.default_rng(0).standard_normal(shape) * 9).astype(dtype)
    if shape:
        array = array[..., ::-1]
    assert isinstance(array, np.ndarray)
    (result,) = through_bytes([array])
    assert same(result, array)


def test_large_arrays_travel_as_buffers_of_their_own_without_a_copy() -> None:
    large, small = np.arange(1000.0), np.arange(3.0)
    buffers = MsgpackEncoder().encode({"large": large, "small": small, "again": large})
    assert len(buffers) == 3
    assert np.shares_memory(np.frombuffer(buffers[1], np.uint8), large)
    assert len(bytes(buffers[0])) < MAX_INLINE_BYTES
    decoded = MsgpackDecoder().decode(buffers)  # type: ignore[var-annotated]
    assert same(decoded["large"], large)
    assert same(decoded["small"], small)


def test_numpy_numbers_become_numbers() -> None:
    assert through_bytes([np.float32(0.5), np.int64(7), np.bool_(True)]) == [0.5, 7, True]


@pytest.mark.parametrize("intruder", [object(), np.array([object()]), lambda: None, 1j])
def test_what_has_no_form_as_bytes_is_refused_and_the_encoder_goes_on(intruder: Any) -> None:
    encoder = MsgpackEncoder()
    with pytest.raises(TypeError, match="a message cannot hold"):
        encoder.encode([np.arange(1000), intruder])
    assert len(encoder.encode([1])) == 1


def test_the_encoder_keeps_no_array_alive() -> None:
    encoder = MsgpackEncoder()
    buffers = encoder.encode([np.arange(1000)])
    assert len(buffers) == 2
    assert encoder._buffers == []


# ---- the engine's messages ----


def request(**kwargs: Any) -> EngineCoreRequest:
    return EngineCoreRequest("x-0", [3, 1, 4], SamplingParams(**kwargs), time.time())


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"n": 3, "seed": 2**63 - 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"stop": ["a", "bc"], "stop_token_ids": [5, 6], "min_tokens": 2},
        {"logit_bias": {5: -1.5, 900: 100.0}, "allowed_token_ids": [1, 2, 3]},
        {"logprobs": -1, "prompt_logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY},
        {"max_tokens": None, "ignore_eos": True, "detokenize": False},
    ],
)
def test_a_request_is_the_same_afterwards(kwargs: dict[str, Any]) -> None:
    message = request(**kwargs)
    message.sampling_params.update_from_generation_config({"eos_token_id": [7, 8]}, 7, 1000)
    message.sampling_params._bad_words_token_ids = [[1, 2], [3]]
    result = through_bytes(message, EngineCoreRequest)
    assert same(result, message)
    assert isinstance(result.sampling_params.all_stop_token_ids, set)
    assert result.sampling_params.sampling_type == message.sampling_params.sampling_type


def test_outputs_are_the_same_afterwards() -> None:
    lists = LogprobsLists(
        np.array([[1, 2]], np.int32), np.array([[-0.5, -1.0]], np.float32), np.array([1], np.int32)
    )
    message = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput("a", [1]),
            EngineCoreOutput(
                "b",
                [1, 2],
                new_logprobs=lists,
                new_prompt_logprobs_tensors=LogprobsTensors.empty_cpu(100, 4),
                finish_reason=FinishReason.LENGTH,
                stop_reason=5,
                events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
                prefill_stats=PrefillStats(5, 3, 2),
            ),
            EngineCoreOutput("c", [], finish_reason=FinishReason.ERROR, stop_reason="why"),
        ],
        scheduler_stats=SchedulerStats(1, 2, 0.5, PrefixCacheStats(1, 2, 3)),
        timestamp=3.5,
    )
    tensors = message.outputs[1].new_prompt_logprobs_tensors
    assert tensors is not None
    for tensor in tensors:
        tensor.fill_(3)
    assert same(through_bytes(message, EngineCoreOutputs), message)


def test_an_answer_is_the_same_afterwards() -> None:
    for result in (True, None, 5, "x", [1, {"a": 2.5}]):
        message = EngineCoreOutputs(utility_output=UtilityOutput(3, None, result), timestamp=1.0)
        assert same(through_bytes(message, EngineCoreOutputs), message)


# ---- tensors that take another way ----


class Pocket(OOBTensorConsumer):
    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts
        self.tensors: list[torch.Tensor] = []
        self.num_messages = 0

    def new_message(self) -> None:
        self.num_messages += 1

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        self.tensors.append(tensor)
        return {"place": len(self.tensors) - 1} if self.accepts else None


@pytest.mark.parametrize("accepts", [True, False])
def test_a_consumer_may_take_tensors_or_leave_them(accepts: bool) -> None:
    pocket = Pocket(accepts)
    announced = []

    def provide(dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        announced.append((dtype, shape))
        return pocket.tensors[data["place"]]

    tensor = torch.randn(30, 40).to(torch.bfloat16)
    encoder = MsgpackEncoder(pocket)
    buffers = encoder.encode({"t": tensor, "a": np.arange(100)})
    encoder.encode([])
    assert pocket.num_messages == 2
    assert len(buffers) == (2 if accepts else 3)
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(oob_tensor_provider=provide)
    decoded = decoder.decode(buffers)
    assert same(decoded["t"], tensor)
    assert (decoded["t"] is tensor) == accepts
    assert announced == ([("bfloat16", (30, 40))] if accepts else [])
