"""Llama 2 and 3, and the models that share their code: TinyLlama, SmolLM2, Mistral.

A step's tokens are one packed row, whatever requests they belong to: there is no batch dimension
and no padding, and `positions` says where in its own sequence each token stands. Only attention
looks across tokens, and only it sees the KV cache.

    input_ids [T] -> embed_tokens -> [T, hidden] -+-> layer 0 .. n-1 -> norm -> [T, hidden]
                                                  |
      layer:  x, residual -> input_layernorm -> self_attn -> post_attention_layernorm -> mlp
              (each norm first adds x to the residual stream: see RMSNorm)

Qwen2 and Qwen3 differ in their attention layer only; they pass theirs as `attn_layer_type`.

Upstream: vllm/model_executor/models/llama.py (0.23.0)
Left out: tensor and pipeline parallelism, quantization, LoRA, EAGLE, sliding windows (refused).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.config import VllmConfig, get_rope_parameters
from nanovllm.model_executor.layers.activation import SiluAndMul, get_act_and_mul_fn
from nanovllm.model_executor.layers.attention import Attention
from nanovllm.model_executor.layers.layernorm import RMSNorm
from nanovllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.model_executor.layers.logits_processor import LogitsProcessor
from nanovllm.model_executor.layers.qk_norm_rope_cache import qk_norm_rope_and_cache
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.model_executor.layers.skinny_linear import use_skinny_linear
from nanovllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from nanovllm.model_executor.models.utils import (
    AutoWeightsLoader,
    StackedParamsMapping,
    verify_supported,
)
from nanovllm.triton_utils import use_triton
from nanovllm.v1.attention.backend import AttentionBackend


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)
        self.act_fn = get_act_and_mul_fn(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    """Self-attention with rotary positions and grouped key-value heads.

    Args:
        layer_idx: this layer's place in `kv_caches`.
        rotary_emb: shared by all layers.
        qkv_bias: whether q, k and v have a bias; None: as config.attention_bias, which o_proj
            follows.
    """

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        rotary_emb: RotaryEmbedding,
        attn_backend: type[AttentionBackend],
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        attention_bias = getattr(config, "attention_bias", False)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = rotary_emb.head_size
        self.q_size = num_heads * self.head_dim
        self.kv_size = num_kv_heads * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads,
            bias=attention_bias if qkv_bias is None else qkv_bias,
        )
        self.o_proj = RowParallelLinear(self.q_size, config.hidden_size, bias=attention_bias)
        # Qwen3 normalizes each head of the queries and keys before they are turned.
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            num_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            layer_idx=layer_idx,
            attn_backend=attn_backend,
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
    ) -> torch.Tensor:
        """hidden_states [num_tokens, hidden_size] -> the same shape."""
        qkv = self.qkv_proj(hidden_states)
        return self.o_proj(self.attend(positions, qkv, kv_caches, attn_metadata))

    def attend(
        self,
        positions: torch.Tensor,
        qkv: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
    ) -> torch.Tensor:
        """qkv [num_tokens, q_size + 2 * kv_size] -> [num_tokens, q_size]."""
        if use_triton(qkv):  # rotation and cache in one kernel
            q, k, v = qk_norm_rope_and_cache(
                qkv,
                positions,
                kv_caches[self.attn.layer_idx],
                attn_metadata.slot_mapping,
                rotary_emb=self.rotary_emb,
                num_heads=self.attn.num_heads,
                num_kv_heads=self.attn.num_kv_heads,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
            )
            return self.attn(q, k, v, kv_caches, attn_metadata, is_cached=True)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(1)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v, kv_caches, attn_metadata)


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream by the next norm."""

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        rotary_emb: RotaryEmbedding,
        attn_backend: type[AttentionBackend],
        attn_layer_type: type[LlamaAttention],
    ) -> None:
        super().__init__()
        self.self_attn = attn_layer_type(config, layer_idx, rotary_emb, attn_backend)
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=getattr(config, "mlp_bias", False),
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden_states, residual) -> (hidden_states, residual), [num_tokens, hidden_size] each.
        The residual stream is their sum, which the next norm computes; None: hidden_states alone is
        the stream, as before the first layer."""
        # (The lab puts other activations in place of SiLU; the fused kernel knows that one only.)
        can_fuse = residual is None and type(self.mlp.act_fn) is SiluAndMul
        if can_fuse and use_skinny_linear(hidden_states):
            return self.forward_skinny(positions, hidden_states, kv_caches, attn_metadata), None
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, kv_caches, attn_metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual

    def forward_skinny(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
    ) -> torch.Tensor:
        """The same for a few tokens on a GPU: what stands between two linear layers is done in
        their kernels. [num_tokens, hidden_size], the residual stream before and after the layer."""
        attn, mlp = self.self_attn, self.mlp
        qkv = attn.qkv_proj.forward_fused(hidden_states, norm=self.input_layernorm)
        heads = attn.attend(positions, qkv, kv_caches, attn_metadata)
        hidden_states = attn.o_proj.forward_fused(heads, residual=hidden_states)
        x = mlp.gate_up_proj.forward_fused(
            hidden_states, norm=self.post_attention_layernorm, silu_and_mul=True
        )
        return mlp.down_proj.forward_fused(x, residual=hidden_states)


class LlamaModel(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        attn_backend: type[AttentionBackend],
        attn_layer_type: type[LlamaAttention] = LlamaAttention,
    ) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        assert model_config.max_model_len is not None  # ModelConfig derives it
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        rotary_emb = get_rope(
            model_config.get_head_size(),
            max_position=model_config.max_model_len,
            rope_parameters=get_rope_parameters(config),
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer_idx, rotary_emb, attn_backend, attn_layer_type)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(
                positions, hidden_states, residual, kv_caches, attn_metadata
            )
        if residual is None:
            return self.norm(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class LlamaForCausalLM(nn.Module):
    """The model with its output head, and how a checkpoint fills it.

    Raises:
        VLLMValidationError: config.json asks for something that is not computed here.
    """

    stacked_params_mapping: ClassVar[StackedParamsMapping] = [
        # (our parameter, the checkpoint's, shard id)
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    ]

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        attn_backend: type[AttentionBackend],
        attn_layer_type: type[LlamaAttention] = LlamaAttention,
    ) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        assert model_config.max_model_len is not None
        verify_supported(config, model_config.max_model_len)
        self.config = config
        self.model = LlamaModel(
            vllm_config=vllm_config, attn_backend=attn_backend, attn_layer_type=attn_layer_type
        )
        # Tied: the head is the embedding, so there is one table in memory and one name for it.
        self.lm_head: VocabParallelEmbedding = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else ParallelLMHead(config.vocab_size, config.hidden_size)
        )
        self.logits_processor = LogitsProcessor()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The hidden states that `compute_logits` takes.

        Args:
            input_ids: [num_tokens] int64, the packed tokens of all requests of the step.
            positions: [num_tokens] int64, each token's index in its own sequence.
            kv_caches: one a layer, shaped as the attention backend wants it.
            attn_metadata: the backend's own.
            inputs_embeds: [num_tokens, hidden_size], used in place of the ids' embeddings.

        Returns:
            [num_tokens, hidden_size]
        """
        return self.model(input_ids, positions, kv_caches, attn_metadata, inputs_embeds)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], in the model's dtype."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter from a checkpoint's tensors; see AutoWeightsLoader."""
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        loader = AutoWeightsLoader(
            self,
            stacked_params_mapping=self.stacked_params_mapping,
            tied=tied if self.config.tie_word_embeddings else None,
            # Tables that older checkpoints saved along; they are computed here.
            skip_substrs=["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"],
        )
        return loader.load_weights(weights)
