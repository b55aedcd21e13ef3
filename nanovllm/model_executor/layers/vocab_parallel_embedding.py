"""The token embedding and the output head, the model's two tables with a row a token.

Upstream: vllm/model_executor/layers/vocab_parallel_embedding.py (0.23.0), where ranks split the
rows.
Left out: tensor parallelism, padding of the vocabulary, rows added by LoRA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class VocabParallelEmbedding(nn.Module):
    """Token id -> vector. The weight is [num_embeddings, embedding_dim]."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, embedding_dim]"""
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    """Vector -> a score for every token; applied by LogitsProcessor.

    A model with tied embeddings has none of its own: it hands its VocabParallelEmbedding to the
    LogitsProcessor instead.
    """

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "ParallelLMHead is not a lookup; LogitsProcessor multiplies by its weight."
        )
