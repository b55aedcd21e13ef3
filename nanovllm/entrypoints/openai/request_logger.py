"""What the server's log says about a request: by default its unknown fields, never its prompt.

Upstream: vllm/entrypoints/serve/utils/request_logger.py (0.23.0), and OpenAIBaseModel for the
unknown fields, which are logged there at every request, at DEBUG.
"""

from __future__ import annotations

import logging

from nanovllm.entrypoints.openai.protocol import OpenAIBaseModel
from nanovllm.inputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Names are the client's to choose: so many are remembered, of such a length.
MAX_UNKNOWN_FIELDS = 100
MAX_FIELD_LEN = 64


class RequestLogger:
    """Remembers which unknown fields it has named already."""

    def __init__(self, enable_log_requests: bool) -> None:
        self.enable_log_requests = enable_log_requests
        self._unknown_fields: set[str] = set()

    def log_unknown_fields(self, request: OpenAIBaseModel) -> None:
        """Name, once, the fields of a request that are ignored."""
        for field in request.model_extra or ():
            name = field[:MAX_FIELD_LEN]
            if name in self._unknown_fields or len(self._unknown_fields) >= MAX_UNKNOWN_FIELDS:
                continue
            self._unknown_fields.add(name)
            logger.warning(
                "%s: the field %r is unknown and ignored (said once).", type(request).__name__, name
            )

    def log_inputs(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> None:
        """The request as the engine gets it, with --enable-log-requests."""
        if self.enable_log_requests:
            logger.info(
                "Received request %s: prompt: %r, params: %s, prompt_token_ids: %s.",
                request_id,
                prompt.get("prompt"),
                params,
                prompt["prompt_token_ids"],
            )
