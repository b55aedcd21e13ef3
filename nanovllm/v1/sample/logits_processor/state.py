"""How row changes are collected during a step, and the processors that are told of them.

Upstream: vllm/v1/sample/logits_processor/state.py (0.23.0)
Left out: batch_changed, which only pooling models need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from nanovllm.v1.sample.logits_processor.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MovedRequest,
    RemovedRequest,
)


class BatchUpdateBuilder:
    """Collects what one step does to the input batch's rows.

    A step first removes (removed_append), then adds and moves; both reuse emptied rows, lowest
    first (pop_removed), and a reused row is not reported as removed any more. Once the removed
    rows have been read no further one may be registered, or lowest first would no longer hold.
    """

    def __init__(self) -> None:
        self._removed: list[RemovedRequest] = []
        self._is_removed_sorted = False
        self.added: list[AddedRequest] = []
        self.moved: list[MovedRequest] = []

    @property
    def removed(self) -> list[RemovedRequest]:
        """Emptied rows that are still empty, highest first."""
        if not self._is_removed_sorted:
            self._removed.sort(reverse=True)
            self._is_removed_sorted = True
        return self._removed

    def removed_append(self, index: RemovedRequest) -> None:
        """Register that row `index` has been emptied.

        Raises:
            RuntimeError: the removed rows of this step have been read already.
        """
        if self._is_removed_sorted:
            raise RuntimeError(f"Row {index} was removed after this step's removed rows were read.")
        self._removed.append(index)

    def peek_removed(self) -> RemovedRequest | None:
        """The lowest empty row, if there is one."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> RemovedRequest | None:
        """The lowest empty row, which the caller now fills."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> None:
        """Forget everything and start the next step."""
        self._removed, self.added, self.moved = [], [], []
        self._is_removed_sorted = False

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """What has been collected, for a batch that now has `batch_size` rows; None if nothing."""
        update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self.reset()
        return update if update.removed or update.added or update.moved else None


class LogitsProcessors:
    """The batch's processors, apart by whether a greedy row has to wait for them."""

    def __init__(self, logitsprocs: Iterable[LogitsProcessor] = ()) -> None:
        self.argmax_invariant: list[LogitsProcessor] = []
        self.non_argmax_invariant: list[LogitsProcessor] = []
        for processor in logitsprocs:
            invariant = processor.is_argmax_invariant()
            (self.argmax_invariant if invariant else self.non_argmax_invariant).append(processor)

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        return chain(self.argmax_invariant, self.non_argmax_invariant)
