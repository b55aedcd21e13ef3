"""Processors that keep state per batch row: min-tokens, logit bias, min-p.

Upstream: vllm/v1/sample/logits_processor/__init__.py (0.23.0)
Left out: custom processors (plugins, AdapterLogitsProcessor), pooling, speculation.
"""

from __future__ import annotations

import torch

from nanovllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    process_dict_updates,
)
from nanovllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from nanovllm.v1.sample.logits_processor.state import BatchUpdateBuilder, LogitsProcessors


def build_logitsprocs(max_num_reqs: int, device: torch.device) -> LogitsProcessors:
    """The built-in processors for a batch of at most `max_num_reqs` rows, logits on `device`."""
    return LogitsProcessors(
        [
            MinTokensLogitsProcessor(device),
            LogitBiasLogitsProcessor(device),
            MinPLogitsProcessor(max_num_reqs, device),
        ]
    )


__all__ = [
    "BatchUpdate",
    "BatchUpdateBuilder",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "LogitsProcessors",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "MoveDirectionality",
    "build_logitsprocs",
    "process_dict_updates",
]
