"""What would change a model's result and is not computed is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dense_backend import load, make_config
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from nanovllm.config import get_rope_parameters
from nanovllm.exceptions import VLLMValidationError
from nanovllm.model_executor.layers.activation import get_act_fn
from nanovllm.model_executor.layers.rotary_embedding import get_rope
from nanovllm.model_executor.models.registry import ModelRegistry

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_TINY = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
BASES = {
    "LlamaForCausalLM": LlamaConfig(**TINY),
    "MistralForCausalLM": MistralConfig(**TINY, sliding_window=None),
    "Qwen2ForCausalLM": Qwen2Config(**TINY),
    "Qwen3ForCausalLM": Qwen3Config(**TINY, head_dim=8),
    "GPT2LMHeadModel": GPT2Config(**GPT2_TINY),
}


def write_config(folder: Path, architecture: str, **settings: Any) -> None:
    config = BASES[architecture].to_dict() | {"architectures": [architecture]} | settings
    (folder / "config.json").write_text(json.dumps(config))


SLIDING = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
REFUSED = [
    ("MistralForCausalLM", {"sliding_window": 32}, "sliding_window of 32 .*max_model_len 64"),
    ("Qwen2ForCausalLM", SLIDING | {"layer_types": None}, "sliding_window of 32"),
    ("Qwen3ForCausalLM", SLIDING | {"layer_types": None}, "sliding_window of 32"),
    ("Qwen2ForCausalLM", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
    ("LlamaForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("LlamaForCausalLM", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("LlamaForCausalLM", {"is_causal": False}, "is_causal=False"),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}, "'gelu' is not supported"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "4 attention heads .* 3 key-value heads"),
    (
        "LlamaForCausalLM",
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config",
    ),
    ("GPT2LMHeadModel", {"activation_function": "mish"}, "'mish' is not supported"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
    ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
    ("GPT2LMHeadModel", {"n_head": 5}, "n_embd 32 is no multiple of n_head 5"),
]


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    REFUSED,
    ids=[f"{arch}-{next(iter(settings))}" for arch, settings, _ in REFUSED],
)
def test_a_setting_that_is_not_computed_is_refused(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    """The model loads without the setting; with it, one sentence names setting and value."""
    write_config(tmp_path, architecture)
    load(tmp_path, load_format="dummy")
    write_config(tmp_path, architecture, **settings)
    with pytest.raises(VLLMValidationError, match=message) as e:
        load(tmp_path, load_format="dummy")
    assert "\n" not in str(e.value)


def test_a_sliding_window_that_hides_nothing_is_accepted(tmp_path: Path):
    """Limited to the window's length, a sliding-window model is an ordinary one."""
    write_config(tmp_path, "MistralForCausalLM", sliding_window=32)
    load(tmp_path, load_format="dummy", max_model_len=32)


def test_a_window_that_no_layer_uses_is_accepted(tmp_path: Path):
    """Qwen configs state a window that use_sliding_window switches off."""
    write_config(tmp_path, "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=32)
    load(tmp_path, load_format="dummy")


BAD_ROPES = [
    ({"rope_type": "longrope", "factor": 2.0}, "RoPE type 'longrope' is not supported; supported"),
    ({"rope_type": "dynamic", "alpha": 1000.0}, "alpha=1000.0"),
    ({"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 32}, "max_trained_positions"),
    ({"rope_type": "dynamic"}, "'dynamic' needs factor"),
    ({"rope_type": "ntk", "factor": 2.0, "mixed_b": 0.75}, "mixed_b=0.75"),
    ({"rope_type": "mrope", "mrope_section": [2, 1, 1]}, "'mrope'"),
    ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "mrope_section"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_type": "yarn", "factor": 4.0, "attn_factor": 2.0}, "attn_factor=2.0"),
    ({"rope_type": "linear"}, "'linear' needs factor"),
    ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
    ({"rope_type": "linear", "factor": "4"}, "factor must be a positive number, .* says '4'"),
    ({"rope_type": "yarn", "factor": float("nan")}, "factor must be a positive number"),
    ({"rope_type": "default", "rope_theta": 0}, "rope_theta must be a positive number"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention"),
]


@pytest.mark.parametrize(("rope", "message"), BAD_ROPES)
def test_a_rope_that_is_not_computed_is_refused(rope: dict[str, Any], message: str):
    """A RoPE type, or a key of one, that would give other angles is refused by name."""
    config = LlamaConfig(**TINY)
    config.rope_parameters = rope
    with pytest.raises(VLLMValidationError, match=message):
        get_rope(8, max_position=64, rope_parameters=get_rope_parameters(config))


def test_rope_needs_an_even_head_size():
    """Pairs cannot be made of an odd number."""
    with pytest.raises(VLLMValidationError, match="head size must be even, but it is 7"):
        get_rope(7, max_position=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def test_an_unsupported_rope_in_config_json_is_refused_at_load(tmp_path: Path):
    """The refusal is raised when the model is loaded, too."""
    rope = {"rope_type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    write_config(tmp_path, "LlamaForCausalLM", rope_parameters=rope)
    with pytest.raises(VLLMValidationError, match="'mrope' is not supported"):
        load(tmp_path, load_format="dummy")


def test_a_dynamic_rope_serves_no_more_positions_than_were_trained(tmp_path: Path):
    """Beyond them the angles of all positions would change with every token."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    write_config(tmp_path, "LlamaForCausalLM", rope_parameters=rope)
    load(tmp_path, load_format="dummy", max_model_len=64)
    with pytest.raises(VLLMValidationError, match="between 1 and 64"):
        make_config(tmp_path, max_model_len=65)


def test_an_unknown_architecture_is_refused_with_the_supported_list(tmp_path: Path):
    """The error names the architecture and every one that would do."""
    config = BASES["LlamaForCausalLM"].to_dict() | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VLLMValidationError, match="'MambaForCausalLM' is not supported") as e:
        load(tmp_path, load_format="dummy")
    assert all(name in str(e.value) for name in ModelRegistry.get_supported_archs())


def test_max_model_len_beyond_the_positions_is_refused(tmp_path: Path):
    """GPT-2 has no vector for position 64, Llama was not trained for it."""
    for architecture in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        write_config(tmp_path, architecture)
        with pytest.raises(VLLMValidationError, match="between 1 and 64"):
            make_config(tmp_path, max_model_len=65)


def test_an_unknown_activation_is_refused_with_the_supported_list():
    """The error names what was asked for and what there is."""
    with pytest.raises(VLLMValidationError, match="'mish' is not supported; supported are gelu"):
        get_act_fn("mish")
