"""An orderly stop and a flush: the stores get the pages of the host, and pages that only the device has.

The beginnings of all prompts go before their ends, so that what a store has can be read, whatever ends this before it
is done and however little the store has room for. At a stop nobody needs the host any more: it is emptied before each
batch, when the stores have what was there. A flush goes in steps, each of which takes the places of the one before.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache.errors import NotStored
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies, Unsaved
from hicache.flow.located import first_gap, spans
from hicache.flow.persist import Persist
from hicache.pages.states import RAW, step_pages
from hicache.pages.table import Rows
from hicache.stores.tier import StoreTier
from hicache.tiers import FULL, Component

log = logging.getLogger(__name__)

_PIECE_PAGES, _ANSWER_S = 16, 5.0
_HOST_PARTS, _STORE_PARTS = 2, 8  # a batch takes one of them: raw pages have two places; what a put evicts is no head


class _Piece(NamedTuple):
    """Pages of one component that are stored together. `last_use`: of the device."""

    last_use: int
    unsaved: Unsaved


def store_promised(
    context: EngineContext, copies: Copies, persists: Sequence[Persist], settle: Callable[[], None]
) -> None:
    """No lease is held. `settle`: lands all copies, reads and writes under way."""
    if num_refused := _flush_host(context, persists, settle):
        log.warning("%s", NotStored(num_refused, _faults(persists)))
    if not context.has_host or not persists:
        return
    for persist in persists:
        persist.tell_prefixes()
    tiers = [persist.tier for persist in persists]
    pieces = _all_pieces(context, copies, _limits(context, tiers))
    full_keys, others, num_left = list[bytes](), list[bytes](), len(pieces)
    for batch in _batches(pieces, _limits(context, tiers)):
        for component in context.components:
            component.pages.evict_all()
        copies.backup_evicted([piece.unsaved for piece in reversed(batch) if not _is_stored(piece, tiers)], [])
        settle()
        for piece in batch:
            component, table = piece.unsaved.component, piece.unsaved.component.pages.table
            rows = table.find(piece.unsaved.keys)
            is_raw = component.pages.has(rows, RAW).tolist()
            sent = [key for key, raw in zip(piece.unsaved.keys, is_raw, strict=True) if not raw]
            (full_keys if component.name == FULL else others).extend(sent)
        num_left -= len(batch)
        kept = [_keeps(tier, full_keys, others) for tier in tiers]
        if not any(kept):
            break
    if num_left:
        log.warning("the stores take no more: %d of %d parts of prompts are not stored", num_left, len(pieces))


def flush(
    context: EngineContext, copies: Copies, persists: Sequence[Persist], settle: Callable[[], None]
) -> NotStored | None:
    """See `CacheEngine.flush`; the error is returned. `settle` as above."""
    num_left = _flush_host(context, persists, settle) + _flush_device(context, copies, persists, settle)
    return NotStored(num_left, _faults(persists)) if num_left else None


def _flush_host(context: EngineContext, persists: Sequence[Persist], settle: Callable[[], None]) -> int:
    """Have the stores take what the host has and they lack, and try again while they take some of it. Returns the pages
    that a store still lacks. `settle` as above."""
    num_before = math.inf
    while True:
        for persist in persists:
            persist.drain(anew=True)
        settle()
        num_left = sum(_num_lacking(at, at.pages.rows_held(), persists) for at in context.components if persists)
        if not num_left or num_left >= num_before:
            return num_left
        num_before = num_left


def _faults(persists: Sequence[Persist]) -> list[str]:
    """Why stores do not take pages, each by the name of its tier."""
    tiers = [persist.tier for persist in persists]
    return [f"the {tier.name} tier: {tier.write_fault}" for tier in tiers if tier.write_fault]


def _flush_device(
    context: EngineContext, copies: Copies, persists: Sequence[Persist], settle: Callable[[], None]
) -> int:
    """Under a policy that copies at eviction: all but the full pages that the stores have, as far as they take it. What
    was copied stays on the device. Returns the pages that a store still lacks. Everything has landed; `settle` as
    above."""
    tiers, num_left = [persist.tier for persist in persists], 0
    if not context.has_host or not tiers or not context.write_policy.at_eviction:
        return 0
    limits = {at.name: step_pages(at.host.num_pages) for at in context.components}
    for batch in _batches(
        (piece for piece in _all_pieces(context, copies, limits) if not _is_stored(piece, tiers)), limits
    ):
        if all(tier.writes.refuses() for tier in tiers):
            num_left += sum(len(piece.unsaved.keys) for piece in batch)
            continue
        copies.backup_evicted([piece.unsaved for piece in reversed(batch)], [])
        settle()
        if _num_refused(batch, persists):
            _flush_host(context, persists, settle)
            num_left += _num_refused(batch, persists)
        if (pages := context.exclusive) is not None:
            for piece in batch:
                if piece.unsaved.component.name == FULL:
                    pages.came_above(piece.unsaved.rows)
    return num_left


def _num_refused(batch: Sequence[_Piece], persists: Sequence[Persist]) -> int:
    """Pages of a batch that came to the host and that a store did not take."""
    of_batch = (piece.unsaved for piece in batch)
    return sum(_num_lacking(each.component, each.component.pages.held(each.keys), persists) for each in of_batch)


def _num_lacking(component: CacheComponent, rows: Rows, persists: Sequence[Persist]) -> int:
    return int(np.count_nonzero(np.any([persist.lacks(component, rows) for persist in persists], axis=0)))


def _promised(context: EngineContext) -> Iterator[Rows]:
    """The pages of nodes that would be copied, had the host room: parents first."""
    policy, table, waiting = context.write_policy, context.tree.table, list(context.tree.root.children.values())
    while waiting:
        node = waiting.pop()
        num_wanted = len(node.rows) if policy.at_eviction else first_gap(policy.wants(table, node.rows))
        yield node.rows[:num_wanted]
        waiting += node.children.values() if num_wanted == len(node.rows) else ()


def _limits(context: EngineContext, tiers: Sequence[StoreTier]) -> dict[Component, int]:
    """Pages of each component in one batch."""
    budgets = [budget for tier in tiers if (budget := tier.stats().budget_bytes)]

    def limit(component: CacheComponent) -> int:
        of_stores = [budget // component.host.page_bytes // _STORE_PARTS for budget in budgets]
        return max(1, min(component.host.num_pages // _HOST_PARTS, *of_stores, component.host.num_pages))

    return {component.name: limit(component) for component in context.components}


def _all_pieces(context: EngineContext, copies: Copies, limits: dict[Component, int]) -> list[_Piece]:
    """Beginnings first, of these what was used last."""
    pieces = [piece for rows in _promised(context) for piece in _pieces(copies, rows, limits)]
    return sorted(pieces, key=lambda piece: (piece.unsaved.first, -piece.last_use))


def _pieces(copies: Copies, rows: Rows, limits: dict[Component, int]) -> Iterator[_Piece]:
    """The pages of `rows` that the host lacks. The full pages of a window or state may be in the stores already."""
    for unsaved in copies.unsaved(rows):
        most, last_use = min(_PIECE_PAGES, limits[unsaved.component.name]), unsaved.component.resident.order.at.last_use
        for first, last in spans(np.flatnonzero(copies.lacks(unsaved.component, unsaved.rows)).tolist()):
            for start in range(first, last, most):
                part = unsaved.part(start, min(last, start + most))._replace(needs_full=False)
                yield _Piece(int(last_use[part.rows[0]]), part)


def _batches(pieces: Iterable[_Piece], limits: dict[Component, int]) -> Iterator[list[_Piece]]:
    batch, held = list[_Piece](), Counter[Component]()
    for piece in pieces:
        name, num_pages = piece.unsaved.component.name, len(piece.unsaved.keys)
        if held[name] + num_pages > limits[name]:
            yield batch
            batch, held = [], Counter()
        batch.append(piece)
        held[name] += num_pages
    if batch:
        yield batch


def _is_stored(piece: _Piece, tiers: Sequence[StoreTier]) -> bool:
    """Whether all stores have these full pages already."""
    is_full = piece.unsaved.component.name == FULL
    return is_full and all(_has(tier, piece.unsaved.keys) for tier in tiers)


def _has(tier: StoreTier, keys: Sequence[bytes]) -> bool | None:
    """Whether a store has each page; None where it does not tell."""
    found = tier.find((), _ANSWER_S, keys)
    return None if found is None else all(found.others)


def _keeps(tier: StoreTier, full_keys: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Whether a store has all of these pages, so that it may take more. The first of them count as used last: they are
    evicted last."""
    tier.used([*full_keys, *others])
    has_all = None if tier.writes.refuses() else _has(tier, full_keys)
    return not tier.writes.refuses() and has_all is not False
