"""A page of SGLang's host pools as one run of bytes, whatever the pool's layout.

SGLang tells where the pieces of a page lie, and in which order (`get_page_buffer_meta`):

    layer_first                      2 * layers pieces a page: K and V of each layer
    page_first, page_first_direct    2 pieces: K and V of all layers
    latent attention, index keys     1 piece, or one a layer
    Mamba states                     one a component

Pools without such pieces (some layouts of sidecar pools) give flat copies; pools without bytes (anchors of pools whose
bytes all lie in sidecars) get a marker page, so that their pages exist like others.
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


Location: TypeAlias = Any  # where one page lies, as the pool's `HostPages` names it


class HostPages(Protocol):
    """The pages of one host pool. `form` names the order of their bytes, `page_slots` the slots of a page.

    `locations` finds pages by their slots, `[pages * page_slots]`; `gather` copies one into `page`, `scatter` copies it
    back. Their memory is the pool's, which must be alive.
    """

    form: str
    page_bytes: int
    page_slots: int

    def locations(self, slots: torch.Tensor) -> Sequence[Location]: ...

    def gather(self, location: Location, page: PageBuffer) -> None: ...

    def scatter(self, location: Location, page: PageBuffer) -> None: ...


class PiecedPages:
    """Pages that are copied piece by piece, in the pool's order."""

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
    """Pages that the pool flattens itself. A location is the first slot."""

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
    """Pages without bytes."""

    form = "marker"
    page_bytes = MARKER_BYTES

    def __init__(self, pool: Any) -> None:
        self.page_slots = pool.page_size

    def locations(self, slots: torch.Tensor) -> list[None]:
        return [None] * (len(slots) // self.page_slots)

    def gather(self, location: None, page: PageBuffer) -> None:
        page[:] = 0

    def scatter(self, location: None, page: PageBuffer) -> None:
        """There is nothing to copy."""


def host_pages(name: str, pool: Any, *, pieces: bool) -> HostPages:
    """The pages of `pool`. `pieces` False: in the order of its flat pages, for callers that pass those. `ConfigError`
    for a pool that does not give its pages so."""
    refusals = []
    if pieces:
        try:
            # None: a pool without bytes, which gives empty flat pages.
            if (found := pool.get_page_buffer_meta(torch.arange(pool.page_size, dtype=torch.int64))) is not None:
                return PiecedPages(pool, found[1])
        except (NotImplementedError, ValueError) as error:  # how pools say that they have no pieces
            refusals.append(str(error))
    try:
        flat = FlatPages(pool)
    except NotImplementedError as error:
        refusals.append(str(error))
    else:
        return flat if flat.page_bytes else MarkerPages(pool)
    interface = "" if pieces else "interface_v1 to 1 and "
    raise ConfigError(
        f"SGLang's host pool {name} ({type(pool).__name__}, layout {pool.layout}) gives its pages to no storage "
        f"backend: {'; '.join(refusals)}; set {interface}--hicache-mem-layout page_first"
    )


def page_format(pages: HostPages, dtype: torch.dtype) -> PageFormat:
    """Bytes of one significance compress better together, where the page is numbers of one width."""
    width = dtype.itemsize
    if pages.form == "marker" or width not in _FILTERED_BYTES or pages.page_bytes % width:
        return PageFormat(pages.page_bytes)
    return PageFormat(pages.page_bytes, PageFilter("byte_shuffle", width))


def as_bytes(tensor: torch.Tensor) -> PageBuffer:
    """The bytes of a tensor on the CPU; of a copy unless it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
