"""Determines how many positions of a model can be served.

Rotary frequencies of type "dynamic" and "longrope" depend on the length of the complete sequence once it exceeds a
length in the configuration. Keys of a cached prefix would then have to change. Up to that length, a key depends only on
its own position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def position_limit(config: Any) -> int:
    """Return the number of positions at which a model's keys depend only on their own position; 0: no limit is
    configured."""
    limits = [getattr(config, "max_position_embeddings", None), stretched_beyond(config)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=0)


def stretched_beyond(config: Any) -> int:
    """Return the sequence length above which all keys depend on the length; 0: they never do."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    lengths = []
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return int(min(lengths, default=0))
