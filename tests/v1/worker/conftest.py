"""A tiny random Qwen3 checkpoint and a runner on it."""

from __future__ import annotations

import pytest
import torch

from nanovllm.config import VllmConfig
from nanovllm.v1.kv_cache_interface import KVCacheConfig
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner
from tests.v1.worker.driver import MAX_MODEL_LEN, NUM_BLOCKS, VOCAB_SIZE, Driver, make_config


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory):
    """A random transformers Qwen3, saved to hf_model.path. Large weights, so that logits differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    model.path = str(path)
    return model


@pytest.fixture
def vllm_config(hf_model) -> VllmConfig:
    return make_config(hf_model.path)


@pytest.fixture
def runner(vllm_config) -> GPUModelRunner:
    """Loaded, with a KV cache full of NaN."""
    runner = GPUModelRunner(vllm_config, torch.device("cpu"))
    runner.load_model()
    runner.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, 2, runner.get_kv_cache_spec()))
    for kv_cache in runner.kv_caches:
        kv_cache.fill_(float("nan"))
    return runner


@pytest.fixture
def driver(runner) -> Driver:
    return Driver(runner)


@pytest.fixture
def greedy(hf_model):
    """transformers' own greedy continuation: (prompt, n) -> n tokens."""

    def generate(prompt: list[int], n: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(n):
            with torch.inference_mode():
                tokens.append(int(hf_model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate
