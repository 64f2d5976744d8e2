"""What SGLang's transfers name, as pages of host tiers and slots of device pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.integrations.sglang.linker_host import HostTier
from hicache.integrations.sglang.linker_names import PoolName, PoolTransfer
from hicache.integrations.sglang.linker_pages import HeldPage


@dataclass(frozen=True)
class Part:
    """What one component has of a transfer: `slots`, int64 `[len(keys) * page_tokens]`, on its device."""

    tier: HostTier
    keys: list[str]
    slots: torch.Tensor

    @property
    def held(self) -> list[HeldPage]:
        """Those pages that are on the host."""
        return [page for key in self.keys if (page := self.tier.index.get(key)) is not None]

    def missing(self) -> Part:
        """Those pages alone that are not on the host."""
        rows = [row for row, key in enumerate(self.keys) if self.tier.index.get(key) is None]
        if len(rows) == len(self.keys):
            return self
        slots = self.slots.view(len(self.keys), -1)[rows].flatten()
        return Part(self.tier, [self.keys[row] for row in rows], slots)


def parts_of(transfers: Sequence[PoolTransfer], tiers: Mapping[str, HostTier]) -> list[Part] | None:
    """None unless each transfer names a component, and a slot for each token of its pages."""
    parts = []
    for transfer in transfers:
        tier = tiers.get(PoolName(transfer.name).value)
        if tier is None or transfer.device_indices is None or not transfer.keys:
            return None
        slots = transfer.device_indices.reshape(-1).to(torch.int64)
        if len(slots) != len(transfer.keys) * tier.pool.page_tokens:
            return None
        parts.append(Part(tier, list(transfer.keys), slots))
    return parts or None
