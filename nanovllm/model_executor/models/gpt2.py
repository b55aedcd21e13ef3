"""GPT-2, for contrast with Llama: what a transformer looked like in 2019.

    learned position vectors, added to the embedding     where Llama rotates queries and keys
    LayerNorm with a bias                                 RMSNorm
    a plain GELU MLP                                      SwiGLU
    as many key-value heads as query heads                grouped-query attention
    biases everywhere                                     none

Its checkpoints store linear weights transposed ([input, output], a layer called Conv1D) and query,
key and value already in one matrix.

Upstream: vllm/model_executor/models/gpt2.py (0.23.0)
Left out: tensor and pipeline parallelism, quantization, the classifier. As upstream, cross
attention and the settings scale_attn_by_inverse_layer_idx and reorder_and_upcast_attn are refused;
so is scale_attn_weights=False, which upstream passes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.config import VllmConfig
from nanovllm.exceptions import VLLMValidationError
from nanovllm.model_executor.layers.activation import get_act_fn
from nanovllm.model_executor.layers.attention import Attention
from nanovllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.model_executor.layers.logits_processor import LogitsProcessor
from nanovllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from nanovllm.model_executor.models.utils import AutoWeightsLoader, verify_supported
from nanovllm.v1.attention.backend import AttentionBackend


class GPT2Attention(nn.Module):
    """Self-attention without rotation: positions are in the hidden states already."""

    def __init__(self, config: Any, layer_idx: int, attn_backend: type[AttentionBackend]) -> None:
        super().__init__()
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        head_dim = hidden_size // num_heads
        self.c_attn = QKVParallelLinear(hidden_size, head_dim, num_heads, bias=True)
        self.c_proj = RowParallelLinear(hidden_size, hidden_size, bias=True)
        self.attn = Attention(
            num_heads,
            head_dim,
            scale=head_dim**-0.5,
            num_kv_heads=num_heads,
            layer_idx=layer_idx,
            attn_backend=attn_backend,
        )

    def forward(
        self, hidden_states: torch.Tensor, kv_caches: list[torch.Tensor], attn_metadata: Any
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        q, k, v = self.c_attn(hidden_states).chunk(3, dim=-1)
        return self.c_proj(self.attn(q, k, v, kv_caches, attn_metadata))


class GPT2MLP(nn.Module):
    """c_proj(gelu(c_fc(x)))"""

    def __init__(self, intermediate_size: int, config: Any) -> None:
        super().__init__()
        self.c_fc = ColumnParallelLinear(config.hidden_size, intermediate_size, bias=True)
        self.c_proj = RowParallelLinear(intermediate_size, config.hidden_size, bias=True)
        self.act = get_act_fn(config.activation_function)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    """Attention and MLP, each on a normalized copy of the residual stream and added back to it."""

    def __init__(self, config: Any, layer_idx: int, attn_backend: type[AttentionBackend]) -> None:
        super().__init__()
        inner_dim = config.n_inner if config.n_inner is not None else 4 * config.hidden_size
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_idx, attn_backend)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(inner_dim, config)

    def forward(
        self, hidden_states: torch.Tensor, kv_caches: list[torch.Tensor], attn_metadata: Any
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        attn_output = self.attn(self.ln_1(hidden_states), kv_caches, attn_metadata)
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2Model(nn.Module):
    """Token and position embeddings, blocks and the final norm."""

    def __init__(self, *, vllm_config: VllmConfig, attn_backend: type[AttentionBackend]) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.wte = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.wpe = VocabParallelEmbedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(
            GPT2Block(config, layer_idx, attn_backend)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if inputs_embeds is None:
            hidden_states = self.wte(input_ids) + self.wpe(positions)
        else:
            hidden_states = inputs_embeds + self.wpe(positions)
        for block in self.h:
            hidden_states = block(hidden_states, kv_caches, attn_metadata)
        return self.ln_f(hidden_states)


class GPT2LMHeadModel(nn.Module):
    """The model with its output head, which is the token embedding unless config.json unties it.

    Raises:
        VLLMValidationError: config.json asks for something that is not computed here.
    """

    def __init__(self, *, vllm_config: VllmConfig, attn_backend: type[AttentionBackend]) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        assert model_config.max_model_len is not None  # ModelConfig derives it
        verify_supported(config, model_config.max_model_len)
        _verify_gpt2(config)
        self.config = config
        self.transformer = GPT2Model(vllm_config=vllm_config, attn_backend=attn_backend)
        self.lm_head: VocabParallelEmbedding = (
            self.transformer.wte
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
        """input_ids [num_tokens], positions [num_tokens] -> [num_tokens, hidden_size]; see
        LlamaForCausalLM.forward."""
        return self.transformer(input_ids, positions, kv_caches, attn_metadata, inputs_embeds)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], without the positions' share."""
        return self.transformer.wte(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], in the model's dtype."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter from a checkpoint's tensors; see AutoWeightsLoader."""
        tied = {"lm_head.weight": "transformer.wte.weight"}
        loader = AutoWeightsLoader(
            self,
            tied=tied if self.config.tie_word_embeddings else None,
            # Causal masks that older checkpoints saved along. (c_attn.bias is a parameter.)
            skip_substrs=[".attn.bias", ".attn.masked_bias"],
        )
        return loader.load_weights(_to_our_layout(weights))


def _verify_gpt2(config: Any) -> None:
    """Refuse the settings that only GPT-2's config has, and that change the attention."""
    defaults = {
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }
    for name, default in defaults.items():
        if (value := getattr(config, name, default)) != default:
            raise VLLMValidationError(
                f"config.json sets {name}={value!r}, which is not supported.",
                parameter=name,
                value=value,
            )
    if config.hidden_size % config.num_attention_heads:
        raise VLLMValidationError(
            f"n_embd {config.hidden_size} is no multiple of n_head {config.num_attention_heads}.",
            parameter="n_head",
            value=config.num_attention_heads,
        )


def _to_our_layout(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Add the prefix that checkpoints of the bare model lack, and turn Conv1D's weights round."""
    conv1d_weights = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    for name, tensor in weights:
        if not name.startswith(("transformer.", "lm_head.")):
            name = "transformer." + name
        if name.endswith(conv1d_weights):
            tensor = tensor.t()
        yield name, tensor
