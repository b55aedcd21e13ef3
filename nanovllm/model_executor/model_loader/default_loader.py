"""From a checkpoint folder to a model that runs.

Parameters are made in their final dtype on their final device and filled one tensor at a time, so
that loading needs the model's own memory and no second copy.

Upstream: vllm/model_executor/model_loader/default_loader.py, dummy_loader.py and base_loader.py
(0.23.0)
Left out: the loaders for other formats, processing after loading, the classes around these
functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nanovllm.config import VllmConfig
from nanovllm.model_executor.model_loader.weight_utils import (
    get_safetensors_files,
    initialize_dummy_weights,
    safetensors_weights_iterator,
)
from nanovllm.model_executor.models.registry import ModelRegistry
from nanovllm.v1.attention.backend import AttentionBackend


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors `dtype` inside the block; the old default comes back even after an error."""
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old_dtype)


def initialize_model(
    vllm_config: VllmConfig, attn_backend: type[AttentionBackend], device: torch.device
) -> nn.Module:
    """The model that config.json names, its parameters allocated and not yet filled.

    Raises:
        VLLMValidationError: the architecture, or something config.json asks for, is not supported.
    """
    model_config = vllm_config.model_config
    model_cls = ModelRegistry.resolve_model_cls(model_config.architecture)
    with set_default_torch_dtype(model_config.torch_dtype), device:
        return model_cls(vllm_config=vllm_config, attn_backend=attn_backend)


def get_model(
    vllm_config: VllmConfig, attn_backend: type[AttentionBackend], device: torch.device
) -> nn.Module:
    """A model ready to run: in eval mode, in `model_config.torch_dtype` on `device`, every
    parameter filled exactly once.

    Raises:
        VLLMValidationError: config.json or the weights cannot be used; the message says why.
    """
    model_config = vllm_config.model_config
    model = initialize_model(vllm_config, attn_backend, device)
    if vllm_config.load_config.load_format == "dummy":
        initialize_dummy_weights(model, seed=model_config.seed)
    else:
        files = get_safetensors_files(model_config.model)
        model.load_weights(safetensors_weights_iterator(files))  # type: ignore[operator]
    return model.requires_grad_(False).eval()
