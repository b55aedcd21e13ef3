"""How a front end reaches the engine core.

Upstream: vllm/v1/engine/core_client.py (0.23.0)
Left out: the clients that put the core into another process (SyncMPClient, AsyncMPClient). A
debugger started on the front end sees the core, because they share a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from nanovllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from nanovllm.v1.engine.core import EngineCore

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig


class EngineCoreClient(ABC):
    """What LLMEngine needs of a core, wherever that runs."""

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
