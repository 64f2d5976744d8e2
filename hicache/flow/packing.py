"""How well the pages of a component pack: counted, and packing ends where too many do not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hicache.host import HostPagePool, HostRun, PageIndex, PageKind, kinds_of
from hicache.metrics import Metrics
from hicache.tiers import FULL, Component

log = logging.getLogger(__name__)

_MAX_MISFITS_SHARE = 0.02
_MIN_JUDGED_PAGES = 1000


class MisfitPages:
    """Of `runs` that were copied packed, the pages at `positions`, which did not fit: `keys` by run."""

    def __init__(self, runs: Sequence[HostRun], positions: Sequence[int]) -> None:
        self.num_pages = sum(len(run.keys) for run in runs)
        self.keys: dict[HostRun, list[bytes]] = {}
        self._positions: dict[HostRun, list[int]] = {}
        wanted, start = {*positions}, 0
        for run in runs if positions else ():
            for position, key in enumerate(run.keys, start):
                if position in wanted:
                    self.keys.setdefault(run, []).append(key)
                    self._positions.setdefault(run, []).append(position)
            start += len(run.keys)

    def of(self, runs: Sequence[HostRun], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of those of `runs`: their slots among `slots`, those of all pages, and their first and second host pages."""
        at = torch.tensor([position for run in runs for position in self._positions[run]], device=slots.device)
        places = [(run.ids[run.keys.index(key)], run.rest[key]) for run in runs for key in self.keys[run]]
        first, rest = torch.tensor(places, dtype=torch.int64).unbind(1)
        return slots.view(self.num_pages, -1)[at].flatten(), first.contiguous(), rest.contiguous()


class FirstParts:
    """Of `runs` that a store was asked for: which packed pages came, and which first parts of raw ones; `ok` as the
    store answered. `num_lost`: of what came verified, pages and second parts that are not what they should be.
    `useless`: keys of pages of which the store has something that can never be read whole."""

    def __init__(self, host: HostPagePool, runs: Sequence[HostRun], ok: Sequence[bool]) -> None:
        keys, places = [key for run in runs for key in run.keys], [page for run in runs for page in run.ids]
        self._host, self._runs, self.num_lost = host, tuple(runs), 0
        kinds = dict(zip(keys, kinds_of(host, places, keys), strict=True))
        came = {key: at < len(ok) and ok[at] for at, key in enumerate(keys)}
        self._ok = {key: came[key] and kinds[key] in (PageKind.PACKED, PageKind.RAW) for key in keys}
        self.useless = [key for key in keys if came[key] and not self._ok[key]]
        self.num_lost += len(self.useless)
        raw = {key for key in keys if kinds[key] == PageKind.RAW and self._ok[key]}
        self._raw = {run: found for run in runs if (found := [key for key in run.keys if key in raw])}

    def reserve_rest(self, index: PageIndex | None) -> dict[bytes, int]:
        """Second host pages for the raw pages, by key, as far as `index` has capacity (None: for none)."""
        for run, keys in self._raw.items():
            num_pages = 0 if index is None else min(len(keys), index.capacity)
            if index is not None and num_pages:
                index.reserve_rest(run, keys[:num_pages])
            self._ok.update(dict.fromkeys(keys[num_pages:], False))
        return {key: page for run in self._raw for key, page in run.rest.items()}

    def whole(self, rest_ok: Sequence[bool], num_told: int = 0) -> tuple[bool, ...]:
        """Which pages came whole, in the order of the runs: with the second parts that came, `rest_ok` as the store
        answered, () where it was not asked. `num_told`: of how many, from the first on, it is sure."""
        rest = {key: page for run in self._runs for key, page in run.rest.items()}
        kinds = kinds_of(self._host, [*rest.values()], [*rest])
        for at, (key, kind) in enumerate(zip(rest, kinds, strict=True)):
            came = at < len(rest_ok) and rest_ok[at]
            self._ok[key] = came and kind == PageKind.REST
            self.num_lost += came and not self._ok[key]
            if not self._ok[key] and (came or at < num_told):
                self.useless.append(key)
        return tuple(self._ok.values())


def whole_pages(run: HostRun, ok: Sequence[bool]) -> list[bool]:
    """Of each page of `run` whether all of it is `ok`, which has its pages, then its second pages, in order."""
    lacking = {key for key, came in zip(run.rest, ok[len(run.keys) :], strict=True) if not came}
    return [came and key not in lacking for key, came in zip(run.keys, ok, strict=False)]


class Packing:
    """Of a component whose host pages are packed. Scheduler thread.

    `is_on`: what comes next may be packed; else it goes to the host raw, two pages for one.
    """

    def __init__(self, component: Component, metrics: Metrics) -> None:
        self.is_on, self._component = True, component
        part = "packing" if component == FULL else f"packing_{component}"
        self._packed, self._misfits, self._dropped = (
            metrics.counter(f"{part}.{name}_pages", help, f"packing_{name}_pages", component=component)
            for name, help in (
                ("packed", "pages that were packed on their way to the host"),
                ("misfit", "of these, pages that did not fit their packed size and were copied again, raw"),
                ("dropped", "of those, pages that were not backed up because the host had no second page to give"),
            )
        )
        metrics.gauge(
            f"{part}.on_flag",
            "1: pages are packed; 0: too many did not fit",
            lambda: self.is_on,
            "packing_on_flag",
            component=component,
        )

    def count(self, num_pages: int, num_misfits: int) -> None:
        """So many pages were packed, of which some do not fit."""
        self._packed.value += num_pages
        self._misfits.value += num_misfits
        packed, misfits = self._packed.value, self._misfits.value
        if self.is_on and packed >= _MIN_JUDGED_PAGES and misfits > _MAX_MISFITS_SHARE * packed:
            self.is_on = False
            log.warning(
                "%d of %d pages of component %s do not fit when packed; from now on its pages take two places each: "
                "set kv_packing=off",
                misfits,
                packed,
                self._component,
            )

    def drop(self, num_pages: int) -> None:
        self._dropped.value += num_pages
