"""EngineArgs: what a user may set about the engine, and how it becomes a VllmConfig.

The same names serve `LLM(...)`, `EngineArgs(...)` and, with dashes, the command line.

Upstream: vllm/engine/arg_utils.py (0.23.0)
Left out: arguments of features that are not here; downloading models. `device` is ours: upstream
asks its platform plugin, and one build of it knows one device.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanovllm.config import (
    DTYPES,
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from nanovllm.exceptions import VLLMValidationError

# The model that comes with the package, and what `LLM()` and the command line run by default.
DEFAULT_MODEL = "tiny-stories"
ASSETS = Path(__file__).resolve().parent.parent / "assets"

GIB = 1 << 30


class UsageContext(enum.Enum):
    """Who runs the engine; it decides how large a batch is by default."""

    LLM_CLASS = "LLM_CLASS"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def resolve_model(model: str) -> str:
    """The checkpoint folder that `model` means.

    A folder's path is itself. Otherwise a name is looked up among the models that come with the
    package (nanovllm/assets), then in the cache that scripts/fetch_smollm2.py fills
    ($NANOVLLM_CACHE, by default ~/.cache/nanovllm).

    Raises:
        VLLMValidationError: neither a folder nor a known name.
    """
    # os.path.expanduser leaves "~" alone where there is no home; Path.expanduser raises.
    cache = Path(os.path.expanduser(os.environ.get("NANOVLLM_CACHE") or "~/.cache/nanovllm"))
    for folder in (Path(os.path.expanduser(model)), ASSETS / model, cache / model):
        if model and os.path.isdir(folder):  # (Path.is_dir raises on a name that is too long)
            return str(folder)
    raise VLLMValidationError(
        f"model {model!r} is neither a folder nor a known name ({DEFAULT_MODEL!r} comes with the "
        "package); give the path of a checkpoint (config.json, *.safetensors, tokenizer.json).",
        parameter="model",
        value=model,
    )


def get_batch_defaults(device: str, usage_context: UsageContext) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) when the user sets neither.

    Source: EngineArgs.get_batch_defaults. Offline, throughput counts: large steps. A server's users
    wait for the next token while a large step runs: smaller ones.
    """
    if usage_context is UsageContext.ENGINE_CONTEXT:
        return SchedulerConfig.max_num_batched_tokens, SchedulerConfig.max_num_seqs
    offline = usage_context is UsageContext.LLM_CLASS
    if not device.startswith("cuda"):
        return (4096, 256) if offline else (2048, 128)

    import torch

    try:
        properties = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):  # there is none: the worker says so in a sentence
        return SchedulerConfig.max_num_batched_tokens, SchedulerConfig.max_num_seqs
    if properties.total_memory >= 70 * GIB and "a100" not in properties.name.lower():
        return (16384, 1024) if offline else (8192, 1024)
    return (8192, 256) if offline else (2048, 256)


def _arg(default: Any, help: str, **argparse_kwargs: Any) -> Any:
    """A field with what the command line needs to know about it."""
    return field(default=default, metadata={"help": help, **argparse_kwargs})


@dataclass
class EngineArgs:
    """Arguments of the engine, with vLLM's names and defaults (but for `model`).

    Raises (when made):
        VLLMValidationError: a value is of the wrong type.
    """

    model: str = _arg(
        DEFAULT_MODEL, "checkpoint folder, or name of a model in the package or the cache"
    )
    tokenizer: str | None = _arg(None, "tokenizer folder (default: the model's)", type=str)
    served_model_name: str | None = _arg(
        None, "the model's name in messages (default: what --model says)", type=str
    )
    skip_tokenizer_init: bool = _arg(False, "load no tokenizer: token ids in, token ids out")
    device: str = _arg("auto", "cpu, cuda or cuda:N; auto takes cuda if there is one")
    dtype: str = _arg("auto", "dtype of weights and activations", choices=DTYPES)
    load_format: str = _arg(
        "auto", "dummy: random numbers for weights", choices=("auto", "safetensors", "dummy")
    )
    quantization: str | None = _arg(None, "quantization method", type=str)
    seed: int = _arg(0, "seed of random sampling and of dummy weights")
    max_model_len: int | None = _arg(
        None, "prompt and output tokens of a request at most (default: the model's)", type=int
    )
    max_num_batched_tokens: int | None = _arg(
        None, "tokens computed in one step at most (default: by device and use)", type=int
    )
    max_num_seqs: int | None = _arg(
        None, "requests running at once at most (default: by device and use)", type=int
    )
    block_size: int | None = _arg(None, "tokens of a KV-cache block (default: 16)", type=int)
    gpu_memory_utilization: float = _arg(
        CacheConfig.gpu_memory_utilization, "share of the GPU's memory to use"
    )
    kv_cache_memory_bytes: int | None = _arg(
        None, "size of the KV cache in bytes (default: by free memory)", type=int
    )
    num_gpu_blocks_override: int | None = _arg(
        None, "number of KV-cache blocks, the null block included", type=int
    )
    enable_prefix_caching: bool | None = _arg(
        None, "reuse the KV cache of equal prompt beginnings (default: on)", type=bool
    )
    prefix_cache_backend: str = _arg(
        "hash",
        "find equal beginnings by vLLM's hash chains or SGLang's radix tree",
        choices=("hash", "radix"),
    )
    enable_chunked_prefill: bool | None = _arg(
        None, "compute long prompts over several steps (default: on)", type=bool
    )
    long_prefill_token_threshold: int = _arg(
        0, "tokens of one prompt computed in one step at most; 0: no limit"
    )
    scheduling_policy: str = _arg(
        "fcfs", "who runs first: first come, or lowest priority value", choices=("fcfs", "priority")
    )
    scheduler_reserve_full_isl: bool = _arg(
        True, "admit a request only if all its known tokens fit in the free blocks"
    )
    async_scheduling: bool | None = _arg(
        None, "schedule a step before the last one has ended (default: on a GPU)", type=bool
    )
    enforce_eager: bool = _arg(False, "no CUDA graphs")
    max_cudagraph_capture_size: int | None = _arg(
        None,
        "largest batch that a CUDA graph is recorded for (default: by --max-num-seqs)",
        type=int,
    )
    attention_backend: str | None = _arg(None, "attention backend (default: by device)", type=str)
    max_logprobs: int = _arg(
        ModelConfig.max_logprobs, "logprobs a request may ask for at most; -1: no limit"
    )
    generation_config: str = _arg(
        "auto",
        "sampling defaults from: auto (the model's generation_config.json), vllm (none), a folder",
    )
    override_generation_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "sampling defaults that go before the model's", "type": json.loads},
    )
    disable_log_stats: bool = _arg(False, "keep no request metrics")

    def __post_init__(self) -> None:
        self.model = os.fspath(self.model)
        for f in fields(self):
            value, kind = getattr(self, f.name), f.metadata.get("type", type(f.default))
            kind = dict if kind is json.loads else kind
            if value is None and f.default is None:
                continue
            accepted = (int, float) if kind is float else (kind,)
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise VLLMValidationError(
                    f"{f.name} must be of type {kind.__name__}, got {value!r}.",
                    parameter=f.name,
                    value=value,
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """EngineArgs from names that a user typed.

        Raises:
            VLLMValidationError: one of them is no argument; the nearest that is one is named.
        """
        names = [f.name for f in fields(cls)]
        for name, value in kwargs.items():
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
                raise VLLMValidationError(
                    f"engine argument {name!r} is unknown; {hint}", parameter=name, value=value
                )
        return cls(**kwargs)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """Add a flag for every field. Flags not given leave no trace in the namespace."""
        for f in fields(EngineArgs):
            kwargs = dict(f.metadata)
            kind = kwargs.pop("type", type(f.default))
            flag = "--" + f.name.replace("_", "-")
            plain = isinstance(f.default, (str, int, float)) and kind is not bool
            if plain and "(default:" not in kwargs["help"]:
                kwargs["help"] += f" (default: {f.default})"
            kwargs["help"] = kwargs["help"].replace("%", "%%")
            kwargs |= {"dest": f.name, "default": argparse.SUPPRESS}
            if kind is bool and f.default is False:
                parser.add_argument(flag, action="store_true", **kwargs)
            elif kind is bool:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, **kwargs)
            else:
                if "choices" not in kwargs:
                    kwargs["metavar"] = {int: "N", float: "X", json.loads: "JSON"}.get(kind, "NAME")
                parser.add_argument(flag, type=kind, **kwargs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """EngineArgs from a namespace that `add_cli_args` had filled."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> VllmConfig:
        """Check the arguments and fill in the defaults that depend on device, model and use.

        Raises:
            VLLMValidationError: an argument, or a combination of them, cannot be used.
        """
        device_config = DeviceConfig(device=self.device)
        model_config = ModelConfig(
            model=resolve_model(self.model),
            tokenizer=None if self.tokenizer is None else resolve_model(self.tokenizer),
            dtype=self.dtype,
            seed=self.seed,
            max_model_len=self.max_model_len,
            quantization=self.quantization,
            enforce_eager=self.enforce_eager,
            max_logprobs=self.max_logprobs,
            skip_tokenizer_init=self.skip_tokenizer_init,
            served_model_name=self.served_model_name or self.model,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config,
            device_type=device_config.device_type,
        )
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=CacheConfig.block_size if self.block_size is None else self.block_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
                enable_prefix_caching=self.enable_prefix_caching is not False,
                prefix_cache_backend=self.prefix_cache_backend,  # type: ignore[arg-type]
            ),
            scheduler_config=self._create_scheduler_config(
                model_config, device_config.device, usage_context
            ),
            device_config=device_config,
            load_config=LoadConfig(load_format=self.load_format),
            attention_backend=self.attention_backend,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
        )

    def _create_scheduler_config(
        self, model_config: ModelConfig, device: str, usage_context: UsageContext
    ) -> SchedulerConfig:
        """Fill in the batch limits that were left open, so that they fit each other.

        Source: EngineArgs._set_default_max_num_seqs_and_batched_tokens_args.
        """
        assert model_config.max_model_len is not None  # ModelConfig derives it
        chunked = self.enable_chunked_prefill is not False
        default_tokens, default_seqs = get_batch_defaults(device, usage_context)

        max_num_seqs = default_seqs if self.max_num_seqs is None else self.max_num_seqs
        max_num_batched_tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is None:
            # Without chunks the longest prompt has to fit in one step; all requests together never
            # have more than max_num_seqs * max_model_len tokens.
            max_num_batched_tokens = (
                default_tokens if chunked else max(default_tokens, model_config.max_model_len)
            )
            max_num_batched_tokens = min(
                max_num_batched_tokens, max(max_num_seqs, 1) * model_config.max_model_len
            )
        if self.max_num_seqs is None:
            max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        return SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=model_config.max_model_len,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,  # type: ignore[arg-type]  # SchedulerConfig checks it
            async_scheduling=(
                device.startswith("cuda")
                if self.async_scheduling is None
                else self.async_scheduling
            ),
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
        )
