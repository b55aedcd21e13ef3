"""An attention backend without a KV cache, so that models are tested apart from paging.

Also the helpers that make random checkpoints and compute logits, ours and transformers'.

The batch is several whole prompts packed into one row; each attends causally to itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nanovllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig
from nanovllm.model_executor.model_loader.default_loader import get_model
from nanovllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

PROMPT_LENS = [
    1,
    60,
    7,
    33,
]  # tokens; the longest goes well past the original length of scaled RoPEs
VOCAB_SIZE = 97


class DenseMetadataBuilder(AttentionMetadataBuilder[list[int]]):
    """The metadata is the list of prompt lengths."""

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> list[int]:
        return common_attn_metadata.query_start_loc_cpu.diff().tolist()


class DenseImpl(AttentionImpl[list[int]]):
    def do_kv_cache_update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: list[int],
    ) -> None:
        """There is no cache."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: list[int],
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs = []
        for q, k, v in zip(*(x.split(attn_metadata) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_size]
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


class DenseBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "DENSE"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return DenseImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return DenseMetadataBuilder


@torch.no_grad()
def save_random_checkpoint(
    folder: Path, config: PretrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """A transformers model with weights large enough that every one of them matters, norms and
    biases included; saved to `folder` and returned in float32."""
    hf_model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, param in hf_model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        is_norm = param.dim() == 1 and name.endswith("weight")
        param.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
    hf_model.save_pretrained(folder)
    return hf_model


def make_config(folder: Path, **kwargs: Any) -> VllmConfig:
    load_format = kwargs.pop("load_format", "auto")
    return VllmConfig(
        model_config=ModelConfig(str(folder), **kwargs),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format),
    )


def load(folder: Path, **kwargs: Any) -> torch.nn.Module:
    """Our model of the checkpoint; keyword arguments are ModelConfig's, and load_format."""
    return get_model(make_config(folder, **kwargs), DenseBackend, torch.device("cpu"))


def make_prompts(lens: list[int] = PROMPT_LENS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in lens]


@torch.no_grad()
def our_logits(model: torch.nn.Module, prompts: list[torch.Tensor]) -> torch.Tensor:
    """All prompts as one packed batch: [total tokens, vocab_size]."""
    lens = [len(p) for p in prompts]
    positions = torch.cat([torch.arange(n) for n in lens])
    no_caches = [torch.empty(0)] * 64
    hidden_states = model(torch.cat(prompts), positions, no_caches, lens)
    return model.compute_logits(hidden_states)


@torch.no_grad()
def hf_logits(hf_model: PreTrainedModel, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Each prompt by itself, the logits packed: [total tokens, vocab_size]."""
    return torch.cat([hf_model(p[None]).logits[0] for p in prompts])
