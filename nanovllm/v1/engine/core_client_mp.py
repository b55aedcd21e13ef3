"""Clients of an engine core in a process of its own.

    SyncMPClient, AsyncMPClient
      _Process            sockets, the process, and one thread that takes in what comes:
        output socket     EngineCoreOutputs -> deliver;  ENGINE_CORE_DEAD -> fail
        process sentinel  the process has ended, however -> fail

The thread polls the sentinel together with the socket, so a core that was killed and could not say
so is noticed at once.

Upstream: vllm/v1/engine/core_client.py (0.23.0)
Left out: data parallelism, asyncio on the sockets: both clients share the thread.
"""

from __future__ import annotations

import itertools
import logging
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

import torch.multiprocessing
import zmq

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from nanovllm.v1.engine.core_client import (
    SHUTDOWN_TIMEOUT,
    AsyncEngineCoreClient,
    EngineCoreClient,
)
from nanovllm.v1.engine.core_proc import (
    ENGINE_CORE_DEAD,
    EngineCoreAddresses,
    EngineCoreProc,
    EngineCoreReady,
)
from nanovllm.v1.engine.exceptions import EngineDeadError
from nanovllm.v1.engine.tensor_ipc import TensorIpcSender, make_tensor_queue
from nanovllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)


class _Process:
    """The core's process and the way to it and back. It knows nothing of the client, so that a
    client nobody holds is collected, and its finalizer ends the process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        log_stats: bool,
        deliver: Callable[[EngineCoreOutputs], None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        """Start the process, and wait until its model is loaded.

        Args:
            deliver: called with each output, in the thread of this object.
            fail: called when there will be no more of them, perhaps twice.

        Raises:
            VLLMValidationError: the core cannot be built, for a reason that is the user's to mend.
            EngineDeadError: it cannot be built for another.
        """
        self._deliver, self._fail = deliver, fail
        self._folder = tempfile.TemporaryDirectory(prefix="nanovllm-")
        addresses = EngineCoreAddresses(
            f"ipc://{self._folder.name}/input", f"ipc://{self._folder.name}/output"
        )
        self._context = zmq.Context()
        self._input_socket = self._bind(zmq.PUSH, addresses.input_address)
        self._output_socket = self._bind(zmq.PULL, addresses.output_address)
        self._tensor_queue = make_tensor_queue()
        self._encoder = MsgpackEncoder(TensorIpcSender(self._tensor_queue))
        self._send_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Not fork: CUDA, and torch's threads, do not survive it.
        self.process = torch.multiprocessing.get_context("spawn").Process(
            target=EngineCoreProc.run_engine_core,
            args=(vllm_config, log_stats, addresses, self._tensor_queue),
            name="EngineCore",
            daemon=True,
        )
        try:
            self.process.start()
            self._wait_until_ready(vllm_config)
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(
            target=self._process_output_socket, name="EngineCoreOutputs", daemon=True
        )
        self._thread.start()

    def _bind(self, socket_type: int, address: str) -> zmq.Socket:
        socket = self._context.socket(socket_type)
        socket.set_hwm(0)  # Neither side ever waits for the other.
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    def _wait_until_ready(self, vllm_config: VllmConfig) -> None:
        frames = self._receive()
        if frames is None:
            raise EngineDeadError(
                f"The engine's process ended while it started (exit code {self.process.exitcode})."
            )
        ready = MsgpackDecoder(EngineCoreReady).decode(frames)
        if ready.is_user_error:
            raise VLLMValidationError(ready.error or "", parameter=ready.parameter)
        if ready.error is not None:
            raise EngineDeadError(f"The engine could not start: {ready.error}")
        vllm_config.cache_config.num_gpu_blocks = ready.num_gpu_blocks

    def _receive(self) -> list[bytes] | None:
        """The next message; None once the process has ended and all it sent has been read."""
        poller = zmq.Poller()
        poller.register(self._output_socket, zmq.POLLIN)
        poller.register(self.process.sentinel, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._output_socket not in ready:
            # Its last words may still be on their way through ZMQ.
            self.process.join()
            if not self._output_socket.poll(100):
                return None
        return self._output_socket.recv_multipart()

    def _process_output_socket(self) -> None:
        """Thread: until the process has ended."""
        decoder = MsgpackDecoder(EngineCoreOutputs)
        try:
            while (frames := self._receive()) is not None:
                if frames[0] == ENGINE_CORE_DEAD:
                    cause = frames[1].decode()
                    self._fail(EngineDeadError(f"The engine has stopped: {cause}"))
                else:
                    self._deliver(decoder.decode(frames))
            exit_code = self.process.exitcode
            self._fail(EngineDeadError(f"The engine's process has ended (exit code {exit_code})."))
        except Exception as error:
            logger.exception("The engine's outputs cannot be read.")
            self._fail(EngineDeadError(f"The engine's outputs cannot be read: {error!r}"))

    def send(self, request_type: EngineCoreRequestType, request: Any) -> None:
        """
        Raises:
            TypeError: `request` holds something that has no form as bytes.
        """
        with self._send_lock:
            frames = self._encoder.encode(request)
            # Without a peer a socket of this kind would wait: none has come yet, or it is gone.
            while not self._input_socket.poll(50, zmq.POLLOUT):
                if not self.process.is_alive():
                    return  # The thread will tell.
            self._input_socket.send_multipart((request_type.value, *frames))

    def stop(self) -> None:
        """End the process: by asking, or by force if it does not listen."""
        self._fail(EngineDeadError("The engine has been shut down."))
        if self._thread is not None:
            self.send(EngineCoreRequestType.SHUTDOWN, None)
            self.process.join(SHUTDOWN_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
        if self._thread is not None:
            self._thread.join()
        self._tensor_queue.cancel_join_thread()
        self._tensor_queue.close()
        self._context.destroy()
        self._folder.cleanup()


class AsyncMPClient(AsyncEngineCoreClient):
    """For AsyncLLM."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        """
        Raises:
            VLLMValidationError, EngineDeadError: the core cannot be built.
        """
        super().__init__()
        handoff = self.handoff
        self._process = _Process(vllm_config, log_stats, handoff.put, handoff.mark_dead)
        self._finalizer = weakref.finalize(self, self._process.stop)

    def _send(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self._process.send(request_type, request)

    def shutdown(self) -> None:
        self._finalizer()


class _Inbox:
    """What SyncMPClient's thread puts and its callers take.

    Attributes:
        outputs: steps' outputs, and once there will be no more, the reason.
        calls: unanswered utility calls by id.
    """

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self.calls: dict[int, Future[Any]] = {}
        self.dead_error: EngineDeadError | None = None

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        answer = outputs.utility_output
        if answer is None:
            self.outputs.put(outputs)
        elif answer.failure_message is None:
            self.calls.pop(answer.call_id).set_result(answer.result)
        else:
            self.calls.pop(answer.call_id).set_exception(RuntimeError(answer.failure_message))

    def fail(self, error: EngineDeadError) -> None:
        if self.dead_error is None:
            self.dead_error = error
            self.outputs.put(error)
        for call_id in list(self.calls):
            self.calls.pop(call_id).set_exception(self.dead_error)


class SyncMPClient(EngineCoreClient):
    """For LLMEngine: the core steps by itself, and get_output waits for what it has to say."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        """
        Raises:
            VLLMValidationError, EngineDeadError: the core cannot be built.
        """
        self._inbox = _Inbox()
        self._call_ids = itertools.count()
        self._process = _Process(vllm_config, log_stats, self._inbox.deliver, self._inbox.fail)
        self._finalizer = weakref.finalize(self, self._process.stop)

    @property
    def engine_core(self) -> NoReturn:  # type: ignore[override]
        """
        Raises:
            VLLMValidationError: the core is out of reach.
        """
        raise VLLMValidationError(
            "this needs an engine core in its own process; "
            "unset NANOVLLM_ENABLE_V1_MULTIPROCESSING.",
            parameter="NANOVLLM_ENABLE_V1_MULTIPROCESSING",
            value="1",
        )

    def get_output(self) -> EngineCoreOutputs:
        """The next step's outputs. Waits for ever if no request is unfinished.

        Raises:
            EngineDeadError: the core has stopped.
        """
        self._raise_if_dead(unless_outputs=True)
        outputs = self._inbox.outputs.get()
        if isinstance(outputs, EngineDeadError):
            raise EngineDeadError(*outputs.args)
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and self._inbox.dead_error is None:
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def reset_prefix_cache(self) -> bool:
        return self.call_utility("reset_prefix_cache")

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of EngineCore (or of its loop) between two steps; what it returns."""
        call_id, future = next(self._call_ids), Future[Any]()
        self._inbox.calls[call_id] = future
        self._send(EngineCoreRequestType.UTILITY, (call_id, method, args))
        return future.result()

    def _send(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self._raise_if_dead()
        self._process.send(request_type, request)

    def _raise_if_dead(self, unless_outputs: bool = False) -> None:
        error = self._inbox.dead_error
        if error is not None and not (unless_outputs and not self._inbox.outputs.empty()):
            raise EngineDeadError(*error.args)

    def shutdown(self) -> None:
        self._finalizer()
