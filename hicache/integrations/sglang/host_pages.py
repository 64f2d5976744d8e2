"""Copies a page of SGLang's host pools to and from a contiguous array of bytes, for any layout of the pool.

SGLang returns the addresses and the order of the pieces of a page (`get_page_buffer_meta`):

    layer_first                      2 * layers pieces per page: K and V of each layer
    page_first, page_first_direct    2 pieces: K and V of all layers
    latent attention, index keys     1 piece per page, or 1 per layer
    Mamba states                     1 piece per component

Some layouts of sidecar pools have no pieces; these pools return flat copies of their pages. An anchor pool whose bytes
are all in sidecar pools has no bytes. The store keeps a marker page for each page of this pool, so that a look-up finds
which pages exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from hicache.errors import ConfigError
from hicache.storage import PageBuffer, PageFilter, PageFormat

MARKER_BYTES = 64
_FILTERED_BYTES = (2, 4, 8)


class Piece(NamedTuple):
    address: int
    num_bytes: int


Location: TypeAlias = Any  # the location of a page in the pool, in the form that its `HostPages` uses


class HostPages(Protocol):
    """The pages of one host pool. `form`: name of the order of a page's bytes. `page_slots`: number of slots in a page.

    `locations` returns the locations of pages, given their slots `[pages * page_slots]`. `gather` copies a page of the
    pool into `page`; `scatter` copies `page` into the pool. `gather` and `scatter` access the pool's memory, so the
    pool must exist.
    """

    form: str
    page_bytes: int
    page_slots: int

    def locations(self, slots: torch.Tensor) -> Sequence[Location]: ...

    def gather(self, location: Location, page: PageBuffer) -> None: ...

    def scatter(self, location: Location, page: PageBuffer) -> None: ...


class PiecedPages:
    """Pages that are copied piece by piece, in the order in which the pool returns the pieces."""

    form = "pieces"

    def __init__(self, pool: Any, sizes: Sequence[int]) -> None:
        self._pool = pool
        self._num_pieces = len(sizes)
        self.page_bytes = sum(sizes)
        self.page_slots = pool.page_size

    def locations(self, slots: torch.Tensor) -> list[list[Piece]]:
        addresses, sizes = self._pool.get_page_buffer_meta(slots)
        pieces = [Piece(*piece) for piece in zip(addresses, sizes, strict=True)]
        return [pieces[i : i + self._num_pieces] for i in range(0, len(pieces), self._num_pieces)]

    def gather(self, location: list[Piece], page: PageBuffer) -> None:
        target = page.ctypes.data
        for address, num_bytes in location:
            ctypes.memmove(target, address, num_bytes)
            target += num_bytes

    def scatter(self, location: list[Piece], page: PageBuffer) -> None:
        source = page.ctypes.data
        for address, num_bytes in location:
            ctypes.memmove(address, source, num_bytes)
            source += num_bytes


class FlatPages:
    """Pages that the pool itself flattens. A location is the first slot of a page."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        page = pool.get_dummy_flat_data_page()
        self._dtype = page.dtype
        self.page_bytes = page.nbytes
        self.page_slots = pool.page_size

    def locations(self, slots: torch.Tensor) -> list[int]:
        return slots[:: self.page_slots].tolist()

    def gather(self, location: int, page: PageBuffer) -> None:
        page[:] = as_bytes(self._pool.get_data_page(location, flat=True))

    def scatter(self, location: int, page: PageBuffer) -> None:
        self._pool.set_from_flat_data_page(location, torch.from_numpy(page).view(self._dtype))


class MarkerPages:
    """Pages without bytes. The stored page is a marker of zeros."""

    form = "marker"
    page_bytes = MARKER_BYTES

    def __init__(self, pool: Any) -> None:
        self.page_slots = pool.page_size

    def locations(self, slots: torch.Tensor) -> list[None]:
        return [None] * (len(slots) // self.page_slots)

    def gather(self, location: None, page: PageBuffer) -> None:
        page[:] = 0

    def scatter(self, location: None, page: PageBuffer) -> None:
        """Do nothing, because the page has no bytes."""


def host_pages(name: str, pool: Any, *, pieces: bool) -> HostPages:
    """Return the pages of `pool`. If `pieces` is False, use the byte order of the pool's flat pages, because the caller
    passes flat pages. Raises `ConfigError` if the pool supports neither pieces nor flat pages."""
    refusals = []
    if pieces:
        try:
            # A pool without bytes returns None, and its flat pages are empty.
            if (found := pool.get_page_buffer_meta(torch.arange(pool.page_size, dtype=torch.int64))) is not None:
                return PiecedPages(pool, found[1])
        except (NotImplementedError, ValueError) as error:  # pools without pieces raise these errors
            refusals.append(str(error))
    try:
        flat = FlatPages(pool)
    except NotImplementedError as error:
        refusals.append(str(error))
    else:
        return flat if flat.page_bytes else MarkerPages(pool)
    interface = "" if pieces else "interface_v1 to 1 and "
    raise ConfigError(
        f"SGLang's host pool {name} ({type(pool).__name__}, layout {pool.layout}) does not give its pages to a storage "
        f"backend: {'; '.join(refusals)}; set {interface}--hicache-mem-layout page_first"
    )


def page_format(pages: HostPages, dtype: torch.dtype) -> PageFormat:
    """Return the format of stored pages. If all numbers of a page have the same width, the format groups bytes of equal
    significance, because grouped bytes compress better."""
    width = dtype.itemsize
    if pages.form == "marker" or width not in _FILTERED_BYTES or pages.page_bytes % width:
        return PageFormat(pages.page_bytes)
    return PageFormat(pages.page_bytes, PageFilter("byte_shuffle", width))


def as_bytes(tensor: torch.Tensor) -> PageBuffer:
    """Return the bytes of a CPU tensor as an array. A tensor that is not contiguous is copied."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
