"""Forgetting what memory holds of prompts: for measurements that begin cold, and when weights have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hicache.errors import InvalidArgument
from hicache.flow.context import EngineContext
from hicache.tree.base import Released

MemoryTier = Literal["device", "host"]
_TIERS = ("device", "host")


def reset(context: EngineContext, names: Sequence[MemoryTier]) -> bool:
    """Drop what nobody uses from these tiers, saved elsewhere or not. Returns whether nothing is left there."""
    for name in names:
        if name not in _TIERS:
            raise InvalidArgument(f"tier={name!r}: choose one of {', '.join(_TIERS)}")
    tree, left = context.tree, 0
    for component in context.components:
        if "device" in names:
            released: list[Released] = []
            try:
                while (node := tree.victim(component.name)) is not None:
                    released += tree.drop(node, component.name)
            finally:
                context.free(released)
        if "host" in names and component.has_host:
            component.index.clear()
            left += len(component.index) + component.index.num_in_flight
    if "device" in names:
        left += sum(tree.protected(component.name) for component in context.components)
    return not left
