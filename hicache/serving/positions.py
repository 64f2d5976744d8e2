"""Determines how many positions of a model can be served.

Rotary frequencies of type "dynamic" and "longrope" depend on the length of the complete sequence if this length exceeds
a limit in the configuration. Beyond the limit, cached keys would be wrong for a longer sequence. Up to the limit, a key
depends only on its own position, and can be cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def position_limit(config: Any) -> int:
    """Return the number of positions up to which a model's keys depend only on their own position; 0 if the
    configuration has no limit."""
    limits = [getattr(config, "max_position_embeddings", None), stretched_beyond(config)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=0)


def stretched_beyond(config: Any) -> int:
    """Return the sequence length above which all keys depend on this length; 0 if keys never depend on it."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    lengths = []
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return int(min(lengths, default=0))
