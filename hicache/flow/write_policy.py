"""When pages are copied to the host. A policy of one's own is a class in its own file and an entry in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from hicache.config import EngineConfig
from hicache.errors import ConfigError
from hicache.pages.table import Mask, PageTable, Rows


class WritePolicy(Protocol):
    """Asked on the scheduler thread. `at_eviction`: pages without a host copy are copied when they are evicted.
    `is_exclusive`: a host that needs room drops first what the device has as well."""

    at_eviction: bool
    is_exclusive: bool

    def wants(self, table: PageTable, rows: Rows) -> Mask:
        """Which of the pages `rows` of a prompt, which a request added or used just now, are to be copied at once. If a
        page is not, what continues it is not copied either."""


class WriteThrough:
    """Everything, at once."""

    at_eviction = is_exclusive = False

    def wants(self, table: PageTable, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)


class WriteBack:
    """Nothing until the device evicts it, which then waits for the copy."""

    at_eviction, is_exclusive = True, False

    def wants(self, table: PageTable, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class Exclusive(WriteBack):
    """As `WriteBack`, and device and host hold different pages as far as the host needs room. No eviction waits, see
    `hicache.flow.staged_load`."""

    is_exclusive = True


# The values of the setting `write_policy`.
POLICIES: dict[str, Callable[[EngineConfig], WritePolicy]] = {
    "write_through": lambda config: WriteThrough(),
    "write_back": lambda config: WriteBack(),
    "exclusive": lambda config: Exclusive(),
}


def make_write_policy(config: EngineConfig) -> WritePolicy:
    """The policy that the configuration names. ConfigError for an unknown name."""
    factory = POLICIES.get(config.write_policy)
    if factory is None:
        raise ConfigError(f"write_policy={config.write_policy!r} is unknown; use one of {', '.join(sorted(POLICIES))}")
    return factory(config)
