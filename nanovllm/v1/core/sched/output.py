"""What the scheduler tells the model runner: one SchedulerOutput a step.

The scheduler and the runner each keep their own picture of every request. To keep the message
small, a request is described in full once (`NewRequestData`), and after that only by what changed
(`CachedRequestData`): its new block ids and how far it has come.

Upstream: vllm/v1/core/sched/output.py (0.23.0)
Left out: multimodal, LoRA, pooling, structured-output and KV-connector fields, `new_token_ids`
(pipeline parallelism only), `num_common_prefix_blocks` (cascade attention only), several KV-cache
groups (block ids are one list, not a tuple of lists).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nanovllm.sampling_params import SamplingParams
    from nanovllm.v1.request import Request


@dataclass
class NewRequestData:
    """A request that the runner sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]  # the whole block table, cached prefix included
    num_computed_tokens: int  # prefix-cache hit, in tokens
    prompt_embeds: torch.Tensor | None = None  # [num_prompt_tokens, hidden_size], for ids all 0

    @classmethod
    def from_request(cls, request: Request, block_ids: list[int]) -> NewRequestData:
        """Describe `request`, just admitted, with its block table `block_ids`."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            prompt_embeds=request.prompt_embeds,
        )


@dataclass
class CachedRequestData:
    """Requests the runner already knows; parallel lists, in scheduling order."""

    req_ids: list[str]
    # For these, `new_block_ids` replaces the block table; for all others it is appended to it.
    resumed_req_ids: set[str]
    # None: the step needs no new block.
    new_block_ids: list[list[int] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    # Every token of each request that was not in the previous step's batch (resumed ones above
    # all): the runner has dropped its row, and with async scheduling may lack its last output.
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls([], set(), [], [], [], {})


@dataclass
class SchedulerOutput:
    """One step's plan. The order of `num_scheduled_tokens` is the order of scheduling."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str]
    # Finished since the previous schedule(): the runner forgets them.
    finished_req_ids: set[str]

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        return cls([], CachedRequestData.make_empty(), {}, 0, set(), set())
