"""Transfers of packed pages, in one suite for both backends: pages that fit, pages that do not fit, and both in one
load."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hicache.build.factory import build_transfer
from hicache.build.packing import packer_of, pool_page_bytes
from hicache.config import AdvancedConfig, EngineConfig
from hicache.device import MHATokenToKVPool, NSATokenToKVPool, SlotSpace
from hicache.errors import ConfigError
from hicache.host.pool import HostPagePool
from hicache.kernels.page_copy import PageMover
from hicache.transfer.plan import ASSUMED, Shape, choose
from hicache.transfer.segments import PageCopies
from transfer_hooks import Move, at_each_move

BF16 = torch.bfloat16
PAGE, NUM_PAGES, LAYERS = 16, 24, 5
SIZE = 2 * NUM_PAGES * PAGE


class Packed:
    """A context with a pool, a host pool of packed pages, and the started backend between them, which it closes."""

    def __init__(self) -> None:
        pool = MHATokenToKVPool(SIZE, 4, BF16, 4, 40, LAYERS, "cpu", False)
        (self.space,) = pool.slot_spaces
        config = EngineConfig(
            device_tokens=SIZE, host_bytes=1, host_page_size=PAGE, page_size=4, dtype="bfloat16", kv_packing="4",
            advanced=AdvancedConfig(staging_bytes=1 << 16, transfer_chunk_tokens=3 * PAGE),
        )  # fmt: skip
        packer = packer_of(config, "full", self.space, PAGE)
        assert packer is not None
        size = pool_page_bytes(packer)
        self.host = HostPagePool(self.space.layout, PAGE, (2 * NUM_PAGES + 2) * size, pin=False, page_bytes=size)
        backend, self.counter = build_transfer(config, self.space, self.host, packer)
        assert backend is not None
        self.backend = backend
        backend.start()

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.host.close()

    def rows(self) -> Iterator[torch.Tensor]:
        """The rows of each buffer, as bits."""
        for layer in self.space.layout.layers:
            for buffer in self.space.layer_buffers(layer):
                yield buffer.flatten(1).view(torch.int16)

    def fill(self, random_bits: torch.Tensor) -> None:
        """Fill all slots with numbers of similar size, and the `random_bits` slots with random bits."""
        generator = torch.Generator().manual_seed(5)
        for rows in self.rows():
            rows.copy_((torch.rand(rows.shape, generator=generator) + 0.25).bfloat16().view(torch.int16))
            bits = torch.randint(-(1 << 15), 1 << 15, (len(random_bits), rows.shape[1]), generator=generator)
            rows[random_bits] = bits.to(torch.int16)

    def copied(self, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Store pages. Pages that do not fit get a second host page; returns the second host pages."""
        op = self.backend.store(slots, pages)
        op.wait()
        rest, at = torch.zeros(len(pages), dtype=torch.int64), torch.tensor(list(op.misfits))
        rest[at] = NUM_PAGES + torch.arange(1, len(at) + 1)
        again = self.backend.store(slots.view(-1, PAGE)[at].flatten(), pages[at], rest[at])
        again.wait()
        assert op.error is again.error is None and not len(again.misfits)
        return rest


def test_raw_pages_arrive_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward waits only for its own layer, even if pages do not fit when packed: later layers are moved later. The
    test uses loads with some packed pages, and loads without packed pages."""
    go_on, is_behind = threading.Event(), threading.Event()
    go_on.set()

    def hold(move: Move) -> None:
        if move.first_layer:
            is_behind.set()
            assert go_on.wait(60)

    at_each_move(monkeypatch, hold)
    for num_random in (3, NUM_PAGES):
        with Packed() as fixture:
            go_on.set()
            pages = torch.arange(NUM_PAGES) + 1
            blocks = torch.randperm(SIZE // 4 - 1, generator=torch.Generator().manual_seed(2))[: SIZE // 8, None] + 1
            slots = (blocks * 4 + torch.arange(4)).flatten()
            fixture.fill(slots[: num_random * PAGE])
            rest = fixture.copied(slots, pages)
            first, *_, last = [rows[slots] for rows in fixture.rows()]
            for rows in fixture.rows():
                rows.zero_()
            go_on.clear()
            is_behind.clear()
            load_id = fixture.counter.begin()
            op = fixture.backend.load(pages, slots, load_id, rest)
            fixture.counter.set_consumer(load_id)
            fixture.counter.wait_until(0)
            assert is_behind.wait(60)
            buffers = list(fixture.rows())
            assert torch.equal(buffers[0][slots], first) and not buffers[-1].any()
            go_on.set()
            op.wait()
            assert op.error is None and torch.equal(buffers[-1][slots], last)


@pytest.mark.parametrize("pool_page_bytes", [127, 257])
def test_two_places_must_hold_a_raw_page(pool_page_bytes: int) -> None:
    """A packed page must have at least half the size of a raw page, and at most the size of a raw page."""

    class Sized:
        ends = (0, pool_page_bytes)

    mover = PageMover([[torch.zeros(64, 8, dtype=BF16)]], PAGE, "torch")
    with pytest.raises(ConfigError, match="kv_packing"):
        PageCopies(mover, Sized())  # type: ignore[arg-type]


def test_packed_pages_always_go_through_staging() -> None:
    """Packed pages are staged even if raw pages of their size would be copied directly. A load of no page is staged
    too."""
    small = Shape(layer_bytes=64, num_layers=4, num_pages=2, num_runs=2)
    assert choose(ASSUMED.up, small, 1 << 20, up=True).method == "zero_copy"
    for up in (True, False):
        for num_pages in (0, 1, 2, 4096):
            packed = Shape(layer_bytes=64, num_layers=4, num_pages=num_pages, num_runs=num_pages, is_packed=True)
            plan = choose(ASSUMED.up if up else ASSUMED.down, packed, 1 << 20, up=up)
            assert plan.method in ("strided", "batched")
            assert [layer for first, end in plan.groups for layer in range(first, end)] == [0, 1, 2, 3]


def test_slot_spaces_of_rows_for_several_tokens_stay_raw() -> None:
    """Slot spaces whose rows hold several tokens are not packed, however a device pool lays them out."""
    (space,) = NSATokenToKVPool(SIZE, 4, BF16, 24, 8, 3, "cpu", False).slot_spaces
    config = EngineConfig(device_tokens=SIZE, host_page_size=PAGE, page_size=4, dtype="bfloat16", kv_packing="3")
    with pytest.raises(ConfigError, match="several tokens"):
        packer_of(config, "full", space, PAGE)
    assert isinstance(space, SlotSpace) and packer_of(config, "mamba", space, PAGE) is None
