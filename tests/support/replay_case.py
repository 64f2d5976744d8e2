"""Traces for tests of the replay, and where the real ones are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hicache.replay.trace import Trace, TraceRequest
from hicache.tree.key import Tokens

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces"
CONVERSATION = SHARED / "mooncake_conversation.jsonl"
SESSIONS = SHARED / "agent_sessions.jsonl.gz"


def trace_of(*prompts: list[int] | Tokens, block_tokens: int = 4) -> Trace:
    """A request a second, all blocks whole."""
    requests = [
        TraceRequest(float(at), np.array(ids, np.int64), len(ids) * block_tokens, 1) for at, ids in enumerate(prompts)
    ]
    return Trace("generated", block_tokens, tuple(requests))
