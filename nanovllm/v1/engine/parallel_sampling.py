"""n > 1: one request of the user, n requests for the core.

The children differ in nothing but their id ("0_x", "1_x", ... for request "x") and, if the user
gave a seed, in their seed. The core does not know that they belong together; that they share the
prompt's KV blocks is the prefix cache's doing.

Upstream: vllm/v1/engine/parallel_sampling.py (0.23.0)
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from nanovllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanovllm.outputs import CompletionOutput
    from nanovllm.v1.engine import EngineCoreRequest
    from nanovllm.v1.metrics.stats import IterationStats


class ParentRequest:
    """Makes the children and gathers what they produce.

    Attributes:
        child_requests: ids of the children made and not yet finished.
        output_aggregator: with FINAL_ONLY, the finished samples, by index.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.output_aggregator: list[CompletionOutput | None] = [None] * self.n
        self.max_num_generation_tokens = 0  # the longest sample so far
        self._cached_child_sampling_params: SamplingParams | None = None

    @property
    def n(self) -> int:
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child `index` (0 to n - 1), which is unfinished from now on."""
        child_request_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_request_id)
        return child_request_id, self._get_child_sampling_params(index)

    def _get_child_sampling_params(self, index: int) -> SamplingParams:
        """The parent's parameters with n = 1: one object for all, or one each if seeded."""
        if self._cached_child_sampling_params is not None:
            return self._cached_child_sampling_params
        child_params = copy(self.sampling_params)
        child_params.n = 1
        if child_params.seed is None:
            self._cached_child_sampling_params = child_params
        else:
            # The same seed would give the same sample n times.
            child_params.seed += index
        return child_params

    def get_outputs(
        self, child_request_id: str, completion_output: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        """What the user is to see once a child has produced `completion_output`.

        Returns:
            (samples to show now, whether the whole request is finished). While streaming, each
            output is shown as it comes; with FINAL_ONLY, nothing until the last child has finished,
            then all n in order.
        """
        if completion_output.finished():
            self.child_requests.remove(child_request_id)
        finished = not self.child_requests
        if self.sampling_params.output_kind != RequestOutputKind.FINAL_ONLY:
            return [completion_output], finished
        self.output_aggregator[completion_output.index] = completion_output
        if not finished:
            return [], False
        return [output for output in self.output_aggregator if output is not None], True

    @staticmethod
    def observe_finished_request(
        parent_req: ParentRequest | None,
        iteration_stats: IterationStats,
        num_generation_tokens: int,
    ) -> None:
        """Count a request of the user's once its last sample has ended.

        Args:
            parent_req: None: the request has one sample.
            num_generation_tokens: of the sample that has just ended.
        """
        n = 1
        if parent_req is not None:
            num_generation_tokens = max(parent_req.max_num_generation_tokens, num_generation_tokens)
            parent_req.max_num_generation_tokens = num_generation_tokens
            n = parent_req.n
            if parent_req.child_requests:
                return
        iteration_stats.max_num_generation_tokens_iter.append(num_generation_tokens)
        iteration_stats.n_params_iter.append(n)


def split_request(
    request: EngineCoreRequest,
) -> tuple[ParentRequest | None, Iterator[EngineCoreRequest]]:
    """What the core gets of a user's request: the request itself, or (n > 1) its parent and, one
    by one, the children. A child is unfinished from the moment it is taken."""
    if request.sampling_params.n == 1:
        return None, iter([request])
    parent_req = ParentRequest(request)
    return parent_req, (_make_child(request, parent_req, index) for index in range(parent_req.n))


def _make_child(
    request: EngineCoreRequest, parent_req: ParentRequest, index: int
) -> EngineCoreRequest:
    child_request = copy(request)
    child_request.request_id, child_request.sampling_params = parent_req.get_child_info(index)
    return child_request
