"""The tiers of a replay: sizes, eviction policies, write policy, write budget and hints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hicache.config import default_write_policy, host_order
from hicache.config.settings import short_repr
from hicache.errors import ConfigError
from hicache.pages.order import RANK_POLICIES
from hicache.replay.hints import HINTS, HintName

WRITE_POLICIES = ("write_through", "write_back", "exclusive")


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of one simulated cache. Raises ConfigError for an invalid combination.

    `*_blocks`: capacities in blocks; None: unlimited; 0: no such tier (the device needs at least 1). `policy`,
    `host_policy`: eviction policies of device and host; the disk always uses lru. `host_policy` and `write_policy` are
    the engine's defaults if empty. `hints`: the names in `HINTS` of the hints that the simulated requests give.
    `disk_write_budget`: maximum blocks written to the disk for each requested block; None: no limit."""

    device_blocks: int | None
    host_blocks: int | None = 0
    disk_blocks: int | None = 0
    policy: str = "lru"
    write_policy: str = ""
    host_policy: str = ""
    hints: tuple[HintName, ...] = ()
    disk_write_budget: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("device_blocks", 1), ("host_blocks", 0), ("disk_blocks", 0)):
            value = vars(self)[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}={short_repr(value)} is not a count; give an integer of at least {least}")
        if self.disk_blocks != 0 and self.host_blocks == 0:
            raise ConfigError("the disk tier needs a host tier; give --host-blocks (host_blocks) of at least 1")
        budget = self.disk_write_budget
        if budget is not None and not (isinstance(budget, float | int) and 0 < budget < math.inf):
            raise ConfigError(
                f"disk_write_budget={short_repr(budget)} is not a number of blocks; give a number above 0, like 0.5"
            )
        if not self.write_policy:
            chosen = default_write_policy(has_stores=self.disk_blocks != 0)
            object.__setattr__(self, "write_policy", chosen)
        orders = tuple(RANK_POLICIES)
        for name, words in (("policy", orders), ("write_policy", WRITE_POLICIES), ("host_policy", ("", *orders))):
            if vars(self)[name] not in words:
                raise ConfigError(f"{name}={short_repr(vars(self)[name])} is unknown; use one of {', '.join(words)}")
        if not {*self.hints} <= {*HINTS}:
            raise ConfigError(f"hints={short_repr(self.hints)} are unknown; use some of {', '.join(HINTS)}")

    @property
    def host_order(self) -> str:
        """The eviction policy of the host."""
        return self.host_policy or host_order(self.policy, self.write_policy)

    @property
    def total_blocks(self) -> int | None:
        """The capacity of all tiers together, in blocks. Returns None if one is unlimited."""
        sizes = (self.device_blocks, self.host_blocks, self.disk_blocks)
        return None if None in sizes else sum(size for size in sizes if size is not None)
