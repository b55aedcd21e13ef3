"""Which attention backend runs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.attention import selector
from nanovllm.v1.attention.backends import triton_attn
from nanovllm.v1.attention.selector import choose_attn_backend, get_attn_backend


def config(
    attention_backend: str | None,
    device_type: str = "cpu",
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    return SimpleNamespace(
        attention_backend=attention_backend,
        device_config=SimpleNamespace(device_type=device_type),
        model_config=SimpleNamespace(get_head_size=lambda: head_size, torch_dtype=dtype),
        cache_config=SimpleNamespace(block_size=16),
    )


def chosen(*args, **kwargs) -> tuple[str, str]:
    backend, reason = choose_attn_backend(config(*args, **kwargs))
    return backend.get_name(), reason


def test_the_cpu_runs_the_cpu_backend():
    """Nothing asked for on a CPU: CPU_ATTN; its name may be given in any case."""
    assert chosen(None) == ("CPU_ATTN", "the default on cpu")
    assert chosen("cpu_attn") == ("CPU_ATTN", "asked for by attention_backend")


def test_cuda_runs_triton_unless_it_cannot(monkeypatch):
    """And then torch, slowly, with the reasons."""
    assert chosen(None, "cuda") == ("TRITON_ATTN", "the default on cuda")
    assert chosen("CPU_ATTN", "cuda")[0] == "CPU_ATTN"
    name, reason = chosen(None, "cuda", head_size=512)
    assert name == "CPU_ATTN"
    assert "512" in reason
    monkeypatch.setattr(triton_attn, "HAS_TRITON", False)
    name, reason = chosen(None, "cuda")
    assert name == "CPU_ATTN"
    assert "Triton is not installed" in reason


def test_the_choice_and_its_reason_are_logged(caplog):
    """One line."""
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert get_attn_backend(config(None)).get_name() == "CPU_ATTN"
    assert caplog.messages == ["Attention backend CPU_ATTN: the default on cpu."]


def test_an_unknown_backend_is_refused_by_name():
    """The error names what was asked for and what there is."""
    with pytest.raises(VLLMValidationError, match=r"'FLASHY'.*CPU_ATTN, TRITON_ATTN") as error:
        get_attn_backend(config("FLASHY"))
    assert error.value.parameter == "attention_backend"


def test_a_backend_that_cannot_run_here_is_refused_with_every_reason(monkeypatch):
    """Device, head size and dtype; never replaced by another silently."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(VLLMValidationError, match=r"TRITON_ATTN cannot run.*CPU.*512.*float64"):
        get_attn_backend(config("TRITON_ATTN", "cpu", head_size=512, dtype=torch.float64))


def test_every_backend_is_what_its_name_says():
    """The registry's keys are the classes' names."""
    for name in selector.BACKENDS:
        assert selector.load_backend(name).get_name() == name
