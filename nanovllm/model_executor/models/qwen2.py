"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections.

Upstream: vllm/model_executor/models/qwen2.py (0.23.0)
Left out: sliding windows and dual-chunk attention (both refused).
"""

from __future__ import annotations

from typing import Any

from nanovllm.config import VllmConfig
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM
from nanovllm.v1.attention.backend import AttentionBackend


class Qwen2Attention(LlamaAttention):
    """The bias is part of the architecture: config.json does not mention it."""

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        rotary_emb: RotaryEmbedding,
        attn_backend: type[AttentionBackend],
    ) -> None:
        super().__init__(config, layer_idx, rotary_emb, attn_backend, qkv_bias=True)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with a bias on query, key and value."""

    def __init__(self, *, vllm_config: VllmConfig, attn_backend: type[AttentionBackend]) -> None:
        super().__init__(
            vllm_config=vllm_config, attn_backend=attn_backend, attn_layer_type=Qwen2Attention
        )
