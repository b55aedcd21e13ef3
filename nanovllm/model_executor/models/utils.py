"""What the models share: filling parameters, and refusing what they do not compute.

Upstream: vllm/model_executor/models/utils.py (0.23.0)
Left out: mapping names between module trees, pipeline-parallel placeholders. Upstream's loader
leaves it to each module to match names and checks afterwards; ours knows every name beforehand, so
that each parameter is filled exactly once or one error says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nanovllm.exceptions import VLLMValidationError
from nanovllm.model_executor.model_loader.weight_utils import default_weight_loader

# (part of our parameter's name, the checkpoint's name for a part of it, shard id)
StackedParamsMapping = Sequence[tuple[str, str, "int | str"]]


class AutoWeightsLoader:
    """Fills a model's parameters from (name, tensor) pairs, each exactly once.

    The loader first lists the checkpoint names that the model needs. Each stands for a slot: a
    parameter, or the rows of a merged parameter that one shard fills.

        model.norm.weight                       -> model.norm.weight
        model.layers.0.self_attn.q_proj.weight  -> model.layers.0.self_attn.qkv_proj.weight, "q"

    Args:
        stacked_params_mapping: which parameters are merged out of which checkpoint tensors.
        tied: a second name that checkpoints may give a parameter -> the parameter.
        skip_substrs: tensors with one of these in their names are no parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stacked_params_mapping: StackedParamsMapping = (),
        tied: Mapping[str, str] | None = None,
        skip_substrs: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.stacked_params_mapping = stacked_params_mapping
        self.tied = tied or {}
        self.skip_substrs = skip_substrs

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill everything; `weights` is consumed as it comes, so one tensor at a time is in memory.

        Returns:
            The names of the filled parameters.

        Raises:
            VLLMValidationError: tensors are missing, left over, given twice or of the wrong shape.
        """
        params = dict(self.model.named_parameters())
        slots = self._list_slots(params)
        seen: set[str] = set()
        aliases: dict[str, torch.Tensor] = {}
        left_over: list[str] = []
        twice: list[str] = []
        unfit: list[str] = []

        def fill(name: str, tensor: torch.Tensor) -> None:
            param_name, shard_ids = slots[name]
            param = params[param_name]
            loader: Callable[..., None] = getattr(param, "weight_loader", default_weight_loader)
            try:
                loader(param, tensor, *shard_ids)
            except VLLMValidationError as e:
                unfit.append(f"{name} ({e})")

        for name, tensor in weights:
            if any(part in name for part in self.skip_substrs):
                continue
            if name not in slots and name not in self.tied:
                left_over.append(name)
            elif name in seen:
                twice.append(name)
            elif name in self.tied:
                aliases[name] = tensor
            else:
                fill(name, tensor)
            seen.add(name)

        for alias, tensor in aliases.items():
            name = self.tied[alias]
            if name not in seen:
                # Writers that store shared memory once may keep either name.
                fill(name, tensor)
                seen.add(name)
            elif not _equal(params[name], tensor):
                unfit.append(f"{alias} (differs from {name}, to which config.json ties it)")

        self._raise_unless_empty(
            {
                "missing": [name for name in slots if name not in seen],
                "left over": left_over,
                "given twice": twice,
                "unfit": unfit,
            }
        )
        return set(params)

    def _list_slots(self, params: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, tuple]]:
        """Checkpoint name -> (parameter's name, its weight_loader's further arguments)."""
        slots: dict[str, tuple[str, tuple]] = {}
        for param_name in params:
            shards = [
                (param_name.replace(f".{merged}.", f".{part}."), shard_id)
                for merged, part, shard_id in self.stacked_params_mapping
                if f".{merged}." in param_name
            ]
            for name, shard_id in shards:
                slots[name] = (param_name, (shard_id,))
            if not shards:
                slots[param_name] = (param_name, ())
        return slots

    def _raise_unless_empty(self, problems: Mapping[str, list[str]]) -> None:
        found = [f"{kind}: {_join(names)}" for kind, names in problems.items() if names]
        if found:
            raise VLLMValidationError(
                f"the checkpoint does not fit {type(self.model).__name__}; {'; '.join(found)}.",
                parameter="model",
            )


def _equal(param: torch.Tensor, loaded_weight: torch.Tensor) -> bool:
    """Whether the tensor, rounded to the parameter's dtype, is what the parameter holds."""
    return torch.equal(param, loaded_weight.to(device=param.device, dtype=param.dtype))


def _join(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def verify_supported(hf_config: Any, max_model_len: int) -> None:
    """Refuse a config.json that asks for something which would change the result and which no model
    here computes. Every model calls this first; what only one architecture has, it checks itself.

    Raises:
        VLLMValidationError: naming the setting.
    """
    unsupported = {
        # setting: the values that change nothing
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "logit_scale": (None, 1, 1.0),
        "is_causal": (None, True),
        "dual_chunk_attention_config": (None,),
        "use_mrope": (None, False),
        "quantization_config": (None,),
    }
    for name, harmless in unsupported.items():
        if (value := getattr(hf_config, name, None)) not in harmless:
            raise VLLMValidationError(
                f"config.json sets {name}={value!r}, which is not supported.",
                parameter=name,
                value=value,
            )
    num_heads = hf_config.num_attention_heads
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads:
        raise VLLMValidationError(
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly.",
            parameter="num_key_value_heads",
            value=num_kv_heads,
        )
    _verify_attention_span(hf_config, max_model_len)


def _verify_attention_span(hf_config: Any, max_model_len: int) -> None:
    """Attention here always reaches back to the first token. A sliding window lets a token see
    itself and the window - 1 tokens before it, so a window of max_model_len or more never hides
    anything."""
    layer_types = set(getattr(hf_config, "layer_types", None) or ["sliding_attention"])
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        raise VLLMValidationError(
            f"config.json has layers of type {sorted(unknown)[0]!r}, which is not supported.",
            parameter="layer_types",
            value=sorted(unknown)[0],
        )
    window = getattr(hf_config, "sliding_window", None)
    if not getattr(hf_config, "use_sliding_window", True) or "sliding_attention" not in layer_types:
        window = None
    if window is not None and window < max_model_len:
        raise VLLMValidationError(
            f"the model's sliding_window of {window} tokens is smaller than max_model_len "
            f"{max_model_len} and sliding windows are not supported; set max_model_len to {window} "
            "or less.",
            parameter="sliding_window",
            value=window,
        )
