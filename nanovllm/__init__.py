"""nanovllm: vLLM V1's engine, small enough to read, for one process and one thread.

`import nanovllm` stays under 0.3 s: nothing is imported until its name is first used.

Upstream: vllm/__init__.py (0.23.0)
Left out: pooling, beam-search and asynchronous names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.arg_utils import EngineArgs
    from nanovllm.entrypoints.llm import LLM
    from nanovllm.exceptions import VLLMValidationError
    from nanovllm.inputs import PromptType, TextPrompt, TokensPrompt
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.sampling_params import RequestOutputKind, SamplingParams
    from nanovllm.v1.engine.llm_engine import LLMEngine

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULE_OF = {
    "LLM": "nanovllm.entrypoints.llm",
    "LLMEngine": "nanovllm.v1.engine.llm_engine",
    "EngineArgs": "nanovllm.engine.arg_utils",
    "SamplingParams": "nanovllm.sampling_params",
    "RequestOutputKind": "nanovllm.sampling_params",
    "RequestOutput": "nanovllm.outputs",
    "CompletionOutput": "nanovllm.outputs",
    "PromptType": "nanovllm.inputs",
    "TextPrompt": "nanovllm.inputs",
    "TokensPrompt": "nanovllm.inputs",
    "VLLMValidationError": "nanovllm.exceptions",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "VLLMValidationError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
