"""Every setting of the engine, gathered in VllmConfig.

Each class here holds what one part of the engine needs to know; `EngineArgs.create_engine_config`
fills them from the user's arguments. Nothing here imports torch at module level: the scheduler
reads SchedulerConfig and CacheConfig and must stay importable without it.

Upstream: vllm/config/ (0.23.0), a package there, merged into one file.
Left out: LoRA, multimodal, speculative, compilation, observability and KV-transfer configs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ROPE_POSITIVE_NUMBERS = {
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
}
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


@dataclass
class ModelConfig:
    """Which model, in which dtype, and what its own files say about it.

    `model` is a local checkpoint folder. `hf_config`, `max_model_len` and `torch_dtype` are derived
    in __post_init__ when not given.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    quantization: str | None = None
    enforce_eager: bool = False
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    # "auto": read generation_config.json of the model; "vllm": ignore it.
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    hf_config: PretrainedConfig = field(default=None)  # type: ignore[assignment]
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise VLLMValidationError(
                f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.",
                parameter="dtype",
                value=self.dtype,
            )
        if self.quantization is not None:
            raise VLLMValidationError(
                f"quantization {self.quantization!r} is not supported; leave it unset.",
                parameter="quantization",
                value=self.quantization,
            )
        if self.hf_config is None:
            self.hf_config = load_hf_config(self.model)
        if self.tokenizer is None:
            self.tokenizer = self.model
        derived = self._derive_max_model_len()
        if self.max_model_len is None:
            self.max_model_len = derived
        elif self.max_model_len < 1 or self.max_model_len > derived:
            raise VLLMValidationError(
                f"max_model_len {self.max_model_len} must lie between 1 and {derived}, the number "
                "of positions that the model's config.json allows.",
                parameter="max_model_len",
                value=self.max_model_len,
            )

    def _derive_max_model_len(self) -> int:
        """Positions the model can serve: those it was trained for, times the factor of a stretched
        RoPE. `llama3` checkpoints state the stretched length already.

        Source: vllm/config/model.py, _get_and_verify_max_len. Left out: the limit in the
        tokenizer's own configuration.
        """
        length = getattr(self.hf_config, "max_position_embeddings", None) or 2048
        rope = get_rope_parameters(self.hf_config)
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
        if rope["rope_type"] in ("linear", "yarn"):
            length *= rope.get("factor", 1.0)
        return int(length)

    @property
    def architecture(self) -> str:
        """The class named in config.json, e.g. "Qwen3ForCausalLM"."""
        architectures = getattr(self.hf_config, "architectures", None) or []
        if not architectures:
            raise VLLMValidationError(
                f"config.json of {self.model!r} names no architecture.", parameter="model"
            )
        return architectures[0]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` resolved. "auto": the checkpoint's own; float32 ones run in bfloat16 on a GPU
        (as upstream) and in float32 on a CPU."""
        import torch

        names = {"half": "float16", "float": "float32"}
        if self.dtype != "auto":
            return getattr(torch, names.get(self.dtype, self.dtype))
        config_dtype = getattr(self.hf_config, "dtype", None)
        if isinstance(config_dtype, str):
            config_dtype = getattr(torch, config_dtype.removeprefix("torch."))
        if config_dtype is None or config_dtype == torch.float32:
            return torch.float32 if self.device_type == "cpu" else torch.bfloat16
        return config_dtype

    def get_vocab_size(self) -> int:
        return int(self.hf_config.vocab_size)

    def get_hidden_size(self) -> int:
        return int(self.hf_config.hidden_size)

    def get_num_layers(self) -> int:
        return int(self.hf_config.num_hidden_layers)

    def get_num_attention_heads(self) -> int:
        return int(self.hf_config.num_attention_heads)

    def get_num_kv_heads(self) -> int:
        heads = getattr(self.hf_config, "num_key_value_heads", None)
        return int(heads if heads is not None else self.get_num_attention_heads())

    def get_head_size(self) -> int:
        head_dim = getattr(self.hf_config, "head_dim", None)
        return int(head_dim or self.get_hidden_size() // self.get_num_attention_heads())

    def try_get_generation_config(self) -> dict[str, Any]:
        """generation_config.json as a dict; empty when absent or when generation_config="vllm"."""
        if self.generation_config == "vllm":
            return {}
        folder = self.model if self.generation_config == "auto" else self.generation_config
        path = Path(folder) / "generation_config.json"
        if not path.is_file():
            if self.generation_config == "auto":
                return {}
            raise VLLMValidationError(
                f"generation_config {folder!r} must be auto, vllm or a folder with a "
                "generation_config.json.",
                parameter="generation_config",
                value=folder,
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise VLLMValidationError(
                f"{str(path)!r} is not JSON: {e}.", parameter="generation_config", value=str(path)
            ) from e
        if not isinstance(fields, dict):
            raise VLLMValidationError(
                f"{str(path)!r} must hold a JSON object.",
                parameter="generation_config",
                value=str(path),
            )
        return fields

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The sampling defaults that generation_config.json changes, under SamplingParams' names.

        Source: vllm/config/model.py, ModelConfig.get_diff_sampling_param.
        """
        config = self.try_get_generation_config() | self.override_generation_config
        names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
        params = {name: config[name] for name in names if config.get(name) is not None}
        if "max_new_tokens" in params:
            params["max_tokens"] = params.pop("max_new_tokens")
        return params


def load_hf_config(model: str) -> PretrainedConfig:
    """Read config.json of a local checkpoint folder.

    Raises:
        VLLMValidationError: the folder or its config.json does not exist or cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise VLLMValidationError(
            f"model {model!r} is not a folder; give the path of a local checkpoint "
            "(config.json, *.safetensors, tokenizer.json).",
            parameter="model",
            value=model,
        )
    if not (folder / "config.json").is_file():
        raise VLLMValidationError(
            f"model folder {model!r} has no config.json.", parameter="model", value=model
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as e:
        # transformers' messages run over several lines and end with advice on upgrading it.
        reason = " ".join(str(e).split("\n\n")[0].split())
        raise VLLMValidationError(
            f"config.json of {model!r} cannot be used: {reason}", parameter="model", value=model
        ) from e


def get_rope_parameters(hf_config: PretrainedConfig) -> dict[str, Any]:
    """RoPE's parameters in one form: a flat dict without empty values, with at least `rope_type`
    and `rope_theta`, and with `original_max_position_embeddings` for the types that need it.

    transformers 5 gathers them under `rope_parameters`; older configs have `rope_theta` beside a
    `rope_scaling` dict, whose `rope_type` was once called `type`.

    Raises:
        VLLMValidationError: a value is not a positive number.
    """
    new, old = (getattr(hf_config, name, None) for name in ("rope_parameters", "rope_scaling"))
    rope = {name: value for name, value in (new or old or {}).items() if value is not None}
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    rope.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10000.0)
    if rope["rope_type"] in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        rope.setdefault(original, hf_config.max_position_embeddings)
        # Some configs state it beside the dict instead; there it wins, as in transformers.
        rope[original] = getattr(hf_config, original, None) or rope[original]
    for name in ROPE_POSITIVE_NUMBERS & rope.keys():
        value = rope[name]
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise VLLMValidationError(
                f"RoPE's {name} must be a positive number, but config.json says {value!r}.",
                parameter=name,
                value=value,
            )
    return rope


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16  # tokens
    # GPU: the share of the card's memory that weights, activations and KV cache may take together.
    gpu_memory_utilization: float = 0.92
    # The KV cache's size in bytes; overrides gpu_memory_utilization and the CPU's default share.
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    # How shared prefixes are found: vLLM's hash chains or SGLang's radix tree.
    prefix_cache_backend: Literal["hash", "radix"] = "hash"
    # Set once the size is known; counts the null block.
    num_gpu_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise VLLMValidationError(
                f"block_size must be at least 1 token, got {self.block_size}.",
                parameter="block_size",
                value=self.block_size,
            )
        if self.prefix_cache_backend not in ("hash", "radix"):
            raise VLLMValidationError(
                f"prefix_cache_backend {self.prefix_cache_backend!r} is unknown; "
                "choose hash or radix.",
                parameter="prefix_cache_backend",
                value=self.prefix_cache_backend,
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise VLLMValidationError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization}.",
                parameter="gpu_memory_utilization",
                value=self.gpu_memory_utilization,
            )


@dataclass
class SchedulerConfig:
    """Limits and policy of one scheduling step."""

    max_num_batched_tokens: int = 2048  # tokens computed in one step
    max_num_seqs: int = 128  # requests resident at once
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    # A prompt chunk is at most this long; 0 means no limit.
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    # Admit a request only if all its known tokens (prompt, and outputs if it was preempted) fit in
    # the free blocks, not just its first chunk. Nothing is set aside: others may use them up first.
    scheduler_reserve_full_isl: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise VLLMValidationError(
                    f"{name} must be at least 1, got {getattr(self, name)}.",
                    parameter=name,
                    value=getattr(self, name),
                )
        if self.policy not in ("fcfs", "priority"):
            raise VLLMValidationError(
                f"policy {self.policy!r} is unknown; choose fcfs or priority.",
                parameter="policy",
                value=self.policy,
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise VLLMValidationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than "
                f"max_model_len ({self.max_model_len}) while chunked prefill is off, so long "
                "prompts could never be scheduled; raise it, lower max_model_len or turn chunked "
                "prefill on.",
                parameter="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise VLLMValidationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}).",
                parameter="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )


@dataclass
class DeviceConfig:
    """Where the model runs. "auto" picks cuda where torch sees it, else cpu."""

    device: str = "auto"

    def __post_init__(self) -> None:
        if self.device == "auto":
            import torch

            self.device = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]


@dataclass
class LoadConfig:
    """How weights are filled: "auto" reads *.safetensors, "dummy" draws seeded random values."""

    load_format: str = "auto"

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise VLLMValidationError(
                f"load_format {self.load_format!r} is unknown; choose auto, safetensors or dummy.",
                parameter="load_format",
                value=self.load_format,
            )


@dataclass
class VllmConfig:
    """All of it, passed to the parts of the engine by argument."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    # None: selector.py chooses.
    attention_backend: str | None = None
    # The largest batch that a CUDA graph is recorded for; None: get_cudagraph_capture_sizes.
    max_cudagraph_capture_size: int | None = None

    def __post_init__(self) -> None:
        size = self.max_cudagraph_capture_size
        if size is not None and size < 1:
            raise VLLMValidationError(
                f"max_cudagraph_capture_size must be at least 1, got {size}; enforce_eager turns "
                "the graphs off.",
                parameter="max_cudagraph_capture_size",
                value=size,
            )
