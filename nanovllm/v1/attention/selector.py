"""Which attention backend runs.

Upstream: vllm/v1/attention/selector.py and backends/registry.py (0.23.0)
Left out: choosing by head size, dtype and compute capability (there is one backend to choose from).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.config import VllmConfig
    from nanovllm.v1.attention.backend import AttentionBackend

# Name -> "module:class"; a backend is imported only when it is chosen, for some need more than
# torch.
BACKENDS = {"CPU_ATTN": "nanovllm.v1.attention.backends.cpu_attn:CPUAttentionBackend"}


def get_attn_backend(vllm_config: VllmConfig) -> type[AttentionBackend]:
    """The backend named by `attention_backend`, or the default one for the device.

    Raises:
        VLLMValidationError: no backend has that name.
    """
    name = vllm_config.attention_backend or default_backend(vllm_config.device_config.device_type)
    path = BACKENDS.get(name.upper())
    if path is None:
        raise VLLMValidationError(
            f"attention_backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}.",
            parameter="attention_backend",
            value=name,
        )
    module_name, class_name = path.split(":")
    return getattr(import_module(module_name), class_name)


def default_backend(device_type: str) -> str:
    """CPU_ATTN is plain torch: made for a CPU, and right (if not fast) on every other device."""
    return "CPU_ATTN"
