"""Writes hicache's log records to vLLM's log. vLLM configures only the logger `vllm`, so INFO records of other loggers
would not be shown.
"""

from __future__ import annotations

import logging


class _VllmHandler(logging.Handler):
    """Passes a record to the logger `vllm`. The handlers and the level that this logger has at that time apply."""

    def emit(self, record: logging.LogRecord) -> None:
        server = logging.getLogger("vllm")
        if server.isEnabledFor(record.levelno):
            server.handle(record)


def log_through_vllm() -> None:
    """Log with vLLM's handlers and level, unless the operator has added a handler to hicache's logger. Idempotent."""
    own = logging.getLogger("hicache")
    if not own.handlers:
        own.addHandler(_VllmHandler())
        own.setLevel(logging.getLogger("vllm").level or logging.INFO)
        own.propagate = False
