"""Models compute what transformers computes: logits within 1e-4 in float32 on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_backend import (
    VOCAB_SIZE,
    DenseBackend,
    hf_logits,
    load,
    make_config,
    make_prompts,
    our_logits,
    save_random_checkpoint,
)
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nanovllm.model_executor.model_loader.default_loader import get_model, initialize_model
from nanovllm.model_executor.models.registry import ModelRegistry

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_TINY = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}

CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama, heads wider than hidden_size / heads": LlamaConfig(**TINY, head_dim=16),
    "llama, one key-value head": LlamaConfig(**TINY | {"num_key_value_heads": 1}),
    "llama, multi-head": LlamaConfig(**TINY | {"num_key_value_heads": 4}),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "mistral, window as long as the context": MistralConfig(**TINY, sliding_window=64),
    "qwen2": Qwen2Config(**TINY),
    "qwen2 tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3 tied": Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True),
    "qwen3 with biases": Qwen3Config(**TINY, head_dim=16, attention_bias=True),
    "gpt2": GPT2Config(**GPT2_TINY),
    "gpt2 untied": GPT2Config(**GPT2_TINY, tie_word_embeddings=False),
    "gpt2, exact GELU, narrow MLP": GPT2Config(**GPT2_TINY, activation_function="gelu", n_inner=40),
}

ORIGINAL = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0} | ORIGINAL
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "llama3": LLAMA3 | ORIGINAL,
    "yarn": YARN,
    "yarn with attention_factor": YARN | {"attention_factor": 1.5},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with another ramp": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
}


def assert_logits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.5, "logits so flat that 1e-4 would prove nothing"
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    """A packed batch of prompts gives the logits that transformers gives for each prompt alone."""
    hf_model = save_random_checkpoint(tmp_path, CONFIGS[name])
    prompts = make_prompts()
    assert_logits_equal(our_logits(load(tmp_path), prompts), hf_logits(hf_model, prompts))


def rope_config(rope: dict, config_cls: type[PretrainedConfig] = LlamaConfig) -> PretrainedConfig:
    return config_cls(**TINY, head_dim=16, rope_parameters={"rope_theta": 500.0} | rope)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("config_cls", [LlamaConfig, Qwen3Config])
def test_every_rope_type_equals_transformers(
    name: str, config_cls: type[PretrainedConfig], tmp_path: Path
):
    """Logits agree for every RoPE type, on prompts beyond the original context length; and the type
    matters: with plain RoPE the logits would be others ("dynamic" is plain RoPE up to the trained
    length, the longest that is served)."""
    hf_model = save_random_checkpoint(tmp_path, rope_config(ROPES[name], config_cls))
    prompts = make_prompts()
    ours = our_logits(load(tmp_path), prompts)
    assert_logits_equal(ours, hf_logits(hf_model, prompts))
    if name not in ("default", "dynamic"):
        plain = AutoModelForCausalLM.from_config(rope_config({"rope_type": "default"}, config_cls))
        plain.load_state_dict(hf_model.state_dict())
        assert (ours - hf_logits(plain.eval(), prompts)).abs().max() > 0.01


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rope_scaling_of_older_checkpoints_is_read(name: str, type_key: str, tmp_path: Path):
    """`rope_theta` beside `rope_scaling`, the form before transformers 5, means the same."""
    hf_model = save_random_checkpoint(tmp_path, rope_config(ROPES[name]))
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope[type_key] = rope.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else rope
    config_file.write_text(json.dumps(config))
    prompts = make_prompts()
    assert_logits_equal(our_logits(load(tmp_path), prompts), hf_logits(hf_model, prompts))


@pytest.mark.parametrize("name", ROPES)
def test_cosines_and_sines_are_bitwise_those_of_transformers(name: str, tmp_path: Path):
    """The float32 table holds transformers' numbers to the last bit, whatever the model's dtype."""
    hf_model = save_random_checkpoint(tmp_path, rope_config(ROPES[name]))
    positions = torch.arange(64)[None]
    theirs = torch.cat(
        [x[0, :, :8] for x in hf_model.model.rotary_emb(torch.empty(0), positions)], dim=-1
    )
    for dtype in ("float32", "bfloat16"):
        model = load(tmp_path, dtype=dtype, max_model_len=64)
        cache = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        assert cache.dtype == torch.float32
        assert torch.equal(cache, theirs)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2, exact GELU, narrow MLP"])
def test_bfloat16_rounds_where_transformers_rounds(name: str, tmp_path: Path):
    """Our bfloat16 logits are much nearer to transformers' than either are to float32's."""
    prompts = make_prompts()
    exact = hf_logits(save_random_checkpoint(tmp_path, CONFIGS[name]), prompts)
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = hf_logits(hf_model, prompts).float()
    model = load(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ours = our_logits(model, prompts).float()
    assert (ours - theirs).std() < 0.25 * (theirs - exact).std()


def test_parameters_and_tables_are_made_on_their_device(tmp_path: Path):
    """Nothing is made elsewhere first: on the "meta" device a model takes no memory at all."""
    for name in ("llama", "gpt2"):
        save_random_checkpoint(tmp_path / name, CONFIGS[name])
        model = initialize_model(make_config(tmp_path / name), DenseBackend, torch.device("meta"))
        tensors = [*model.parameters(), *model.buffers()]
        assert {t.device.type for t in tensors} == {"meta"}


def test_a_request_does_not_see_its_neighbours_in_the_batch(tmp_path: Path):
    """Logits of a prompt are the same alone and packed among others."""
    save_random_checkpoint(tmp_path, CONFIGS["qwen3"])
    model = load(tmp_path)
    prompts = make_prompts([5, 9, 3])
    alone = torch.cat([our_logits(model, [p]) for p in prompts])
    torch.testing.assert_close(our_logits(model, prompts), alone, atol=1e-5, rtol=0)


def test_logits_are_computed_for_the_rows_asked_for(tmp_path: Path):
    """compute_logits takes any rows of the hidden states, so only those to be sampled cost."""
    save_random_checkpoint(tmp_path, CONFIGS["llama tied"])
    model = load(tmp_path)
    hidden_states = torch.randn(6, 32)
    rows = model.compute_logits(hidden_states[[1, 4]])
    assert rows.shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(rows, model.compute_logits(hidden_states)[[1, 4]])


def test_a_model_is_ready_for_inference(tmp_path: Path):
    """get_model returns it in eval mode, without gradients; torch's default dtype is as before."""
    save_random_checkpoint(tmp_path, CONFIGS["llama"])
    model = get_model(make_config(tmp_path, dtype="bfloat16"), DenseBackend, torch.device("cpu"))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.get_default_dtype() == torch.float32


def test_every_registered_architecture_resolves_to_a_class():
    """Each registry line names a module and a class that exist."""
    for architecture in ModelRegistry.get_supported_archs():
        model_cls = ModelRegistry.resolve_model_cls(architecture)
        assert issubclass(model_cls, torch.nn.Module)
        assert callable(model_cls.load_weights)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (ROPES["default"], 64),
        (ROPES["llama3"], 64),  # max_position_embeddings is the stretched length already
        (ROPES["linear"], 4 * 64),
        (ROPES["dynamic"], 64),  # for longer sequences the angles would depend on the length
        (ROPES["yarn"], 4 * 16),
    ],
)
def test_max_model_len_follows_the_rope_scaling(rope: dict, expected: int, tmp_path: Path):
    """The longest context is derived from config.json as upstream derives it; except for "dynamic",
    where upstream admits `factor` times as many positions as its table of angles has."""
    rope_config(rope).save_pretrained(tmp_path)
    assert make_config(tmp_path).model_config.max_model_len == expected


def test_gpt2_serves_as_many_positions_as_it_has_learned(tmp_path: Path):
    """n_positions bounds max_model_len."""
    CONFIGS["gpt2"].save_pretrained(tmp_path)
    assert make_config(tmp_path).model_config.max_model_len == 64
