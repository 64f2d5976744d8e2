"""Small frozen values that units beside each other exchange, so that neither has to know the other.

May import config, metrics and errors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvictParams:
    """How much a tree is asked to give up: tokens, tokens of window state, and recurrent states."""

    num_tokens: int
    swa_num_tokens: int = 0
    mamba_num: int = 0


@dataclass(frozen=True)
class EvictResult:
    """How much it gave up."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0
