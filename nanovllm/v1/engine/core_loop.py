"""The engine core in a thread of its own: the busy loop around EngineCore.step.

    input_queue -> [ADD, ABORT, UTILITY ...] -> EngineCore -> EngineCoreOutputs -> put_output
                   all that is there, then one step, and so on; with nothing to do, wait

What the client asks for takes effect between two steps, so an aborted request's blocks are free
before the next one is planned.

Upstream: vllm/v1/engine/core.py, the part of EngineCoreProc that is not about its process (0.23.0)
Left out: data parallelism, several front ends, an abort queue that is looked at within a step.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)

if TYPE_CHECKING:
    from nanovllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)


class EngineCoreLoop:
    """Runs an EngineCore for a client elsewhere.

    Attributes:
        input_queue: (type, payload): ADD an EngineCoreRequest, ABORT a list of ids, UTILITY
            (call_id, method's name, args), SHUTDOWN None. Any thread may put.
    """

    def __init__(
        self, engine_core: EngineCore, put_output: Callable[[EngineCoreOutputs], None]
    ) -> None:
        """
        Args:
            put_output: hands a step's outputs, or a call's, to the client; must not wait for it.
        """
        self.engine_core = engine_core
        self.put_output = put_output
        self.input_queue: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = queue.SimpleQueue()

    def run_busy_loop(self) -> None:
        """Until SHUTDOWN. A step's error ends the loop, and is raised: upstream's core dies of it,
        and so does this one."""
        while self._process_input_queue():
            outputs = self.engine_core.step_fn()
            # Nothing is sent of a step that only told the runner who has ended.
            if outputs.outputs or outputs.scheduler_stats is not None:
                self.put_output(outputs)

    def has_work(self) -> bool:
        core = self.engine_core
        return core.scheduler.has_requests() or bool(core.batch_queue)

    def _process_input_queue(self) -> bool:
        """Take in what has been asked for; wait if there is nothing else to do. False: SHUTDOWN."""
        while not (self.input_queue.empty() and self.has_work()):
            request_type, request = self.input_queue.get()
            if request_type is EngineCoreRequestType.SHUTDOWN:
                return False
            self._handle_client_request(request_type, request)
        return True

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type is EngineCoreRequestType.ADD:
            self._add_request(request)
        elif request_type is EngineCoreRequestType.ABORT:
            self.engine_core.abort_requests(request)
        else:
            self.put_output(EngineCoreOutputs(utility_output=self._call_utility(*request)))

    def _add_request(self, request: EngineCoreRequest) -> None:
        """An error here is that request's alone."""
        try:
            self.engine_core.add_request(request)
        except Exception as error:
            logger.exception("The core could not take in request %s.", request.request_id)
            self.put_output(error_outputs(request.request_id, error))

    def _call_utility(self, call_id: int, method_name: str, args: list[Any]) -> UtilityOutput:
        """Call a method of the core, or of this loop if the core has none of that name."""
        owner = self.engine_core if hasattr(self.engine_core, method_name) else self
        try:
            return UtilityOutput(call_id, result=getattr(owner, method_name)(*args))
        except Exception as error:
            logger.exception("The call of %s failed.", method_name)
            return UtilityOutput(call_id, failure_message=describe(error))


def error_outputs(request_id: str, error: Exception) -> EngineCoreOutputs:
    """The message that ends a request with an error."""
    output = EngineCoreOutput(
        request_id, [], finish_reason=FinishReason.ERROR, stop_reason=describe(error)
    )
    return EngineCoreOutputs(outputs=[output])


def describe(error: BaseException) -> str:
    """One line for another process's eyes."""
    return f"{type(error).__name__}: {error}"
