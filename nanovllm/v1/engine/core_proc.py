"""The engine core in a process of its own.

    client               this process
    input socket   PUSH -> PULL   thread: decode -> input_queue -> EngineCoreLoop (main thread)
    output socket  PULL <- PUSH   thread: encode <- output_queue <-+

Sockets and msgpack have threads of their own, so that they work while the model does. The first
message out is an EngineCoreReady, the last, if the core fails, ENGINE_CORE_DEAD; in between come
EngineCoreOutputs.

Upstream: vllm/v1/engine/core.py, EngineCoreProc (0.23.0)
Left out: data parallelism, several front ends, a handshake over a socket of its own (addresses and
settings come as the process's arguments).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from nanovllm.exceptions import VLLMValidationError
from nanovllm.logger import configure_logging
from nanovllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from nanovllm.v1.engine.core import EngineCore
from nanovllm.v1.engine.core_loop import EngineCoreLoop, describe, error_outputs
from nanovllm.v1.engine.tensor_ipc import TensorIpcQueue, TensorIpcReceiver
from nanovllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from nanovllm.v1.utils import freeze_gc_heap

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


@dataclass
class EngineCoreAddresses:
    """Where the client has bound its sockets."""

    input_address: str  # requests, client to core
    output_address: str  # outputs, core to client


@dataclass
class EngineCoreReady:
    """The core's first message: what the client has to know of it, or why there is none."""

    num_gpu_blocks: int | None = None
    error: str | None = None
    # Of a VLLMValidationError: it is the user's to mend, and raised as such by the client.
    parameter: str | None = None
    is_user_error: bool = False


class EngineCoreProc:
    """The core, its loop and the two threads; made in the process itself."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        log_stats: bool,
        addresses: EngineCoreAddresses,
        tensor_queue: TensorIpcQueue,
    ) -> None:
        """
        Raises:
            Whatever EngineCore does; the client has been told by then.
        """
        self.addresses = addresses
        self.tensor_queue = tensor_queue
        self.output_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.context = zmq.Context()
        self._output_thread = threading.Thread(target=self._process_output_socket, daemon=True)
        self._output_thread.start()
        try:
            self.loop = EngineCoreLoop(EngineCore(vllm_config, log_stats), self.output_queue.put)
        except BaseException as error:
            self.output_queue.put(
                EngineCoreReady(
                    error=str(error) if isinstance(error, VLLMValidationError) else describe(error),
                    parameter=getattr(error, "parameter", None),
                    is_user_error=isinstance(error, VLLMValidationError),
                )
            )
            self.close()
            raise
        threading.Thread(target=self._process_input_socket, daemon=True).start()
        self.output_queue.put(EngineCoreReady(vllm_config.cache_config.num_gpu_blocks))

    @staticmethod
    def run_engine_core(
        vllm_config: VllmConfig,
        log_stats: bool,
        addresses: EngineCoreAddresses,
        tensor_queue: TensorIpcQueue,
    ) -> None:
        """The process's main function.

        Ctrl-C in a terminal goes to every process of it; the client decides what becomes of this
        one. If the client's process dies, so does this one.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_die_with_parent, daemon=True).start()
        configure_logging()
        try:
            proc = EngineCoreProc(vllm_config, log_stats, addresses, tensor_queue)
        except VLLMValidationError:
            return  # The client tells the user.
        freeze_gc_heap()
        try:
            proc.loop.run_busy_loop()
        except BaseException as error:
            logger.exception("The engine core has stopped.")
            proc.output_queue.put((ENGINE_CORE_DEAD, describe(error).encode()))
        finally:
            proc.close()

    def close(self) -> None:
        """Send what is left to send, then go."""
        self.output_queue.put(None)
        self._output_thread.join(timeout=5)

    def _process_input_socket(self) -> None:
        """Thread: from the socket to the loop."""
        request_decoder = MsgpackDecoder(
            EngineCoreRequest, oob_tensor_provider=TensorIpcReceiver(self.tensor_queue)
        )
        decoder: MsgpackDecoder[Any] = MsgpackDecoder()
        socket = self.context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.connect(self.addresses.input_address)
        while True:
            type_frame, *buffers = socket.recv_multipart()
            request_type = EngineCoreRequestType(type_frame)
            try:
                is_add = request_type is EngineCoreRequestType.ADD
                request = (request_decoder if is_add else decoder).decode(buffers)
            except Exception as error:
                if request_type is not EngineCoreRequestType.ADD:
                    raise
                # One request's tensors did not come: it fails, alone.
                request_id = msgspec.msgpack.Decoder(RequestId).decode(buffers[0]).request_id
                logger.exception("Request %s could not be decoded.", request_id)
                self.output_queue.put(error_outputs(request_id, error))
                continue
            self.loop.input_queue.put((request_type, request))
            if request_type is EngineCoreRequestType.SHUTDOWN:
                return

    def _process_output_socket(self) -> None:
        """Thread: from the loop to the socket. The last message is waited for when it ends."""
        encoder = MsgpackEncoder()
        socket = self.context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 4000)  # ms, for the last message
        socket.connect(self.addresses.output_address)
        while (outputs := self.output_queue.get()) is not None:
            is_dead = isinstance(outputs, tuple)
            # copy: the views' arrays may be gone before ZMQ has sent them.
            socket.send_multipart(outputs if is_dead else encoder.encode(outputs), copy=True)
        socket.close()


class RequestId(msgspec.Struct):
    """The one field read of a request that cannot be decoded."""

    request_id: str


def _die_with_parent() -> None:
    """Thread: without a client there is nobody to work for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
