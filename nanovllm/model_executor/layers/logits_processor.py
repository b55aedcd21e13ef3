"""The last multiplication: hidden states to logits.

Not to be confused with nanovllm/v1/sample/logits_processor, which edits logits on request.

Upstream: vllm/model_executor/layers/logits_processor.py (0.23.0)
Left out: gathering the ranks' slices, scaling and soft-capping (models that need them are refused).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.model_executor.layers.skinny_linear import skinny_linear
from nanovllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class LogitsProcessor(nn.Module):
    """Scores of all tokens. Rows are only those to be sampled: the vocabulary is the widest
    dimension of the model, so nothing else of it is computed."""

    def forward(self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], in the model's dtype."""
        # The one weight so large that cuBLAS is as good, but for a single row.
        if hidden_states.shape[0] == 1:
            return skinny_linear(hidden_states, lm_head.weight)
        return F.linear(hidden_states, lm_head.weight)
