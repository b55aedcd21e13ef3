"""How a front end reaches the engine core.

                        the core runs in       its outputs come by               used by
    InprocClient        the caller's thread    the call that runs the step       LLM
    AsyncInprocClient   a thread of its own    the event loop's call_soon        AsyncLLM
    SyncMPClient        a process of its own   ZMQ                               LLM, if asked to
    AsyncMPClient       a process of its own   ZMQ                               AsyncLLM, the same

With InprocClient and AsyncInprocClient a debugger started on the front end sees the core.

Upstream: vllm/v1/engine/core_client.py (0.23.0)
Left out: data parallelism. AsyncInprocClient is ours. The MP clients are in core_client_mp.py, for
they need packages that the others do not.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from nanovllm.v1.engine.core import EngineCore
from nanovllm.v1.engine.core_loop import EngineCoreLoop, describe
from nanovllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Seconds that shutdown waits for the step under way.
SHUTDOWN_TIMEOUT = 30.0


class EngineCoreClient(ABC):
    """What LLMEngine needs of a core, wherever that runs."""

    # The core itself, for tools that look into it (traces); only if it runs in this process.
    engine_core: EngineCore

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next step's outputs."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None: ...

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def reset_prefix_cache(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class InprocClient(EngineCoreClient):
    """A core in this process and thread: getting the next output means running the next step."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        self.engine_core = EngineCore(vllm_config, log_stats)

    def get_output(self) -> EngineCoreOutputs:
        return self.engine_core.step_fn()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def reset_prefix_cache(self) -> bool:
        return self.engine_core.reset_prefix_cache()

    def shutdown(self) -> None:
        self.engine_core.shutdown()


class OutputHandoff:
    """From the thread that has outputs to the event loop that wants them.

        another thread   put -> items -> call_soon_threadsafe(wake)
        the event loop   get: items' first, or wait for wake

    Attributes:
        dead_error: why no more outputs will come; None: they will. Set once.
    """

    def __init__(self) -> None:
        self.dead_error: EngineDeadError | None = None
        self._items: deque[EngineCoreOutputs] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def attach(self) -> None:
        """From now on wake the running event loop (the last one may have ended)."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._ready = loop, asyncio.Event()
            self._calls.clear()

    def put(self, outputs: EngineCoreOutputs) -> None:
        """From any thread."""
        if outputs.utility_output is not None:
            self._call_in_loop(self._answer, outputs)
        else:
            self._items.append(outputs)
            self._call_in_loop(self._wake)

    def mark_dead(self, error: EngineDeadError) -> None:
        """From any thread: whoever waits is told. Only the first error counts."""
        if self.dead_error is None:
            self.dead_error = error
            self._call_in_loop(self._wake)

    async def get(self) -> EngineCoreOutputs:
        """
        Raises:
            EngineDeadError: all outputs have been got and no more will come.
        """
        self.attach()
        while not self._items:
            if self.dead_error is not None:
                raise self.dead_error
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()

    def new_call(self) -> tuple[int, asyncio.Future[Any]]:
        """Id and answer-to-be of a utility call."""
        self.attach()
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        return call_id, future

    def _call_in_loop(self, callback: Any, *args: Any) -> None:
        if self._loop is None:
            return  # `get` will look at what there is before it waits.
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("The event loop is closed; outputs wait for the next one.")

    def _wake(self) -> None:
        self._ready.set()
        if self.dead_error is not None:
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self.dead_error)
            self._calls.clear()

    def _answer(self, outputs: EngineCoreOutputs) -> None:
        answer = outputs.utility_output
        assert answer is not None
        future = self._calls.pop(answer.call_id, None)
        if future is None or future.done():
            return
        if answer.failure_message is None:
            future.set_result(answer.result)
        else:
            future.set_exception(RuntimeError(answer.failure_message))


class AsyncEngineCoreClient(ABC):
    """What AsyncLLM needs of a core. The methods never wait for a step, but for get_output_async
    and the answer of a utility call."""

    def __init__(self) -> None:
        self.handoff = OutputHandoff()

    @abstractmethod
    def _send(self, request_type: EngineCoreRequestType, request: Any) -> None:
        """Tell the core something."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the core; what is unfinished ends with an EngineDeadError."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core has stopped; None while it runs."""
        return self.handoff.dead_error

    def mark_dead(self, error: EngineDeadError) -> None:
        self.handoff.mark_dead(error)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step's outputs.

        Raises:
            EngineDeadError: there will be none.
        """
        return await self.handoff.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._send_if_alive(EngineCoreRequestType.ADD, request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send_if_alive(EngineCoreRequestType.ABORT, request_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of EngineCore (or of its loop) between two steps; what it returns."""
        call_id, future = self.handoff.new_call()
        self._send_if_alive(EngineCoreRequestType.UTILITY, (call_id, method, args))
        return await future

    def _send_if_alive(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if (error := self.dead_error) is not None:
            raise EngineDeadError(*error.args) from error.__cause__
        self._send(request_type, request)


class AsyncInprocClient(AsyncEngineCoreClient):
    """A core in a thread of this process.

    The model is loaded in that thread too: CUDA's current device and streams are a thread's own.
    """

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        """
        Raises:
            VLLMValidationError: the core cannot be built.
        """
        super().__init__()
        started: Future[EngineCoreLoop] = Future()
        self._thread = threading.Thread(
            target=_run_core_thread,
            args=(vllm_config, log_stats, self.handoff, started),
            name="EngineCore",
            daemon=True,  # A forgotten shutdown does not keep the interpreter; see the finalizer.
        )
        self._thread.start()
        self._core_loop = started.result()
        self._finalizer = weakref.finalize(
            self, _stop_core_thread, self._core_loop, self._thread, self.handoff
        )

    @property
    def engine_core(self) -> EngineCore:
        """The core itself. It changes under the reader's eyes unless it is idle."""
        return self._core_loop.engine_core

    def _send(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self._core_loop.input_queue.put((request_type, request))

    def shutdown(self) -> None:
        self._finalizer()


def _run_core_thread(
    vllm_config: VllmConfig,
    log_stats: bool,
    handoff: OutputHandoff,
    started: Future[EngineCoreLoop],
) -> None:
    """The life of the engine's thread. It holds no reference to the client, so that a client nobody
    holds is collected and its finalizer ends the thread."""
    try:
        core_loop = EngineCoreLoop(EngineCore(vllm_config, log_stats), handoff.put)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(core_loop)
    del started
    try:
        core_loop.run_busy_loop()
    except BaseException as error:
        logger.exception("The engine has stopped.")
        dead_error = EngineDeadError(f"The engine has stopped: {describe(error)}")
        dead_error.__cause__ = error
        handoff.mark_dead(dead_error)
    core_loop.engine_core.shutdown()


def _stop_core_thread(
    core_loop: EngineCoreLoop, thread: threading.Thread, handoff: OutputHandoff
) -> None:
    handoff.mark_dead(EngineDeadError("The engine has been shut down."))
    core_loop.input_queue.put((EngineCoreRequestType.SHUTDOWN, None))
    thread.join(SHUTDOWN_TIMEOUT)


def make_async_client(
    client: str, vllm_config: VllmConfig, log_stats: bool
) -> AsyncEngineCoreClient:
    """The client of the given kind, "inproc" or "mp".

    Raises:
        VLLMValidationError: there is no such kind, or the core cannot be built.
    """
    if client == "inproc":
        return AsyncInprocClient(vllm_config, log_stats)
    if client != "mp":
        raise VLLMValidationError(
            f"client must be 'inproc' or 'mp', got {client!r}.", parameter="client", value=client
        )
    return _import_mp_clients().AsyncMPClient(vllm_config, log_stats)


def make_client(multiprocess: bool, vllm_config: VllmConfig, log_stats: bool) -> EngineCoreClient:
    """The client of LLMEngine: a core in this thread, or in a process of its own.

    Raises:
        VLLMValidationError: the core cannot be built.
    """
    if not multiprocess:
        return InprocClient(vllm_config, log_stats)
    return _import_mp_clients().SyncMPClient(vllm_config, log_stats)


def _import_mp_clients() -> ModuleType:
    try:
        return importlib.import_module("nanovllm.v1.engine.core_client_mp")
    except ModuleNotFoundError as error:
        raise VLLMValidationError(
            f"an engine core in a process of its own needs {error.name}: "
            "pip install 'nanovllm[serve]'.",
            parameter="client",
            value="mp",
        ) from error
