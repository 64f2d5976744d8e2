"""What stores add to what memory holds of a prompt, without a side effect."""

from __future__ import annotations

import time

from hicache.flow.located import Located, StoreAnswers
from hicache.tiers import FULL, REMOTE


def look_up(located: Located, wait_s: float) -> tuple[int, int, bool]:
    """Tokens that the disks add to what memory can serve, and the remote tier to that; and whether all of them answered
    within `wait_s`."""
    has, until_s, all_known = StoreAnswers(located), time.monotonic() + wait_s, True
    for store, tier in located.context.stores.items():
        question = has.question()
        done = tier.find((), max(0.0, until_s - time.monotonic()), question.keys)
        if done is None:
            all_known = False
        else:
            has.add(store, question, done.others)
    end = has.usable_end(has.full_end)
    num_pages = has.by_store(has.num_usable, end)
    # Where memory has the full pages, a store adds windows or states to them: the one asked last, of several.
    added = [piece.stores for piece in has.to_read(end) if piece.component.name != FULL and piece.stores]
    if added:
        last = [store for store in located.context.stores if store.bit & added[-1]][-1]
        num_pages[last] += max(0, end - has.num_usable - sum(num_pages.values()))
    remote, page = num_pages.pop(REMOTE, 0), located.context.tree.page_size
    return num_pages.total() * page, remote * page, all_known
