"""Reading tensors from a checkpoint folder and copying them into parameters.

Upstream: vllm/model_executor/model_loader/weight_utils.py (0.23.0)
Left out: downloading, *.bin and GGUF files, prefetching and streaming loaders.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from nanovllm.exceptions import VLLMValidationError

SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a checkpoint tensor into a parameter (or a slice of one), converting dtype and device.

    Raises:
        VLLMValidationError: the shapes differ, or the tensor does not hold floating-point numbers.
    """
    # copy_ alone would broadcast a smaller tensor and read integers as weights.
    if param.shape != loaded_weight.shape:
        raise VLLMValidationError(
            f"shape {list(loaded_weight.shape)} where {list(param.shape)} is needed"
        )
    if not loaded_weight.is_floating_point():
        raise VLLMValidationError(f"dtype {loaded_weight.dtype} where floating point is needed")
    param.data.copy_(loaded_weight)


def get_safetensors_files(folder: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    With an index: those that it names, so that other copies in the folder are not read as well.
    Without: model.safetensors, or else every *.safetensors file.

    Raises:
        VLLMValidationError: there are none, or the index cannot be read or names a file that is
            absent.
    """
    folder = Path(folder)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        return _files_in_index(index)
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".gguf"))
        hint = f" ({other[0]} is not read: convert it to safetensors)" if other else ""
        raise VLLMValidationError(
            f"model folder {str(folder)!r} has no *.safetensors file{hint}.",
            parameter="model",
            value=str(folder),
        )
    return files


def _files_in_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [index.parent / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise VLLMValidationError(
            f"{str(index)!r} is not a valid index: it must be JSON with a weight_map from tensor "
            "names to file names.",
            parameter="model",
            value=str(index),
        ) from e
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise VLLMValidationError(
                f"{str(index)!r} names the file {file.name!r}, which is not in its folder.",
                parameter="model",
                value=str(file),
            )
    return files


def safetensors_weights_iterator(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor, one at a time, on the CPU. Files are memory-mapped, so a
    tensor that has been copied costs no memory of its own.

    Raises:
        VLLMValidationError: a file is truncated or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as f:
                for name in f.keys():  # noqa: SIM118 (not a dict)
                    yield name, f.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise VLLMValidationError(
                f"{str(file)!r} cannot be read as safetensors ({e}); it may be truncated, so fetch "
                "it again.",
                parameter="model",
                value=str(file),
            ) from e


def initialize_dummy_weights(model: nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """Fill a model with random weights, for benchmarks and tests that need no particular ones.

    Matrices are normal with standard deviation `std`, norms are 1 and biases 0, so that activations
    stay in range through many layers (upstream draws everything uniformly from +-0.001). A
    parameter's values depend on the seed, its name and the kind of device only.
    """
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.data.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        generator = torch.Generator(device=param.device)
        # One number of 32 bits, because the CPU's generator looks at no more of it.
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.empty(param.shape, dtype=torch.float32, device=param.device)
        param.data.copy_(noise.normal_(std=std, generator=generator))
