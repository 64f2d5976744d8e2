"""A run of host pages: what the index keeps of pages that came together, and what is to come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hicache.eviction.orders import CountedRecord
from hicache.tiers import Store


class Pages(Protocol):
    """Whose pages an index keeps: a `HostPagePool`, or what counts like one."""

    num_pages: int

    def available(self) -> int: ...

    def alloc(self, num_pages: int) -> torch.Tensor | None: ...

    def free(self, pages: torch.Tensor) -> None: ...

    def check(self) -> None: ...


class NewPages(NamedTuple):
    """Pages to be reserved: `keys`, which follow each other in a prompt, behind the page `before` (None: behind none).
    `first`: the index of the first in its prompt. `about`: what the caller wants to know of them later; the first is
    its `place`-th. `priority`: of the request that they are for."""

    keys: Sequence[bytes]
    before: bytes | None = None
    first: int = 0
    about: Any = None
    place: int = 0
    priority: int = 0


class HostRun(CountedRecord):
    """Pages of the pool: `ids[i]` for the bytes of `keys[i]`. Only the index changes it, but for `stored` and `source`.

    `locks`: users who need it to stay, its writer while it is in flight, and the runs behind it that have locks.
    `before`: the run that it follows, `after`: those that follow it. `stored`: bits of the stores that are known to
    have all of it. `source`: the store that a read brought it from, until a request uses it. `about`, `places`: what
    `reserve` was told of its pages. `rest`: by key the second pages of those that did not fit one when packed.
    """

    __slots__ = (
        "about", "after", "before", "ids", "is_published", "keys", "locks", "places", "rest", "source", "stored",
    )  # fmt: skip

    def __init__(self, keys: list[bytes], ids: list[int], about: Any, place: int) -> None:
        super().__init__(keys[0])
        self.keys, self.ids, self.about = keys, ids, about
        self.places = list(range(place, place + len(keys)))
        self.locks, self.stored, self.hit_count = 1, 0, 1
        self.source: Store | None = None
        self.rest: dict[bytes, int] = {}
        self.is_published = False
        self.before: HostRun | None = None
        self.after: set[HostRun] = set()

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        """Its size for eviction orders, in pages."""
        return len(self.keys)

    @property
    def num_held(self) -> int:
        """Pages of the pool, second ones included."""
        return len(self.ids) + len(self.rest)


def pages_of(runs: Iterable[HostRun]) -> torch.Tensor:
    """Their pages in the host pool, int64 `[pages]`, without second ones."""
    return torch.tensor([page for run in runs for page in run.ids], dtype=torch.int64)


def held_by(runs: Iterable[HostRun]) -> torch.Tensor:
    """Their pages in the host pool, int64 `[pages]`: of each run, those of `pages_of`, then second ones."""
    return torch.tensor([page for run in runs for page in (*run.ids, *run.rest.values())], dtype=torch.int64)
