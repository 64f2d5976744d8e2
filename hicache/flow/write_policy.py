"""Write policies: when pages are copied to the host. To add a policy, write a class in a new file and add it to
`POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import numpy as np

from hicache.config import EngineConfig
from hicache.errors import ConfigError
from hicache.pages.table import Mask, PageTable, Rows


class OnEviction(Enum):
    """The effect of an eviction from the device on pages without a host copy."""

    DROP = auto()  # The pages are lost.
    BACK_UP = auto()  # The pages are copied to the host, and the eviction waits for the copy.
    EXCHANGE = auto()  # As BACK_UP, with staged loads; the host first drops pages that are also on the device.


class WritePolicy(Protocol):
    """The contract of a write policy. Called on the scheduler thread."""

    on_eviction: OnEviction

    def selects(self, table: PageTable, rows: Rows) -> Mask:
        """Return which pages are copied to the host at once. `rows`: pages of a prompt that a request has just added or
        used. Pages after a page that is not selected are not copied either."""


class WriteThrough:
    """Copies all pages at once."""

    on_eviction = OnEviction.DROP

    def selects(self, table: PageTable, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)


class WriteBack:
    """Copies a page when the device evicts it. The eviction waits for the copy."""

    on_eviction = OnEviction.BACK_UP

    def selects(self, table: PageTable, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class Exclusive(WriteBack):
    """Copies pages at eviction as `WriteBack`. To free pages, the host first drops pages that are also on the device.
    Loads that evict pages are staged, see `hicache.flow.staged_load`."""

    on_eviction = OnEviction.EXCHANGE


# The values of the setting `write_policy`.
POLICIES: dict[str, Callable[[EngineConfig], WritePolicy]] = {
    "write_through": lambda config: WriteThrough(),
    "write_back": lambda config: WriteBack(),
    "exclusive": lambda config: Exclusive(),
}


def make_write_policy(config: EngineConfig) -> WritePolicy:
    """Return the policy with the configured name. Raises ConfigError for an unknown name."""
    factory = POLICIES.get(config.write_policy)
    if factory is None:
        raise ConfigError(f"write_policy={config.write_policy!r} is unknown; use one of {', '.join(sorted(POLICIES))}")
    return factory(config)
