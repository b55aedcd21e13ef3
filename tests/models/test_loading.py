"""Loading fills every parameter exactly once, or says in one error what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_backend import (
    VOCAB_SIZE,
    hf_logits,
    load,
    make_prompts,
    our_logits,
    save_random_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from nanovllm.exceptions import VLLMValidationError

LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random_checkpoint(tmp_path, LlamaConfig(**LLAMA))
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors after `change` has edited its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shard(folder: Path) -> list[str]:
    """Split model.safetensors into three files with an index; returns their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    weight_map = {name: names[i % 3] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def refusal(folder: Path, **kwargs: object) -> str:
    """The message with which loading is refused: one sentence on one line."""
    with pytest.raises(VLLMValidationError) as e:
        load(folder, **kwargs)
    message = str(e.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    pairs = parameters(a), parameters(b)
    assert pairs[0].keys() == pairs[1].keys()
    for name in pairs[0]:
        assert torch.equal(pairs[0][name], pairs[1][name]), name


def test_shards_load_like_one_file(folder: Path):
    """A checkpoint in three files with an index is the checkpoint in one file."""
    whole = load(folder)
    shard(folder)
    assert_same(load(folder), whole)


def test_files_that_the_index_does_not_name_are_not_read(folder: Path):
    """A second copy of the weights, as in Mistral's repositories, is ignored."""
    whole = load(folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert_same(load(folder), whole)
    shard(folder)
    assert_same(load(folder), whole)


def test_files_without_an_index_are_all_read(folder: Path):
    """Without an index and without model.safetensors, every *.safetensors file counts."""
    whole = load(folder)
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert_same(load(folder), whole)


def test_a_missing_tensor_is_named_as_the_checkpoint_would(folder: Path):
    """What is missing is listed by the checkpoint's names, part of a merged parameter or not."""
    edit(folder, lambda t: (t.pop(Q_PROJ), t.pop("model.norm.weight")))
    message = refusal(folder)
    assert f"missing: {Q_PROJ}, model.norm.weight" in message
    assert "left over" not in message


def test_a_tensor_that_nothing_needs_is_named(folder: Path):
    """What is left over is listed, a bias that config.json does not mention among it."""
    edit(folder, lambda t: t.update({Q_PROJ.replace("weight", "bias"): torch.zeros(32)}))
    assert f"left over: {Q_PROJ.replace('weight', 'bias')}" in refusal(folder)


def test_our_merged_names_are_no_checkpoint_names(folder: Path):
    """A tensor named after a merged parameter does not fill it: it is left over."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    edit(folder, lambda t: t.update({name: torch.zeros(64, 32)}))
    assert f"left over: {name}" in refusal(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path):
    """A tensor of another shape is refused, even one that would broadcast."""
    edit(folder, lambda t: t.update({UP_PROJ: torch.zeros(48, 1), Q_PROJ: torch.zeros(16, 32)}))
    message = refusal(folder)
    assert f"{UP_PROJ} (shape [48, 1] where [48, 32] is needed)" in message
    assert f"{Q_PROJ} (shape [16, 32] where [32, 32] is needed)" in message


def test_integers_are_no_weights(folder: Path):
    """A quantized tensor in a checkpoint that does not say so is refused, not read as numbers."""
    edit(folder, lambda t: t.update({UP_PROJ: torch.ones(48, 32, dtype=torch.int8)}))
    assert f"{UP_PROJ} (dtype torch.int8 where floating point is needed)" in refusal(folder)


def test_a_tensor_given_twice_is_named(folder: Path):
    """Two files that both hold a tensor are refused rather than one of them chosen."""
    files = shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(folder / files[0], folder / "another-copy.safetensors")
    some_name = next(iter(load_file(folder / files[0])))
    message = refusal(folder)
    assert "given twice: " in message
    assert some_name in message


def test_everything_that_is_wrong_comes_in_one_error(folder: Path):
    """Missing, left-over and unfit tensors are listed together."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.extra"] = tensors.pop(Q_PROJ)
        tensors[UP_PROJ] = torch.zeros(3)

    edit(folder, change)
    message = refusal(folder)
    assert all(part in message for part in ("missing: ", "left over: ", "unfit: "))


def test_a_truncated_file_is_named(folder: Path):
    """Half a file is refused by name."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "model.safetensors' cannot be read as safetensors" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_safetensors_is_named(content: bytes, folder: Path):
    """An empty file, or the pointer that git leaves in place of a large one, is refused by name."""
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors' cannot be read as safetensors" in refusal(folder)


def test_a_folder_without_weights_is_refused(folder: Path):
    """No weights at all: the error names the folder, and the file in a format that is not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "has no *.safetensors file (pytorch_model.bin is not read" in message
    assert str(folder) in message


def test_a_shard_that_is_absent_is_named(folder: Path):
    """The index names a file that is not there."""
    files = shard(folder)
    (folder / files[1]).unlink()
    assert f"names the file {files[1]!r}" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_no_index_is_refused(content: str, folder: Path):
    """A corrupt index is named."""
    (folder / "model.safetensors.index.json").write_text(content)
    assert "is not a valid index" in refusal(folder)


def test_an_index_cannot_point_out_of_its_folder(folder: Path):
    """A path in the index that leaves the folder is refused, even though the file exists."""
    outside = folder / "sub"
    outside.mkdir()
    shutil.move(folder / "config.json", outside)
    (outside / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})
    )
    assert "which is not in its folder" in refusal(outside)


def test_tables_that_older_checkpoints_saved_are_skipped(folder: Path):
    """Rotary frequencies are computed, so copies of them in a checkpoint are ignored."""
    whole = load(folder)
    extra = {
        "model.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.zeros(64, 8),
    }
    edit(folder, lambda t: t.update(extra))
    assert_same(load(folder), whole)


def test_tied_embeddings_are_one_table(tmp_path: Path):
    """A tied model has one table, and loads whether or not the checkpoint repeats it as lm_head."""
    save_random_checkpoint(tmp_path, LlamaConfig(**LLAMA, tie_word_embeddings=True))
    model = load(tmp_path)
    assert "lm_head.weight" not in parameters(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding = "model.embed_tokens.weight"
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert_same(load(tmp_path), model)
    assert_same(load(tmp_path, dtype="bfloat16"), model.to(torch.bfloat16))
    # Writers that store shared memory once may keep this name only.
    edit(tmp_path, lambda t: t.pop(embedding))
    assert_same(load(tmp_path, dtype="bfloat16"), model)


def test_a_tied_checkpoint_whose_tables_differ_is_refused(tmp_path: Path):
    """config.json ties the head to the embedding, the weights say otherwise: no guess is made."""
    save_random_checkpoint(tmp_path, LlamaConfig(**LLAMA, tie_word_embeddings=True))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert "lm_head.weight (differs from model.embed_tokens.weight" in refusal(tmp_path)


def test_an_untied_checkpoint_needs_its_head(folder: Path):
    """Without tying, a missing lm_head is an error."""
    edit(folder, lambda t: t.pop("lm_head.weight"))
    assert "missing: lm_head.weight" in refusal(folder)


def test_gpt2_loads_without_its_prefix_and_with_its_masks(tmp_path: Path):
    """The first GPT-2 checkpoints lack the `transformer.` prefix and carry masks as tensors."""
    hf_model = save_random_checkpoint(tmp_path, GPT2Config(**GPT2))

    def to_first_form(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    edit(tmp_path, to_first_form)
    prompts = make_prompts()
    torch.testing.assert_close(
        our_logits(load(tmp_path), prompts), hf_logits(hf_model, prompts), atol=1e-4, rtol=0
    )
    edit(tmp_path, lambda t: t.pop("h.1.attn.c_attn.bias"))
    assert "missing: transformer.h.1.attn.c_attn.bias" in refusal(tmp_path)


@pytest.mark.parametrize(
    "config", [LlamaConfig(**LLAMA), GPT2Config(**GPT2)], ids=["llama", "gpt2"]
)
def test_dummy_weights_are_reproducible(config: PretrainedConfig, tmp_path: Path):
    """load_format="dummy" needs no weights; a seed gives the same ones, another seed others."""
    config.architectures = [
        "LlamaForCausalLM" if config.model_type == "llama" else "GPT2LMHeadModel"
    ]
    config.save_pretrained(tmp_path)
    first = load(tmp_path, load_format="dummy", seed=1)
    torch.manual_seed(5)
    assert_same(load(tmp_path, load_format="dummy", seed=1), first)
    other = parameters(load(tmp_path, load_format="dummy", seed=2))
    matrices = {n: p for n, p in parameters(first).items() if p.dim() > 1}
    assert not any(torch.equal(p, other[n]) for n, p in matrices.items())
    assert all(0.015 < p.std() < 0.025 for p in matrices.values())
    logits = our_logits(first, make_prompts())
    assert logits.isfinite().all()
    assert logits.std() > 0.01
