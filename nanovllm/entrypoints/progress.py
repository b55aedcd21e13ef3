"""The progress bars of LLM.generate and of `nanovllm bench serve`.

Upstream: vllm/entrypoints/offline_utils.py (0.23.0), where it is part of _run_engine and made by
tqdm.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from nanovllm.outputs import RequestOutput


def make_progress(title: str, *last_columns: str) -> Progress:
    """A bar on standard error: title, bar, how many of how many, the time gone and to come."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *(TextColumn(column) for column in last_columns),
        console=Console(stderr=True),
    )


class ProgressBar:
    """Prompts done and, of those, input and output tokens a second; on standard error.

    As in vLLM, a prompt's tokens count when it has finished, so the speeds begin low.
    """

    def __init__(self, total: int, enabled: bool = True) -> None:
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        self._start = time.perf_counter()
        self._progress: Progress | None = None
        if not enabled:
            return
        self._progress = make_progress("Processed prompts", "{task.fields[speed]}")
        self._task = self._progress.add_task("", total=total, speed=self._speed())

    def update(self, output: RequestOutput) -> None:
        """Count one finished request."""
        if self._progress is None:
            return
        self._num_input_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._progress.update(self._task, advance=1, speed=self._speed())

    def _speed(self) -> str:
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        return (
            f"input {self._num_input_tokens / elapsed:.0f} tok/s, "
            f"output {self._num_output_tokens / elapsed:.0f} tok/s"
        )

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
