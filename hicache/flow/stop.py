"""Clean shutdown and flush: stores get the pages of the host, and the pages that only the device has.

The first pages of all prompts are written before later pages. So the pages that a store has can be read, even if the
shutdown is interrupted or the store has little capacity. A shutdown evicts all pages of the host before each batch,
because the stores have them and no request needs them. A flush works in small steps, and each step evicts from the host
the pages of the previous step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache.errors import NotStored
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies, Unsaved
from hicache.flow.located import first_gap, spans
from hicache.flow.write_policy import OnEviction
from hicache.flow.writes import Writes, flush_host, num_lacking
from hicache.pages.states import RAW, step_pages
from hicache.pages.table import Rows
from hicache.stores.tier import StoreTier
from hicache.tiers import FULL, Component

log = logging.getLogger(__name__)

_PIECE_PAGES, _ANSWER_S = 16, 5.0
# Divisors: the share of the host, and of a store, that one batch may fill. Raw pages take two host pages, and the store
# must not evict the first pages of prompts.
_HOST_PARTS, _STORE_PARTS = 2, 8


class _Piece(NamedTuple):
    """Pages of one component that are stored together. `last_use`: the last use of the first page on the device."""

    last_use: int
    unsaved: Unsaved


def store_promised(
    context: EngineContext, copies: Copies, writes: Sequence[Writes], settle: Callable[[], None]
) -> None:
    """Write all pages of the host to the stores. Also write the pages of the device that the write policy would have
    copied to the host if the host had had capacity. All leases have ended. `settle`: see `flush_host`."""
    if num_refused := flush_host(context, writes, settle):
        log.warning("%s", NotStored(num_refused, _faults(writes)))
    if not context.has_host or not writes:
        return
    for each in writes:
        each.announce_prefixes()
    tiers = [each.tier for each in writes]
    limits = _limits(context, tiers)
    pieces = _all_pieces(context, copies, limits)
    full_keys, other_keys, num_left = list[bytes](), list[bytes](), len(pieces)
    for batch in _batches(pieces, limits):
        for component in context.components:
            component.pages.evict_all()
        copies.backup_evicted([piece.unsaved for piece in reversed(batch) if not _is_stored(piece, tiers)], [])
        settle()
        for piece in batch:
            component, keys = piece.unsaved.component, piece.unsaved.keys
            is_raw = component.pages.has(component.pages.table.find(keys), RAW).tolist()
            sent = [key for key, raw in zip(keys, is_raw, strict=True) if not raw]
            (full_keys if component.name == FULL else other_keys).extend(sent)
        num_left -= len(batch)
        has_capacity = [_has_capacity(tier, full_keys, other_keys) for tier in tiers]
        if not any(has_capacity):
            break
    if num_left:
        log.warning("the stores take no more: %d of %d parts of prompts are not stored", num_left, len(pieces))


def flush(
    context: EngineContext, copies: Copies, writes: Sequence[Writes], settle: Callable[[], None]
) -> NotStored | None:
    """Flush all pages, and return the error of `CacheEngine.flush`, or None. `settle`: see `flush_host`."""
    num_left = flush_host(context, writes, settle) + _flush_device(context, copies, writes, settle)
    return NotStored(num_left, _faults(writes)) if num_left else None


def _faults(writes: Sequence[Writes]) -> list[str]:
    """Return the reasons for which stores refuse pages, each with the name of its tier."""
    return [f"the {each.tier.name} tier: {fault}" for each in writes if (fault := each.tier.write_fault)]


def _flush_device(context: EngineContext, copies: Copies, writes: Sequence[Writes], settle: Callable[[], None]) -> int:
    """Under a policy that copies at eviction, write the pages of the device, except full pages that the stores have.
    These pages stay on the device. Returns the number of pages that a store still lacks. All transfers have ended."""
    tiers, num_left = [each.tier for each in writes], 0
    if not context.has_host or not tiers or context.write_policy.on_eviction is OnEviction.DROP:
        return 0
    limits = {at.name: step_pages(at.host.num_pages) for at in context.components}
    pieces = (piece for piece in _all_pieces(context, copies, limits) if not _is_stored(piece, tiers))
    for batch in _batches(pieces, limits):
        if all(tier.writes.refuses() for tier in tiers):
            num_left += sum(len(piece.unsaved.keys) for piece in batch)
            continue
        copies.backup_evicted([piece.unsaved for piece in reversed(batch)], [])
        settle()
        if _num_refused(batch, writes):
            flush_host(context, writes, settle)
            num_left += _num_refused(batch, writes)
        if (pages := context.exclusive) is not None:
            for piece in batch:
                if piece.unsaved.component.name == FULL:
                    pages.came_above(piece.unsaved.rows)
    return num_left


def _num_refused(batch: Sequence[_Piece], writes: Sequence[Writes]) -> int:
    """Return the number of pages of a batch that the host has and that a store did not accept."""
    components = [(piece.unsaved.component, piece.unsaved.keys) for piece in batch]
    return sum(num_lacking(component, component.pages.held(keys), writes) for component, keys in components)


def _promised(context: EngineContext) -> Iterator[Rows]:
    """Yield the pages of each node that the write policy copies to a host with enough capacity, parents first."""
    policy, table, waiting = context.write_policy, context.tree.table, list(context.tree.root.children.values())
    is_dropped = policy.on_eviction is OnEviction.DROP
    while waiting:
        node = waiting.pop()
        num_selected = first_gap(policy.selects(table, node.rows)) if is_dropped else len(node.rows)
        yield node.rows[:num_selected]
        waiting += node.children.values() if num_selected == len(node.rows) else ()


def _limits(context: EngineContext, tiers: Sequence[StoreTier]) -> dict[Component, int]:
    """Return the most pages of each component in one batch."""
    budgets = [budget for tier in tiers if (budget := tier.stats().budget_bytes)]

    def limit(component: CacheComponent) -> int:
        of_stores = [budget // component.host.page_bytes // _STORE_PARTS for budget in budgets]
        return max(1, min(component.host.num_pages // _HOST_PARTS, *of_stores, component.host.num_pages))

    return {component.name: limit(component) for component in context.components}


def _all_pieces(context: EngineContext, copies: Copies, limits: dict[Component, int]) -> list[_Piece]:
    """Return all pages that the host lacks, sorted by their position in the prompt. Of pages at the same position, the
    page that was used last is first."""
    pieces = [piece for rows in _promised(context) for piece in _pieces(copies, rows, limits)]
    return sorted(pieces, key=lambda piece: (piece.unsaved.first, -piece.last_use))


def _pieces(copies: Copies, rows: Rows, limits: dict[Component, int]) -> Iterator[_Piece]:
    """Yield the pages of `rows` that the host lacks. A window or state is yielded even if the host lacks the page of
    full attention, because a store may have that page."""
    for unsaved in copies.unsaved(rows):
        most, last_use = min(_PIECE_PAGES, limits[unsaved.component.name]), unsaved.component.resident.order.at.last_use
        for first, last in spans(np.flatnonzero(copies.lacks(unsaved.component, unsaved.rows)).tolist()):
            for start in range(first, last, most):
                part = unsaved.part(start, min(last, start + most))._replace(needs_full=False)
                yield _Piece(int(last_use[part.rows[0]]), part)


def _batches(pieces: Iterable[_Piece], limits: dict[Component, int]) -> Iterator[list[_Piece]]:
    batch, num_pages = list[_Piece](), Counter[Component]()
    for piece in pieces:
        name = piece.unsaved.component.name
        if num_pages[name] + len(piece.unsaved.keys) > limits[name]:
            yield batch
            batch, num_pages = [], Counter()
        batch.append(piece)
        num_pages[name] += len(piece.unsaved.keys)
    if batch:
        yield batch


def _is_stored(piece: _Piece, tiers: Sequence[StoreTier]) -> bool:
    """Return whether all stores have these full pages already."""
    return piece.unsaved.component.name == FULL and all(_has(tier, piece.unsaved.keys) for tier in tiers)


def _has(tier: StoreTier, keys: Sequence[bytes]) -> bool | None:
    """Return whether a store has each page; None if the store does not answer."""
    found = tier.find((), _ANSWER_S, keys)
    return None if found is None else all(found.others)


def _has_capacity(tier: StoreTier, full_keys: Sequence[bytes], other_keys: Sequence[bytes]) -> bool:
    """Return whether a store still has all written full pages, so that more pages may be written to it. The written
    pages count as used, so the store evicts the first of them last."""
    tier.used([*full_keys, *other_keys])
    if tier.writes.refuses():
        return False
    has_all = _has(tier, full_keys)
    return not tier.writes.refuses() and has_all is not False
