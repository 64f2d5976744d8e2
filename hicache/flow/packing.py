"""Counts pages that do not fit one host page when packed, and logs one warning if too many pages do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hicache.metrics import Metrics
from hicache.tiers import FULL, Component

log = logging.getLogger(__name__)

_MAX_MISFITS_SHARE = 0.02
_MIN_JUDGED_PAGES = 1000


def are_too_many(num_misfits: float, num_packed: float) -> bool:
    """Return whether too many of the packed pages or chunks did not fit."""
    return num_packed >= _MIN_JUDGED_PAGES and num_misfits > _MAX_MISFITS_SHARE * num_packed


class Packing:
    """Counts the packed pages of one component, and the pages that do not fit. Scheduler thread."""

    def __init__(self, component: Component, metrics: Metrics, num_raw: Callable[[], int]) -> None:
        """`num_raw`: returns the present number of raw pages on the host, which take two host pages each."""
        self._component, self._is_logged = component, False
        prefix = "packing" if component == FULL else f"packing_{component}"
        self._packed, self._misfits, self._dropped = (
            metrics.counter(f"{prefix}.{name}_pages", help, f"packing_{name}_pages", component=component)
            for name, help in (
                ("packed", "pages that were packed while they were copied to the host"),
                (
                    "misfit",
                    "pages that did not fit the packed size: they were copied again unpacked, and are not stored",
                ),
                ("dropped", "misfit pages that were not backed up because no second host page was free"),
            )
        )
        help = "unpacked (raw) pages on the host; each takes two host pages and is in no store"
        metrics.gauge(f"{prefix}.raw_pages", help, num_raw, "packing_raw_pages", component=component)

    def count(self, num_pages: int, num_misfits: int) -> None:
        """Count packed pages and misfits. Warns once if misfits are too many."""
        self._packed.value += num_pages
        self._misfits.value += num_misfits
        packed, misfits = self._packed.value, self._misfits.value
        if not self._is_logged and are_too_many(misfits, packed):
            self._is_logged = True
            log.warning(
                "%d of %d pages of component %s do not fit when packed: each takes two host pages, and no "
                "store gets it; set kv_packing=off",
                misfits,
                packed,
                self._component,
            )

    def drop(self, num_pages: int) -> None:
        self._dropped.value += num_pages
