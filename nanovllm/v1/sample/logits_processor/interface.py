"""What a logits processor is, and how it hears that the batch has changed.

A processor keeps its own state per batch row (a dict or a column), because rebuilding it every
step would cost more than applying it. It learns of changes through a BatchUpdate: rows emptied,
filled, moved.

Upstream: vllm/v1/sample/logits_processor/interface.py (0.23.0)
Left out: the constructor's signature (plugins are not loaded), validate_params.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nanovllm.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """How two rows change places."""

    UNIDIRECTIONAL = auto()  # a's request goes to row b; row a is empty afterwards
    SWAP = auto()  # the requests of rows a and b change places


RemovedRequest = int
# (row, params, prompt_token_ids, output_token_ids). The last is the request's own, growing list:
# whoever keeps the reference always sees the tokens generated so far.
AddedRequest = tuple[int, "SamplingParams", "list[int] | None", "list[int]"]
# (row a, row b, directionality)
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """What happened to the batch's rows since the last step: removed, then added, then moved.

        before   [A B C D]     removed = [1]
        removed  [A . C D]     added   = [(4, E)]           batch_size = 4
        added    [A . C D E]   moved   = [(4, 1, UNIDIRECTIONAL)]
        moved    [A E C D]

    An added request may replace the one in its row without that row being listed as removed, and
    so may a moved one.
    """

    batch_size: int  # requests in the batch after the update
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes some logits of some rows before a token is sampled."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called once before each forward pass; None if no row was removed, added or moved (there
        may be new output tokens all the same)."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process logits [num_reqs, vocab_size] float32, in place or not, and return them."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if a row's most likely token always stays so: greedy rows do not need it."""

    def is_idle(self) -> bool:
        """True if no row uses it at present: `apply` would return the logits as they are."""
        return False
