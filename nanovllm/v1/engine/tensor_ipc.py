"""A request's tensors, on their way to the core's process beside the request itself.

    front end   MsgpackEncoder   the request, a tensor's name in its place  -> ZMQ socket
                TensorIpcSender  the tensor, in shared memory               -> torch's queue
    core        MsgpackDecoder     <- ZMQ socket
                TensorIpcReceiver  <- torch's queue, until the tensor of that name is there

The queue carries a handle; the tensor's bytes stay where they are. Queue and socket are two roads,
so either may be ahead of the other.

Upstream: vllm/v1/engine/tensor_ipc.py (0.23.0)
Left out: several receivers. Upstream's tensors are images, and `prompt_embeds` go in the message;
here these are the tensors that there are.
"""

from __future__ import annotations

import logging
import multiprocessing.queues
import queue
import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing

from nanovllm.v1.serial_utils import OOBTensorConsumer

logger = logging.getLogger(__name__)

TensorIpcQueue = multiprocessing.queues.Queue

# Seconds that the core waits for a tensor whose request has come.
RECEIVE_TIMEOUT = 10.0


def make_tensor_queue() -> TensorIpcQueue:
    """A queue to give to a process of torch.multiprocessing's "spawn" context."""
    return torch.multiprocessing.get_context("spawn").Queue()


@dataclass
class TensorIpcData:
    """What the queue carries."""

    sender_id: str
    message_id: int
    tensor_id: int
    tensor: torch.Tensor


class TensorIpcSender(OOBTensorConsumer):
    """The front end's side, one an encoder."""

    def __init__(self, queue: TensorIpcQueue) -> None:
        self.queue = queue
        self._sender_id = uuid.uuid4().hex[:8]
        self._message_id = 0
        self._tensor_id = 0

    def new_message(self) -> None:
        self._message_id += 1
        self._tensor_id = 0

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Send `tensor` and name it; None: it cannot be shared and has to go in the message."""
        try:
            shared = tensor if tensor.is_shared() else tensor.detach().clone().share_memory_()
        except RuntimeError as error:  # no room in /dev/shm
            logger.warning("A tensor cannot be put into shared memory (%s); it is sent.", error)
            return None
        name = (self._sender_id, self._message_id, self._tensor_id)
        self._tensor_id += 1
        self.queue.put(TensorIpcData(*name, shared))
        return dict(zip(("sender_id", "message_id", "tensor_id"), name, strict=True))


class TensorIpcReceiver:
    """The core's side, one a decoder.

        buffered   {sender: {(message, number): tensor}}   come before their request

    Messages of one sender are decoded in order, so when one is, tensors of earlier ones that are
    still here will not be asked for any more: their request could not be decoded.
    """

    def __init__(self, queue: TensorIpcQueue, timeout: float = RECEIVE_TIMEOUT) -> None:
        self.queue = queue
        self.timeout = timeout
        self.buffered: dict[str, dict[tuple[int, int], torch.Tensor]] = {}

    def __call__(self, dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        """The tensor named by `data`.

        Raises:
            RuntimeError: it has not come in time, or is another than was announced.
        """
        message_id = data["message_id"]
        buffered = self.buffered.setdefault(data["sender_id"], {})
        for name in [name for name in buffered if name[0] < message_id]:
            del buffered[name]
        while (tensor := buffered.pop((message_id, data["tensor_id"]), None)) is None:
            self._receive(data["sender_id"], message_id)
        if tuple(tensor.shape) != shape or str(tensor.dtype).removeprefix("torch.") != dtype:
            raise RuntimeError(f"expected a tensor {dtype} {shape}, got {tensor.dtype}")
        return tensor

    def _receive(self, sender_id: str, message_id: int) -> None:
        """Take the next tensor off the queue; one that comes too late is dropped."""
        try:
            item: TensorIpcData = self.queue.get(timeout=self.timeout)
        except queue.Empty:
            raise RuntimeError(
                f"the tensor of a request has not come within {self.timeout:g} s"
            ) from None
        if item.sender_id != sender_id or item.message_id >= message_id:
            self.buffered.setdefault(item.sender_id, {})[item.message_id, item.tensor_id] = (
                item.tensor
            )
