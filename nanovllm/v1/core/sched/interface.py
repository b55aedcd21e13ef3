"""What the engine core needs of a scheduler: the methods another policy would have to bring.

Upstream: vllm/v1/core/sched/interface.py (0.23.0)
Left out: structured output, draft tokens, pausing, KV connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.engine import EngineCoreOutputs
    from nanovllm.v1.metrics.stats import SchedulerStats
    from nanovllm.v1.outputs import ModelRunnerOutput
    from nanovllm.v1.request import Request, RequestStatus


class SchedulerInterface(ABC):
    """Decides, step by step, which requests compute how many tokens into which blocks."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Plan the next step, and count its tokens as computed."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in the tokens that a planned step has sampled; end the requests that are done."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        """End requests from outside (abort, failure); None means all of them.

        Returns:
            The ids that were really ended: unknown and finished ones are passed over.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests waiting or running."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Has any request ended that the runner has not been told of yet?"""

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """Is there anything to do: a request to run, or an ended one to tell the runner of?"""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests hold blocks."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """The scheduler's state now; None when statistics are off."""
