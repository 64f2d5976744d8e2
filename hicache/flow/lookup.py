"""What stores add to what memory holds of a prompt, without a side effect."""

from __future__ import annotations

import time

from hicache.flow.located import Located, StoreAnswers
from hicache.tiers import FULL, Store


def look_up(located: Located, wait_s: float) -> tuple[dict[Store, int], bool]:
    """Tokens that each store adds to what memory can serve, and whether all of them answered within `wait_s`."""
    has, until_s, all_known = StoreAnswers(located), time.monotonic() + wait_s, True
    for store, tier in located.context.stores.items():
        keys, others = has.keys_to_ask()
        done = tier.find(keys, max(0.0, until_s - time.monotonic()), others)
        if done is None:
            all_known = False
        else:
            has.add(store, done.num_pages, others, done.others)
    end = has.usable_end(has.full_end)
    num_pages = has.by_store(has.num_usable, end)
    # Where memory has the full pages, a store adds windows or states to them: the one asked last, of several.
    added = [piece.store for piece in has.to_read(end) if piece.component.name != FULL and piece.store is not None]
    if added:
        num_pages[max(added)] += max(0, end - has.num_usable - sum(num_pages.values()))
    return {store: num_pages[store] * located.context.tree.page_size for store in Store}, all_known
