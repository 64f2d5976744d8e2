"""Base of the stress tests of transfers: slot spaces of every layout, and tiers that know all their bytes.

Each content has a number. A bank holds the bytes of each number twice: in the order of a host page, and cut by the
layout into the rows of a pool. A tier knows the number of every device page and host page, until a failed copy may have
written there. So tests compare bytes that the tested code has not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hicache.build.factory import build_transfer
from hicache.build.packing import pool_page_bytes
from hicache.config import AdvancedConfig, EngineConfig
from hicache.device import (
    HybridLinearKVPool,
    Mamba2CacheParams,
    Mamba2StateShape,
    MambaPool,
    MHATokenToKVPool,
    NSATokenToKVPool,
    SlotSpace,
    SWAKVPool,
)
from hicache.host.pool import HostPagePool
from hicache.kernels.pack import PagePacker
from hicache.transfer import TransferBackend, TransferOp

Ids = np.ndarray
ON_DEVICE, ON_HOST = 24, 28  # host pages that each tier can hold
NUM_CONTENTS = 251
POISON, ZEROS, UNKNOWN = 0, -1, -2
BF16 = torch.bfloat16
NUM_LAYERS = 5


def mha(device: str) -> tuple[SlotSpace, ...]:
    return MHATokenToKVPool(ON_DEVICE * 16, 4, BF16, 2, 64, 3, device, False, v_head_dim=24).slot_spaces


def wide(device: str) -> tuple[SlotSpace, ...]:
    """Slot spaces with rows that are wide enough for the copy engine; kernels copy smaller rows."""
    return MHATokenToKVPool(ON_DEVICE * 16, 16, BF16, 8, 128, 3, device, False).slot_spaces


def nsa(device: str) -> tuple[SlotSpace, ...]:
    return NSATokenToKVPool(ON_DEVICE * 16, 4, BF16, 24, 8, 3, device, False).slot_spaces


def swa(device: str) -> tuple[SlotSpace, ...]:
    return SWAKVPool(ON_DEVICE * 8, ON_DEVICE * 8, 4, BF16, 2, 8, [0, 1, 4], [2, 6], device).slot_spaces


def hybrid(device: str) -> tuple[SlotSpace, ...]:
    states = MambaPool(ON_DEVICE, Mamba2CacheParams(Mamba2StateShape.create(1, 16, 1, 4, 4, 5, 4), [1, 3, 4]), device)
    return HybridLinearKVPool(ON_DEVICE * 8, BF16, 4, 2, 8, [2, 7], device, states).slot_spaces


def equal(device: str) -> tuple[SlotSpace, ...]:
    return MHATokenToKVPool(ON_DEVICE * 16, 4, BF16, 2, 64, 3, device, False).slot_spaces


@dataclass(frozen=True)
class Layout:
    """Functions that build a pool's slot spaces on a device, and the tokens of a host page. A recurrent state is a
    complete page."""

    build: Callable[[str], tuple[SlotSpace, ...]]
    host_page: int
    is_packed: bool = False


LAYOUTS = {
    "mha": Layout(mha, 16),
    "mha, wide": Layout(wide, 16),
    "nsa": Layout(nsa, 16),
    "swa": Layout(swa, 8),
    "hybrid": Layout(hybrid, 8),
    "packed": Layout(equal, 16, is_packed=True),
}


class Watch:
    """The results of the comparisons in a forward. On CUDA the results are read later, because the host must not wait
    for the device."""

    def __init__(self, on_cuda: bool) -> None:
        self._pending: list[tuple[torch.Tensor, str]] = []
        self._at_once = not on_cuda

    def note(self, differs: torch.Tensor, what: str) -> None:
        self._pending.append((differs, what))
        if self._at_once or len(self._pending) >= 256:
            self.settle()

    def settle(self) -> None:
        """Raise if any comparison found a difference. Waits for the device."""
        if self._pending:
            differs = torch.stack([flag for flag, _ in self._pending]).tolist()
            wrong = [what for (_, what), flag in zip(self._pending, differs, strict=True) if flag]
            self._pending.clear()
            assert not wrong, f"a forward read other bytes than the truth: {wrong[:4]}"


@dataclass(frozen=True)
class Spot:
    """The locations of contents on the device, as int64 tensors there. `blocks`: device pages, `slots`: all of their
    slots."""

    contents: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor


class HostPages(NamedTuple):
    """The host pages of some contents, int64 `[pages]`. `rest`: the second host page of each content, 0 if it has
    none."""

    pages: torch.Tensor
    rest: torch.Tensor

    @property
    def held(self) -> torch.Tensor:
        return torch.cat([self.pages, self.rest[self.rest > 0]])


class Tier:
    """A slot space with its host pool and backend, the location of each content, and the free blocks of the device."""

    def __init__(
        self, space: SlotSpace, page_tokens: int, staging_bytes: int, packer: PagePacker | None = None
    ) -> None:
        self.space, self.page_tokens, self.device = space, page_tokens, space.device
        self.on_cuda = space.device.type == "cuda"
        self.block_tokens = space.layout.device_page_size
        self.parts = page_tokens // self.block_tokens  # device pages of a host page
        config = EngineConfig(
            device_tokens=space.num_slots, host_bytes=1, page_size=self.block_tokens, host_page_size=page_tokens,
            device=str(space.device),
            advanced=AdvancedConfig(staging_bytes=staging_bytes, transfer_chunk_tokens=2 * page_tokens),
        )  # fmt: skip
        page_bytes = space.layout.page_bytes(page_tokens) if packer is None else pool_page_bytes(packer)
        self.host = HostPagePool(
            space.layout, page_tokens, (ON_HOST + 1) * page_bytes, pin=self.on_cuda, page_bytes=page_bytes
        )
        self.host.arena.rows_per_chunk = 5  # as if memory were pinned in pieces, which no copy may cross
        backend, self.counter = build_transfer(config, space, self.host, packer)
        assert backend is not None
        self.backend: TransferBackend = backend
        self.host.bytes_of.zero_()  # the backend may have measured the link with these pages
        self.rows = [
            [buffer.flatten(1).view(torch.uint8) for buffer in space.layer_buffers(layer)]
            for layer in space.layout.layers
        ]
        self.on_device = np.full((space.num_slots // self.block_tokens, 2), (ZEROS, 0))  # content, part of the page
        self.on_host = np.full(ON_HOST + 1, ZEROS)
        self.free = np.arange(len(self.on_device)) > 0  # block 0 is the sink
        self._fill_bank()

    def _make_pages(self) -> torch.Tensor:
        """Set `pages` to the host pages of all contents, `[contents, page_bytes]`. Returns the raw bytes of all
        contents in host order."""
        shape = (NUM_CONTENTS, self.space.layout.page_bytes(self.page_tokens))
        self.pages = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
        return self.pages

    def _fill_bank(self) -> None:
        """Set `bank[layer][buffer]` to the rows of all contents: [contents, rows, row_bytes]."""
        layout, pages = self.space.layout, self._make_pages()
        self.bank: list[list[torch.Tensor]] = []
        start = 0
        for layer in layout.layers:
            self.bank.append([])
            for spec in layout.specs_of(layer):
                count = self.page_tokens if spec.per == "token" else self.parts
                part = pages[:, start : start + count * spec.row_bytes]
                self.bank[-1].append(part.reshape(NUM_CONTENTS, count, spec.row_bytes).to(self.device))
                start += count * spec.row_bytes
        assert start == pages.shape[1]

    # Host pages

    def num_pool_pages(self, contents: Ids) -> int:
        """The number of host pages that these contents take."""
        return len(contents)

    def divide(self, pool_pages: torch.Tensor, contents: Ids) -> HostPages:
        """Assign the host pages `pool_pages` to `contents`."""
        return HostPages(pool_pages, torch.zeros_like(pool_pages))

    def store(self, slots: torch.Tensor, at: HostPages) -> TransferOp:
        return self.backend.store(slots, at.pages)

    def stored(self, op: TransferOp, at: HostPages, contents: Ids) -> None:
        """Record that a store has succeeded: the host pages `at` hold `contents`."""
        self.on_host[at.pages.numpy()] = contents

    def host_differs(self, pool_pages: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
        """Whether each host page does not hold its content: bool `[pool_pages]`."""
        expected = self.pages[contents.clamp(min=0)]
        expected[contents == ZEROS] = 0
        return (self.host.bytes_of[pool_pages] != expected).any(1) & (contents != UNKNOWN)

    # Locations

    def take(self, num_pages: int, rng: np.random.Generator) -> Ids:
        """Take free blocks for some pages: the first run that is long enough, or random blocks in random order."""
        count, free = num_pages * self.parts, np.flatnonzero(self.free)
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        contiguous = len(starts) > 0 and rng.random() < 0.5
        blocks = free[starts[0] : starts[0] + count] if contiguous else rng.permutation(free)[:count]
        assert len(blocks) == count
        self.free[blocks] = False
        return blocks

    def available(self) -> int:
        """The number of pages that fit in the free blocks."""
        return int(self.free.sum()) // self.parts

    def spot(self, blocks: Ids, contents: Ids) -> Spot:
        slots = self.slots_on_host(blocks).numpy()
        return Spot(self._upload(contents), self._upload(blocks), self._upload(slots))

    def slots_on_host(self, blocks: Ids) -> torch.Tensor:
        """The slots of blocks in host memory, as from a scheduler that has chosen the blocks itself."""
        return torch.from_numpy((blocks[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1))

    def _upload(self, values: Ids) -> torch.Tensor:
        """Copy values to the device after the work that is queued there. The host does not wait."""
        tensor = torch.from_numpy(values.astype(np.int64))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_cuda else tensor

    def segments(self, blocks: Ids, contents: Ids | int) -> None:
        """Record that `blocks` hold `contents`, page by page."""
        self.on_device[blocks, 0] = contents if isinstance(contents, int) else np.repeat(contents, self.parts)
        self.on_device[blocks, 1] = np.tile(np.arange(self.parts), len(blocks) // self.parts)

    # The work of a forward, on the current stream

    def write(self, layer: int, spot: Spot) -> None:
        for rows, bank in zip(self.rows[layer], self.bank[layer], strict=True):
            rows[self._at(rows, spot)] = bank[spot.contents].flatten(0, 1)

    def differs(self, layer: int, spot: Spot) -> torch.Tensor:
        """Whether any row of the layer differs from its content: bool, 0-dimensional, on the device."""
        found = [
            (rows[self._at(rows, spot)] != bank[spot.contents].flatten(0, 1)).any()
            for rows, bank in zip(self.rows[layer], self.bank[layer], strict=True)
        ]
        return torch.stack(found).any()

    def _at(self, rows: torch.Tensor, spot: Spot) -> torch.Tensor:
        return spot.slots if len(rows) == self.space.num_slots else spot.blocks

    # Comparing everything, when nothing is in flight

    def audit(self) -> None:
        for layer, (buffers, banks) in enumerate(zip(self.rows, self.bank, strict=True)):
            for rows, bank in zip(buffers, banks, strict=True):
                found = rows.cpu().reshape(len(self.on_device), -1)
                contents, parts = torch.from_numpy(self.on_device).unbind(1)
                expected = bank.cpu().reshape(NUM_CONTENTS, self.parts, -1)[contents.clamp(min=0), parts]
                expected[contents == ZEROS] = 0
                wrong = (found != expected).any(1) & (contents != UNKNOWN)
                assert not wrong.any(), f"layer {layer}: blocks {wrong.nonzero().flatten().tolist()} are not the truth"
        wrong = self.host_differs(torch.arange(len(self.on_host)), torch.from_numpy(self.on_host))
        assert not wrong.any(), f"host pages {wrong.nonzero().flatten().tolist()} are not the truth"
        self.host.check()


class TransferFixture:
    """A context with a pool of `NUM_LAYERS` layers, a host pool and the started backend between them, which it closes.
    Host pages have 16 tokens."""

    def __init__(self, device_name: str, heads: int, dim: int, v_dim: int, page: int, staging: int) -> None:
        device, size, host_page = torch.device(device_name), 512, 16
        config = EngineConfig(
            device_tokens=size, host_bytes=1, host_page_size=host_page, page_size=page, device=str(device),
            advanced=AdvancedConfig(staging_bytes=staging, transfer_chunk_tokens=64),
        )  # fmt: skip
        self.pool = MHATokenToKVPool(
            size, page, torch.bfloat16, heads, dim, NUM_LAYERS, device, False, v_head_dim=v_dim
        )
        page_bytes = self.pool.layout.page_bytes(host_page)
        self.host = HostPagePool(self.pool.layout, host_page, 33 * page_bytes, pin=device.type == "cuda")
        backend, self.counter = build_transfer(config, self.pool, self.host)
        assert backend is not None
        self.backend: TransferBackend = backend
        self.backend.start()
        self.buffers = [b for layer in range(NUM_LAYERS) for b in self.pool.layer_buffers(layer)]
        for buffer in self.buffers:
            buffer.normal_()

    def __enter__(self) -> TransferFixture:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.host.close()

    def fill(self, value: float) -> None:
        for buffer in self.buffers:
            buffer.fill_(value)

    def warm_up(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy in both directions once, so that nothing is compiled while a test holds the device."""
        self.backend.store(slots, pages).wait()
        self.load(pages, slots)[1].wait()

    def load(self, pages: torch.Tensor, slots: torch.Tensor) -> tuple[int, TransferOp]:
        """Submit a load. Returns the id of the load and the operation."""
        load_id = self.counter.begin()
        return load_id, self.backend.load(pages, slots, load_id)
