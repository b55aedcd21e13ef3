"""Which attention backend runs, and why.

Upstream: vllm/v1/attention/selector.py and backends/registry.py (0.23.0)
Left out: choosing by compute capability, KV-cache dtype and attention kind.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.attention.backend import AttentionBackend

logger = logging.getLogger(__name__)

# Name -> "module:class"; a backend is imported only when it is considered, for some need more than
# torch.
BACKENDS = {
    "CPU_ATTN": "nanovllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
    "TRITON_ATTN": "nanovllm.v1.attention.backends.triton_attn:TritonAttentionBackend",
}


def get_attn_backend(vllm_config: VllmConfig) -> type[AttentionBackend]:
    """choose_attn_backend's choice, and a line about it in the log."""
    backend, reason = choose_attn_backend(vllm_config)
    logger.info("Attention backend %s: %s.", backend.get_name(), reason)
    return backend


def choose_attn_backend(vllm_config: VllmConfig) -> tuple[type[AttentionBackend], str]:
    """The backend named by `attention_backend`, or the best one that can run, and why that one.

    Raises:
        VLLMValidationError: no backend has that name, or the one that has cannot run here.
    """
    name = vllm_config.attention_backend
    if name is None:
        return default_backend(vllm_config)
    if name.upper() not in BACKENDS:
        raise VLLMValidationError(
            f"attention_backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}.",
            parameter="attention_backend",
            value=name,
        )
    backend = load_backend(name.upper())
    if invalid_reasons := validate_backend(backend, vllm_config):
        raise VLLMValidationError(
            f"attention_backend {backend.get_name()} cannot run here: "
            f"{', and '.join(invalid_reasons)}.",
            parameter="attention_backend",
            value=name,
        )
    return backend, "asked for by attention_backend"


def default_backend(vllm_config: VllmConfig) -> tuple[type[AttentionBackend], str]:
    """TRITON_ATTN on CUDA. CPU_ATTN is plain torch: made for a CPU, and right (if slow) on every
    other device."""
    device_type = vllm_config.device_config.device_type
    cpu_attn = load_backend("CPU_ATTN")
    if device_type != "cuda":
        return cpu_attn, f"the default on {device_type}"
    triton_attn = load_backend("TRITON_ATTN")
    if invalid_reasons := validate_backend(triton_attn, vllm_config):
        return cpu_attn, f"slow, but TRITON_ATTN cannot run: {', and '.join(invalid_reasons)}"
    return triton_attn, "the default on cuda"


def load_backend(name: str) -> type[AttentionBackend]:
    """A key of BACKENDS -> the class."""
    module_name, class_name = BACKENDS[name].split(":")
    return getattr(import_module(module_name), class_name)


def validate_backend(backend: type[AttentionBackend], vllm_config: VllmConfig) -> list[str]:
    """Why `backend` cannot run with this configuration; empty if it can."""
    model_config = vllm_config.model_config
    return backend.validate_configuration(
        vllm_config.device_config.device_type,
        model_config.get_head_size(),
        model_config.torch_dtype,
        vllm_config.cache_config.block_size,
    )
