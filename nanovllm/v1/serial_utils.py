"""The engine's messages as bytes, for another process.

    MsgpackEncoder.encode(message) -> [msgpack, buffer, buffer ...] -> MsgpackDecoder.decode

msgspec writes dataclasses as maps and knows no arrays. Arrays become extensions: a small one holds
its bytes, a large one the index of a buffer of its own, which is sent as it is. A
tensor may also go by another way altogether (`oob_tensor_consumer`, see engine/tensor_ipc.py).

msgspec gives back maps and lists. A second pass, made once per type out of the type hints, turns
those into the dataclasses, enums, sets and named tuples they were.

Upstream: vllm/v1/serial_utils.py (0.23.0)
Left out: multimodal fields, pickle as a last resort (what is of no known type is refused).
Upstream's messages are msgspec structs, which msgspec decodes in one pass; ours stay plain
dataclasses for their readers.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.metrics.stats import PrefillStats, SchedulerStats
from nanovllm.v1.outputs import LogprobsLists, LogprobsTensors

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

# Codes of msgpack's extension types.
EXT_NDARRAY = 1
EXT_TENSOR = 2
# Arrays of fewer bytes are part of the message; so do not pay for a buffer each.
MAX_INLINE_BYTES = 256

# What the messages' modules import for type checkers only (they are light; these are not).
HINT_NAMES = {
    "SamplingParams": SamplingParams,
    "PrefillStats": PrefillStats,
    "SchedulerStats": SchedulerStats,
    "LogprobsLists": LogprobsLists,
    "LogprobsTensors": LogprobsTensors,
    "torch": torch,
}


class OOBTensorConsumer(ABC):
    """Takes tensors out of the messages ("out of band") and sends them by another way."""

    @abstractmethod
    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """What stands for `tensor` in the message; None: it is to be sent with it after all."""

    @abstractmethod
    def new_message(self) -> None:
        """Another message begins."""


# (dtype, shape, what the consumer returned) -> the tensor
OOBTensorProvider = Callable[[str, tuple[int, ...], dict[str, Any]], torch.Tensor]


class MsgpackEncoder:
    """Not thread-safe."""

    def __init__(self, oob_tensor_consumer: OOBTensorConsumer | None = None) -> None:
        self.encoder = msgspec.msgpack.Encoder(enc_hook=self.enc_hook)
        self.oob_tensor_consumer = oob_tensor_consumer
        self._buffers: list[Buffer] = []

    def encode(self, message: Any) -> Sequence[Buffer]:
        """
        Returns:
            The msgpack bytes and, behind them, the buffers of large arrays: views of these, which
            must not change until the message is sent.

        Raises:
            TypeError: something in the message is of a type that is not known here.
        """
        if self.oob_tensor_consumer is not None:
            self.oob_tensor_consumer.new_message()
        self._buffers = [b""]
        try:
            self._buffers[0] = self.encoder.encode(_with_private_fields(message))
            return self._buffers
        finally:
            self._buffers = []  # Or the arrays would stay alive until the next message.

    def enc_hook(self, obj: Any) -> Any:
        """What msgspec does not know."""
        if isinstance(obj, torch.Tensor):
            return self._encode_tensor(obj)
        if isinstance(obj, np.ndarray) and obj.dtype.kind not in "OV":
            return self._encode_array(EXT_NDARRAY, obj.dtype.str, obj.shape, obj)
        if isinstance(obj, np.generic) and obj.dtype.kind not in "OV":
            return obj.item()
        raise TypeError(f"a message cannot hold an object of type {type(obj).__name__}.")

    def _encode_tensor(self, tensor: torch.Tensor) -> msgspec.msgpack.Ext:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self.oob_tensor_consumer is not None:
            data = self.oob_tensor_consumer(tensor)
            if data is not None:
                header = (dtype, tuple(tensor.shape), data)
                return msgspec.msgpack.Ext(EXT_TENSOR, msgspec.msgpack.encode(header))
        # As bytes: numpy has no bfloat16.
        array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self._encode_array(EXT_TENSOR, dtype, tuple(tensor.shape), array)

    def _encode_array(
        self, code: int, dtype: str, shape: tuple[int, ...], array: np.ndarray
    ) -> msgspec.msgpack.Ext:
        data: Any
        if array.nbytes < MAX_INLINE_BYTES:
            data = array.tobytes()
        else:
            data = len(self._buffers)
            self._buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode((dtype, shape, data)))


class MsgpackDecoder(Generic[T]):
    """Not thread-safe. Arrays from buffers are views of these: they cannot be written to if the
    buffers cannot."""

    def __init__(
        self,
        message_type: type[T] | None = None,
        oob_tensor_provider: OOBTensorProvider | None = None,
    ) -> None:
        """
        Args:
            message_type: a dataclass; None: messages stay as msgpack has them.
        """
        self.decoder = msgspec.msgpack.Decoder(ext_hook=self.ext_hook)
        self.oob_tensor_provider = oob_tensor_provider
        self._restore = None if message_type is None else _restorer(message_type)  # type: ignore[arg-type]
        self._buffers: Sequence[Buffer] = ()

    def decode(self, buffers: Buffer | Sequence[Buffer]) -> T:
        """
        Raises:
            msgspec.DecodeError: these are no msgpack bytes.
        """
        if isinstance(buffers, (bytes, bytearray, memoryview)):
            buffers = (buffers,)
        self._buffers = buffers
        try:
            message = self.decoder.decode(buffers[0])
        finally:
            self._buffers = ()
        return message if self._restore is None else self._restore(message)

    def ext_hook(self, code: int, data: memoryview) -> Any:
        dtype, shape, content = msgspec.msgpack.decode(data)
        if code == EXT_TENSOR and isinstance(content, dict):
            assert self.oob_tensor_provider is not None, "nobody provides tensors sent out of band"
            return self.oob_tensor_provider(dtype, tuple(shape), content)
        # A small array's bytes are copied, so that its tensor may be written to.
        raw = self._buffers[content] if isinstance(content, int) else bytearray(content)
        if code == EXT_NDARRAY:
            return np.frombuffer(raw, dtype=dtype).reshape(shape)
        torch_dtype = getattr(torch, dtype)
        if len(raw) == 0:
            return torch.empty(shape, dtype=torch_dtype)
        if memoryview(raw).readonly:
            raw = bytearray(raw)  # torch warns of tensors that must not be written to
        return torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype).reshape(shape)


def _with_private_fields(obj: Any) -> Any:
    """A dataclass as a map if some field of it, or of a field's value, is named with an underscore:
    msgspec would leave that out."""
    names = _field_names_if_private(type(obj))  # type: ignore[arg-type]
    if names is None:
        return obj
    return {name: _with_private_fields(getattr(obj, name)) for name in names}


@cache
def _field_names_if_private(cls: Any) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(cls):
        return None
    names = tuple(f.name for f in dataclasses.fields(cls))
    hints = get_type_hints(cls, localns=HINT_NAMES)
    inside = (_field_names_if_private(hints[name]) for name in names)
    private = any(name.startswith("_") for name in names) or any(n is not None for n in inside)
    return names if private else None


# ---- from maps and lists back to the messages' types ----

Restorer = Callable[[Any], Any]


@cache
def _restorer(hint: Hashable) -> Restorer | None:
    """What makes an object of type `hint` of what msgspec decoded; None: it is one already."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_restorer(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return lambda values: hint(*values)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        # At most one of the alternatives is not msgpack's own.
        restorers = [r for r in map(_restorer, args) if r is not None]
        assert len(restorers) <= 1, f"{hint} is ambiguous"
        return _optional(restorers[0]) if restorers else None
    if origin is set:
        return set
    if origin is list and (restore := _restorer(args[0])) is not None:
        return lambda values: [restore(value) for value in values]
    return None


def _optional(restore: Restorer) -> Restorer:
    return lambda value: None if value is None else restore(value)


def _dataclass_restorer(cls: Any) -> Restorer:
    hints = get_type_hints(cls, localns=HINT_NAMES)
    by_field = {f.name: _restorer(hints[f.name]) for f in dataclasses.fields(cls)}
    restorers = {name: restore for name, restore in by_field.items() if restore is not None}
    # What __init__ does not take, or has derived from something else, is set as it was sent.
    has_post_init = hasattr(cls, "__post_init__")

    def restore(values: dict[str, Any]) -> Any:
        for name, restore_field in restorers.items():
            if values[name] is not None:
                values[name] = restore_field(values[name])
        if not has_post_init:
            return cls(**values)
        obj = cls.__new__(cls)
        for name, value in values.items():
            setattr(obj, name, value)
        return obj

    return restore
