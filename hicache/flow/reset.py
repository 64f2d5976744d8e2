"""Forgetting what memory holds of prompts: for measurements that begin cold, and when weights have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hicache.errors import InvalidArgument
from hicache.flow.context import EngineContext
from hicache.tiers import DEVICE, HOST
from hicache.tree.base import Released

MemoryTier = Literal["device", "host"]
_TIERS = {"device": DEVICE, "host": HOST}


def reset(context: EngineContext, names: Sequence[MemoryTier]) -> bool:
    """Drop what nobody uses from these tiers, saved elsewhere or not. Returns whether nothing is left there."""
    for name in names:
        if name not in _TIERS:
            raise InvalidArgument(f"tier={name!r}: choose one of {', '.join(_TIERS)}")
    tree, tiers = context.tree, [_TIERS[name] for name in names]
    released: list[Released] = []
    try:
        for tier in tiers:
            for component in context.components:
                while (node := tree.victim(component.name, tier)) is not None:
                    released += tree.drop(node, component.name, tier)
    finally:
        context.free(released)
    return not any(tree.protected(component.name, tier) for component in context.components for tier in tiers)
