"""Which attention backend runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.attention.selector import get_attn_backend


def config(attention_backend: str | None, device_type: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        attention_backend=attention_backend, device_config=SimpleNamespace(device_type=device_type)
    )


def test_the_cpu_runs_the_cpu_backend():
    """Nothing asked for on a CPU: CPU_ATTN; its name may be given in any case."""
    assert get_attn_backend(config(None)).get_name() == "CPU_ATTN"
    assert get_attn_backend(config("cpu_attn")).get_name() == "CPU_ATTN"


def test_an_unknown_backend_is_refused_by_name():
    """The error names what was asked for and what there is."""
    with pytest.raises(VLLMValidationError, match=r"'FLASHY'.*CPU_ATTN") as error:
        get_attn_backend(config("FLASHY"))
    assert error.value.parameter == "attention_backend"
