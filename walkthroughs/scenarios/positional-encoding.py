"""A token's place, added to its vector (from a formula, or learned) or turned into it.

Two tiny random models stand for the two kinds, a GPT-2 and a Llama; the tests make them likewise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig
from transformers.utils import logging

from nanovllm import LLM, SamplingParams
from nanovllm.config import ModelConfig
from nanovllm.exceptions import VLLMValidationError
from nanovllm.inputs import TokensPrompt
from nanovllm.lab import positions as lab
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
from dense_backend import load, save_random_checkpoint  # the tests' helper

NUM_TOKENS, SHIFT, DISTANCE = 30, 20, 3
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, intermediate_size=48),
}


def make_model(config: PretrainedConfig) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        save_random_checkpoint(Path(folder), config)
        return load(Path(folder))


logging.disable_progress_bar()
models = {name: make_model(config) for name, config in CONFIGS.items()}
llm = LLM(device="cpu", dtype="float32", enforce_eager=True, num_gpu_blocks_override=65)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[d], [n, d], [n, d] -> [d]"""
    return (keys @ query).softmax(dim=0) @ values


def order_of_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over five tokens, and over the same tokens in another order."""
    query, keys, values = random(8), random(5, 8), random(5, 4)
    other = torch.tensor([3, 1, 4, 0, 2])
    return attend(query, keys, values), attend(query, keys[other], values[other])


def score_at(start: int) -> tuple[float, float, float]:
    """One query and one key, DISTANCE apart, the key at `start`: the product of their positions'
    vectors, the score when those are added, the score when both are turned instead."""
    query, key = random(2, 16)
    table = lab.sinusoidal_embedding(128, 16).double()
    at_query, at_key = table[start + DISTANCE], table[start]
    rope = RotaryEmbedding(16, 128, base=10000.0)
    both = torch.stack((query, key))
    turned, _ = rope(torch.tensor([start + DISTANCE, start]), both, both)
    return (
        (at_query @ at_key).item(),
        ((query + at_query) @ (key + at_key)).item(),
        (turned[0] @ turned[1]).item(),
    )


def gap(model: torch.nn.Module) -> float:
    """How far a prompt's logits move when its first token stands at SHIFT and not at 0."""
    prompt = torch.arange(NUM_TOKENS)
    with torch.inference_mode():
        here, there = (
            model.compute_logits(model(prompt, prompt + first, [torch.empty(0)] * 2, [NUM_TOKENS]))
            for first in (0, SHIFT)
        )
    return (here - there).abs().max().item()


def longest(config: PretrainedConfig, wanted: int) -> str:
    try:
        ModelConfig("", hf_config=config, max_model_len=wanted)
    except VLLMValidationError as e:
        return str(e)
    return f"{wanted} positions are admitted"


def main() -> None:
    one_order, another_order = order_of_keys()
    print("another order of keys changes", (one_order - another_order).abs().max().item())

    for start in (0, 10, 100):
        print(f"key at {start}: product, added, turned", score_at(start))
    gpt2_gap = gap(models["gpt2"])
    print(longest(CONFIGS["gpt2"], 65))

    by_hand = RotaryEmbedding(4, 128, base=10000.0)
    ones = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).repeat(4, 1)
    places = torch.tensor([0, 1, 10, 100])
    turned, _ = by_hand(places, ones, ones)
    by_euler = lab.rotate_by_complex(ones[:, None], places, by_hand._compute_inv_freq())
    print("Euler's form differs by", (turned - by_euler[:, 0]).abs().max().item())

    llama_gap = gap(models["llama"])
    print(f"logits move by {gpt2_gap} (GPT-2), {llama_gap} (Llama)")
    prompt = TokensPrompt(prompt_token_ids=[435, 430, 260, 380])
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)

    ropes = lab.encodings()
    plain = ropes["theta 10,000"]._compute_inv_freq()
    for name, rope in ropes.items():
        divided = plain / rope._compute_inv_freq()
        _, means = lab.mean_by_octave(lab.score_by_distance(rope))
        print(f"{name:16} {divided[0]:.2f} {divided[-1]:.2f} {means[6]:.3f}")


if __name__ == "__main__":
    main()
