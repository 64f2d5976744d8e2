"""What the movements of one engine work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hicache.flow.components import CacheComponent, EngineParts, FullAttention
from hicache.flow.write_policy import WritePolicy
from hicache.stores.tier import StoreTier
from hicache.tiers import DISK, Component, Store, joined
from hicache.tree.base import Released


@dataclass(frozen=True)
class EngineContext(EngineParts):
    """`components`: those of the model, FULL first. `stores`: the tiers below memory, in the order in which reads ask
    them."""

    components: tuple[CacheComponent, ...]
    write_policy: WritePolicy
    stores: Mapping[Store, StoreTier] = field(default_factory=dict)

    @cached_property
    def full(self) -> FullAttention:
        full = self.components[0]
        assert isinstance(full, FullAttention)
        return full

    @cached_property
    def by_name(self) -> dict[Component, CacheComponent]:
        return {component.name: component for component in self.components}

    @cached_property
    def ending(self) -> CacheComponent:
        """The component that decides at which tokens nodes may end."""
        return next((component for component in self.components if component.rules.ends_matches), self.full)

    @property
    def disk(self) -> StoreTier | None:
        return self.stores.get(DISK)

    @property
    def has_host(self) -> bool:
        return self.full.has_host

    def free(self, released: Sequence[Released]) -> None:
        """Free what left the tree."""
        values: dict[Component, list[torch.Tensor]] = {}
        for item in released:
            values.setdefault(item.component, []).append(item.value)
        with ExitStack() as steps:  # all of them, whatever raises
            for name, parts in values.items():
                steps.callback(self.by_name[name].free, joined(parts))
