"""Errors that are the user's to mend: one sentence each, naming the value and the limit.

Anything else that escapes the engine is a bug and keeps its traceback.

Upstream: vllm/exceptions.py (0.23.0)
"""

from __future__ import annotations

from typing import Any


class VLLMValidationError(ValueError):
    """A parameter, prompt or model that cannot be used as given.

    Attributes:
        parameter: the offending parameter's name, if there is one.
        value: its value.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class VLLMNotFoundError(Exception):
    """What was asked for by name is not there."""
