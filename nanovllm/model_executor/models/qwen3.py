"""Qwen3: Llama with an RMSNorm on every query and key head before the rotation (QK-norm).

The norm keeps query-key products in range however large the hidden states grow. Its weight has the
width of one head and is shared by a layer's heads.

Upstream: vllm/model_executor/models/qwen3.py (0.23.0)
Left out: sliding windows and dual-chunk attention (both refused). config.attention_bias gives
o_proj a bias too, as in transformers; upstream leaves that one out.
"""

from __future__ import annotations

from typing import Any

import torch

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

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
    ) -> torch.Tensor:
        """hidden_states [num_tokens, hidden_size] -> the same shape."""
        qkv = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(1)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, kv_caches, attn_metadata))


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys."""

    def __init__(self, *, vllm_config: VllmConfig, attn_backend: type[AttentionBackend]) -> None:
        super().__init__(
            vllm_config=vllm_config, attn_backend=attn_backend, attn_layer_type=Qwen3Attention
        )
