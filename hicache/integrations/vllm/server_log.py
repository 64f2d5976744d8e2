"""Log lines of hicache in the log of vLLM. vLLM configures the logger `vllm` alone: no INFO line of another logger is
shown.
"""

from __future__ import annotations

import logging


class _VllmHandler(logging.Handler):
    """Passes a record to the logger `vllm` as vLLM has configured it at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        server = logging.getLogger("vllm")
        if server.isEnabledFor(record.levelno):
            server.handle(record)


def log_through_vllm() -> None:
    """Log with vLLM's handlers and level, unless the operator has given hicache's logger a handler. Idempotent."""
    own = logging.getLogger("hicache")
    if not own.handlers:
        own.addHandler(_VllmHandler())
        own.setLevel(logging.getLogger("vllm").level or logging.INFO)
        own.propagate = False
