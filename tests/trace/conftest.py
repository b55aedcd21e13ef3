"""One tiny checkpoint for every test of the trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entrypoints.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(scope="session")
def trace_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("trace_model"))
