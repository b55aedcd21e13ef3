"""Where the engine's messages go: standard error, unless the application has set up logging itself.

Modules log through `logging.getLogger(__name__)`; nothing is printed by importing them.

Upstream: vllm/logger.py (0.23.0)
Left out: logging configuration files, one-time and per-process prefixes, function tracing.
"""

from __future__ import annotations

import logging
import os

from nanovllm.exceptions import VLLMValidationError


def configure_logging() -> None:
    """Show the engine's messages from NANOVLLM_LOGGING_LEVEL (default INFO) up.

    Called where an engine is started. Does nothing if the root logger or ours has a handler or ours
    has a level: then the application decides.
    """
    logger = logging.getLogger("nanovllm")
    if logger.handlers or logger.level != logging.NOTSET or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    level = os.environ.get("NANOVLLM_LOGGING_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise VLLMValidationError(
            f"NANOVLLM_LOGGING_LEVEL {level!r} is unknown; choose DEBUG, INFO, WARNING or ERROR.",
            parameter="NANOVLLM_LOGGING_LEVEL",
            value=level,
        )
    logger.setLevel(level)
    logger.propagate = False
