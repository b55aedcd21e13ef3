"""Errors of the engine that are not the user's to mend.

Upstream: vllm/v1/engine/exceptions.py (0.23.0)
"""

from __future__ import annotations


class EngineGenerateError(Exception):
    """One request has failed. The engine and all other requests go on."""


class EngineDeadError(Exception):
    """The engine has stopped for good: a step has failed, or its process has ended."""
