"""/v1/models: the one model there is.

Upstream: vllm/entrypoints/openai/models/serving.py (0.23.0)
Left out: several names of one model, LoRA adapters, permissions.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nanovllm.entrypoints.openai.protocol import ModelCard, ModelList
from nanovllm.exceptions import VLLMNotFoundError

if TYPE_CHECKING:
    from nanovllm.config import ModelConfig


class OpenAIServingModels:
    """Knows the model's card."""

    def __init__(self, model_config: ModelConfig) -> None:
        assert model_config.served_model_name is not None
        self.card = ModelCard(
            id=model_config.served_model_name,
            created=int(time.time()),
            root=model_config.model,
            max_model_len=model_config.max_model_len,
        )

    def show_available_models(self) -> ModelList:
        return ModelList(data=[self.card])

    def show_model(self, model: str) -> ModelCard:
        """Its card.

        Raises:
            VLLMNotFoundError: it is another model.
        """
        if model != self.card.id:
            raise VLLMNotFoundError(
                f"The model `{model}` does not exist; this server has `{self.card.id}`."
            )
        return self.card
