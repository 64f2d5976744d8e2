"""The host locations of the pages of a copy, and the mover between staging and slots.

In a pool with packed pages, a page that fits is one host page (one segment). A page that does not fit packed is raw, in
two segments:

    first segment    bytes [0, pool_page_bytes) of the raw page
    second segment   the other bytes

Raw pages are copied layer by layer, like packed pages, so a layer of the forward pass waits only for its own part of
the pages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover

Ids = npt.NDArray[np.int64]


class PageSegment(NamedTuple):
    """Host pages `ids`, each of which starts with the bytes [start, end) of one page of a copy."""

    ids: Ids
    start: int
    end: int

    def within(self, begin: int, stop: int) -> tuple[int, int]:
        """Return the intersection of bytes [begin, stop) of a page with this segment, half-open and possibly empty."""
        first = max(begin, self.start)
        return first, max(first, min(stop, self.end))


class PageCopy(NamedTuple):
    """A copy of pages that share a mover, between `segments` on the host and `slots`, int64 `[pages * page_tokens]`."""

    mover: PageMover | PagePacker
    segments: tuple[PageSegment, ...]
    slots: torch.Tensor
    num_pages: int
    num_bytes: int


class PageCopies:
    """Creates the copies of one pool. `packer` packs the pages of the pool. If `packer` is None, all pages are unpacked
    and have one host page each."""

    def __init__(self, mover: PageMover, packer: PagePacker | None) -> None:
        """Raises ConfigError if two host pages are too small for an unpacked page."""
        self._raw = mover
        self.mover = packer or mover
        self.movers = (mover,) if packer is None else (packer, mover)
        pool_page_bytes, page_bytes = self.mover.ends[-1], mover.ends[-1]
        if not pool_page_bytes <= page_bytes <= 2 * pool_page_bytes:
            raise ConfigError(
                f"two packed pages of {pool_page_bytes} bytes are too small for a raw page of {page_bytes}; "
                "set kv_packing=off"
            )

    def to_load(self, pages: torch.Tensor, slots: torch.Tensor, rest: torch.Tensor | None) -> list[PageCopy]:
        """Return the copies of a load: at most one of packed pages and one of unpacked pages. `rest`: see
        `TransferBackend`."""
        if rest is None or not rest.any():
            return [self.to_store(slots, pages, None)]
        by_page, copies = slots.view(len(pages), -1), list[PageCopy]()
        packed, raw = (rest == 0).nonzero().flatten(), (rest > 0).nonzero().flatten()
        if len(packed):
            copies.append(self.to_store(by_page[packed.to(slots.device)].flatten(), pages[packed], None))
        return [*copies, self.to_store(by_page[raw.to(slots.device)].flatten(), pages[raw], rest[raw])]

    def to_store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None) -> PageCopy:
        """Return the copy of `pages`, which are all packed; with `rest`, all pages are raw."""
        mover, pool_page_bytes = self.mover if rest is None else self._raw, self.mover.ends[-1]
        page_bytes = mover.ends[-1]
        segments: tuple[PageSegment, ...] = (PageSegment(pages.numpy(), 0, pool_page_bytes),)
        if rest is not None:
            segments = (*segments, PageSegment(rest.numpy(), pool_page_bytes, page_bytes))
        return PageCopy(mover, segments, slots, len(pages), len(pages) * page_bytes)


def gather(
    mover: PageMover | PagePacker,
    slots: torch.Tensor,
    staging: torch.Tensor,
    first_layer: int,
    num_layers: int,
    misfits: torch.Tensor | None,
) -> None:
    """Fill staging memory from the rows at `slots`. If pages are packed, `misfits` counts the tiles that do not fit."""
    if isinstance(mover, PageMover):
        mover.gather(slots, staging, first_layer, num_layers)
    else:
        assert misfits is not None, "packed pages may not fit"
        mover.gather(slots, staging, first_layer, num_layers, misfits)
