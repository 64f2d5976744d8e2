"""The parts of one engine that its transfers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hicache.flow.components.base import CacheComponent, EngineParts
from hicache.flow.components.full import FullAttention
from hicache.flow.prompt import HostWatch
from hicache.flow.write_policy import WritePolicy
from hicache.pages.node import Released
from hicache.pages.states import TierPages
from hicache.pages.table import Rows
from hicache.pages.writes import PageUses
from hicache.stores.tier import StoreTier
from hicache.tiers import DISK, FULL, Component, Store, joined


@dataclass(frozen=True)
class EngineContext(EngineParts):
    """`components`: the components of the model, FULL first. `stores`: the tiers below the host, in the order of
    lookups. `watch`: records full pages that the host gets and evicts. `page_uses`: records which pages of the disk, or
    pages that may be written to it, requests used. `clock`: returns seconds, for deadlines and write budgets."""

    components: tuple[CacheComponent, ...]
    write_policy: WritePolicy
    stores: Mapping[Store, StoreTier] = field(default_factory=dict)
    watch: HostWatch | None = None
    page_uses: PageUses = field(default_factory=PageUses)
    clock: Callable[[], float] = time.monotonic

    @cached_property
    def full(self) -> FullAttention:
        full = self.components[0]
        assert isinstance(full, FullAttention)
        return full

    @cached_property
    def others(self) -> tuple[CacheComponent, ...]:
        """All components except FULL."""
        return self.components[1:]

    @cached_property
    def by_name(self) -> dict[Component, CacheComponent]:
        return {component.name: component for component in self.components}

    @cached_property
    def ending(self) -> CacheComponent:
        """The component that determines at which tokens nodes may end."""
        return next((component for component in self.components if component.tree_component.ends_matches), self.full)

    @property
    def disk(self) -> StoreTier | None:
        return self.stores.get(DISK)

    @cached_property
    def has_host(self) -> bool:
        return self.full.has_host

    @cached_property
    def exclusive(self) -> TierPages | None:
        """The full pages of the host under the write policy `exclusive`; None under other policies."""
        return self.full.pages if self.has_host and self.full.pages.is_exclusive else None

    def evict(self, rows: Rows, name: Component) -> list[Released]:
        """Evict unlocked pages of a component from the device; full pages are evicted with their windows and states.
        The caller frees the returned values."""
        if name == FULL and self.exclusive is not None:
            self.exclusive.left_above(rows)
        return self.tree.evict(rows, name)

    def free(self, released: Sequence[Released]) -> None:
        """Free values that were removed from the tree."""
        with ExitStack() as steps:  # frees all values, even if one call raises
            for name, value in values_of(released).items():
                steps.callback(self.by_name[name].free, value)


def values_of(released: Sequence[Released]) -> dict[Component, torch.Tensor]:
    """Join the values of each component that were removed from the tree."""
    values: dict[Component, list[torch.Tensor]] = {}
    for item in released:
        values.setdefault(item.component, []).append(item.value)
    return {name: joined(of_component) for name, of_component in values.items()}
