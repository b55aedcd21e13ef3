"""Which class runs which architecture.

To add a model, write one file beside this one and add one line here. The file's class has

    __init__(*, vllm_config, attn_backend)
    forward(input_ids, positions, kv_caches, attn_metadata) -> [num_tokens, hidden_size]
    compute_logits(hidden_states [n, hidden_size]) -> [n, vocab_size]
    load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str], the names of those filled

and `models/llama.py` is the one to start from.

Upstream: vllm/model_executor/models/registry.py (0.23.0)
Left out: registering models from outside, inspecting them in a subprocess, the transformers
fallback.
"""

from __future__ import annotations

import importlib

from torch import nn

from nanovllm.exceptions import VLLMValidationError

# The architecture that config.json names -> (module in this folder, class).
_TEXT_GENERATION_MODELS = {
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}


class ModelRegistry:
    """Looks architectures up. A model's module is imported only when the model is asked for."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        return sorted(_TEXT_GENERATION_MODELS)

    @staticmethod
    def resolve_model_cls(architecture: str) -> type[nn.Module]:
        """The class that runs `architecture`.

        Raises:
            VLLMValidationError: it is not supported.
        """
        if architecture not in _TEXT_GENERATION_MODELS:
            raise VLLMValidationError(
                f"model architecture {architecture!r} is not supported; supported are "
                f"{', '.join(ModelRegistry.get_supported_archs())}.",
                parameter="architectures",
                value=architecture,
            )
        module_name, class_name = _TEXT_GENERATION_MODELS[architecture]
        module = importlib.import_module(f"nanovllm.model_executor.models.{module_name}")
        return getattr(module, class_name)
