"""Qwen3: Llama with an RMSNorm on every query and key head before the rotation (QK-norm).

The norm keeps query-key products in range however large the hidden states grow. Its weight has the
width of one head and is shared by a layer's heads.

Upstream: vllm/model_executor/models/qwen3.py (0.23.0)
Left out: sliding windows and dual-chunk attention (both refused). config.attention_bias gives
o_proj a bias too, as in transformers; upstream leaves that one out.
"""

from __future__ import annotations

from typing import Any

from nanovllm.config import VllmConfig
from nanovllm.model_executor.layers.layernorm import RMSNorm
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM
from nanovllm.v1.attention.backend import AttentionBackend


class Qwen3Attention(LlamaAttention):
    """LlamaAttention with `q_norm` and `k_norm`."""

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        rotary_emb: RotaryEmbedding,
        attn_backend: type[AttentionBackend],
    ) -> None:
        super().__init__(config, layer_idx, rotary_emb, attn_backend)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys."""

    def __init__(self, *, vllm_config: VllmConfig, attn_backend: type[AttentionBackend]) -> None:
        super().__init__(
            vllm_config=vllm_config, attn_backend=attn_backend, attn_layer_type=Qwen3Attention
        )
