"""Transfers of packed pages, one suite for both backends: pages that fit, pages that do not, and both in one load."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cases import pairwise
from hicache.build.factory import build_transfer
from hicache.build.packing import packer_of, place_bytes
from hicache.config import AdvancedConfig, EngineConfig
from hicache.device import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool, SlotSpace
from hicache.errors import ConfigError
from hicache.host import HostPagePool
from hicache.kernels.page_copy import PageMover
from hicache.transfer.placed import PagePlaces
from hicache.transfer.plan import ASSUMED, Shape, choose
from transfer_hooks import Move, at_each_move, force_methods

BF16 = torch.bfloat16
PAGE, NUM_PAGES, LAYERS = 16, 24, 5
SIZE = 2 * NUM_PAGES * PAGE


class Packed:
    """A pool, a host pool of packed pages and the started backend between them. A context that closes it."""

    def __init__(self, device: str, kind: str, bits: str, page_size: int, staging_bytes: int) -> None:
        common = {"size": SIZE, "page_size": page_size, "dtype": BF16, "layer_num": LAYERS, "device": device}
        pool = (
            MHATokenToKVPool(**common, head_num=4, head_dim=40, enable_memory_saver=False)
            if kind == "mha"
            else MLATokenToKVPool(**common, kv_lora_rank=48, qk_rope_head_dim=16, enable_memory_saver=False)
        )
        (self.space,) = pool.slot_spaces
        config = EngineConfig(
            device_tokens=SIZE, host_bytes=1, host_page_size=PAGE, page_size=page_size, device=device,
            dtype="bfloat16", kv_packing=bits,  # type: ignore[arg-type]
            advanced=AdvancedConfig(staging_bytes=staging_bytes, transfer_chunk_tokens=3 * PAGE),
        )  # fmt: skip
        packer = packer_of(config, "full", self.space, PAGE)
        assert packer is not None
        self.packer, size = packer, place_bytes(packer)
        self.host = HostPagePool(
            self.space.layout, PAGE, (2 * NUM_PAGES + 2) * size, pin=device == "cuda", page_bytes=size
        )
        self.host.arena.rows_per_chunk = 7
        backend, self.counter = build_transfer(config, self.space, self.host, packer)
        assert backend is not None
        self.backend, self.device = backend, device
        self.host.bytes_of.zero_()
        backend.start()

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.host.close()

    def rows(self) -> Iterator[torch.Tensor]:
        """Of each buffer, as bits."""
        for layer in self.space.layout.layers:
            for buffer in self.space.layer_buffers(layer):
                yield buffer.flatten(1).view(torch.int16)

    def fill(self, wild: torch.Tensor, seed: int = 5) -> None:
        """Numbers of like size, and random bits in the `wild` slots."""
        generator = torch.Generator().manual_seed(seed)
        for rows in self.rows():
            rows.copy_((torch.rand(rows.shape, generator=generator) + 0.25).bfloat16().view(torch.int16))
            bits = torch.randint(-(1 << 15), 1 << 15, (len(wild), rows.shape[1]), generator=generator)
            rows[wild.to(rows.device)] = bits.to(torch.int16).to(rows.device)

    def held(self) -> list[torch.Tensor]:
        return [rows.clone() for rows in self.rows()]

    def slots(self, seed: int, page_size: int, num_pages: int) -> torch.Tensor:
        """Of some pages: whole device pages, in any order."""
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(SIZE // page_size - 1, generator=generator)[: num_pages * PAGE // page_size] + 1
        return (blocks[:, None] * page_size + torch.arange(page_size)).flatten()

    def copied(self, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Store, with second places for what does not fit; returns them."""
        op = self.backend.store(slots, pages)
        op.wait()
        assert op.error is None and op.done() and op.num_bytes == len(pages) * self.packer.page_bytes
        rest = torch.zeros(len(pages), dtype=torch.int64)
        if len(op.misfits):
            at = torch.tensor(list(op.misfits))
            rest[at] = NUM_PAGES + torch.arange(1, len(at) + 1)
            again = self.backend.store(slots.view(-1, PAGE)[at.to(slots.device)].flatten(), pages[at], rest[at])
            again.wait()
            assert again.error is None and not len(again.misfits)
            assert again.num_bytes == len(at) * self.space.layout.page_bytes(PAGE)
        return rest


@pairwise(
    num_wild=[0, 5, NUM_PAGES],
    kind=["mha", "mla"],
    bits=["3", "4"],
    page_size=[1, 4, 16],
    staging_bytes=[1 << 16, 1 << 20],
)
def test_every_bit_comes_back(
    device: str, kind: str, bits: str, page_size: int, staging_bytes: int, num_wild: int
) -> None:
    """To other slots, from scattered host pages: those that fit by layers, those that do not from two places; a
    consumer of each layer reads the truth, and other rows and places stay as they were."""
    with Packed(device, kind, bits, page_size, staging_bytes) as rig:
        pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)) + 1
        slots = rig.slots(2, page_size, NUM_PAGES).to(device)
        wild = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3))[:num_wild]
        rig.fill(slots.cpu().view(-1, PAGE)[wild].flatten())
        before = rig.held()
        rest = rig.copied(slots, pages)
        assert sorted(rest.nonzero().flatten().tolist()) == sorted(wild.tolist())
        assert not rig.host.bytes_of[NUM_PAGES + num_wild + 1 :].any() and not rig.host.bytes_of[0].any()
        assert not rig.host.bytes_of[:, rig.packer.page_bytes :].any()
        target = rig.slots(9, page_size, NUM_PAGES)
        rig.fill(torch.empty(0, dtype=torch.int64), seed=8)
        expected = rig.held()
        for rows, old in zip(expected, before, strict=True):
            rows[target.to(device)] = old[slots]
        load_id = rig.counter.begin()
        op = rig.backend.load(pages, target, load_id, rest if num_wild else None)
        rig.counter.set_consumer(load_id)
        buffers, per_layer = list(rig.rows()), 2 if kind == "mha" else 1
        for layer in range(LAYERS):
            rig.counter.wait_until(layer)
            for at in range(layer * per_layer, (layer + 1) * per_layer):
                assert torch.equal(buffers[at][target.to(device)], expected[at][target.to(device)])
        op.wait()
        assert op.error is None
        raw_bytes = rig.space.layout.page_bytes(PAGE)
        assert op.num_bytes == num_wild * raw_bytes + (NUM_PAGES - num_wild) * rig.packer.page_bytes
        assert all(torch.equal(rows, wanted) for rows, wanted in zip(rig.rows(), expected, strict=True))


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("method", ["strided", "batched"])
def test_each_method(monkeypatch: pytest.MonkeyPatch, device: str, method: str, is_raw: bool) -> None:
    """With several copies of either direction in flight at once, of pages that fit and of some that do not."""
    force_methods(monkeypatch, [method])  # type: ignore[list-item]
    with Packed(device, "mha", "4", 4, 1 << 16) as rig:
        slots = [rig.slots(seed, 4, 8).to(device) for seed in range(3)]
        rig.fill(torch.cat(slots).cpu() if is_raw else torch.empty(0, dtype=torch.int64))
        before = rig.held()
        places = (torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(4)) + 1).split(8)
        rest = [each.flip(0) + NUM_PAGES if is_raw else None for each in places]
        for op in [rig.backend.store(*copy) for copy in zip(slots, places, rest, strict=True)]:
            op.wait()
            assert op.error is None and not len(op.misfits)
        for rows in rig.rows():
            rows.zero_()
        loads = []
        for at, pages, second in zip(slots, places, rest, strict=True):
            loads.append(rig.backend.load(pages, at, rig.counter.begin(), second))
        for op in loads:
            op.wait()
            assert op.error is None
        everything = torch.cat(slots)
        for rows, old in zip(rig.rows(), before, strict=True):
            assert torch.equal(rows[everything], old[everything])


def test_raw_pages_arrive_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that do not fit make no forward wait for more than its layer: those behind it move later, in one load
    with packed pages and where no page fits."""
    go_on, is_behind = threading.Event(), threading.Event()
    go_on.set()

    def hold(move: Move) -> None:
        if move.first_layer:
            is_behind.set()
            assert go_on.wait(60)

    at_each_move(monkeypatch, hold)
    for num_wild in (3, NUM_PAGES):
        with Packed("cpu", "mha", "4", 4, 1 << 16) as rig:
            go_on.set()
            pages, slots = torch.arange(NUM_PAGES) + 1, rig.slots(2, 4, NUM_PAGES)
            rig.fill(slots[: num_wild * PAGE])
            rest = rig.copied(slots, pages)
            first, *_, last = [rows[slots] for rows in rig.rows()]
            for rows in rig.rows():
                rows.zero_()
            go_on.clear()
            is_behind.clear()
            load_id = rig.counter.begin()
            op = rig.backend.load(pages, slots, load_id, rest)
            rig.counter.set_consumer(load_id)
            rig.counter.wait_until(0)
            assert is_behind.wait(60)
            buffers = list(rig.rows())
            assert torch.equal(buffers[0][slots], first) and not buffers[-1].any()
            go_on.set()
            op.wait()
            assert op.error is None and torch.equal(buffers[-1][slots], last)


@pytest.mark.parametrize("place_bytes", [127, 257])
def test_two_places_must_hold_a_raw_page(place_bytes: int) -> None:
    """What is less than half of a raw page, or more than one, is no size for a packed page."""

    class Sized:
        ends = (0, place_bytes)

    mover = PageMover([[torch.zeros(64, 8, dtype=BF16)]], PAGE, "torch")
    with pytest.raises(ConfigError, match="kv_packing"):
        PagePlaces(mover, Sized())  # type: ignore[arg-type]


def test_packed_pages_always_go_through_staging() -> None:
    """Whatever the sizes, where raw ones of these would be copied without; and for no page at all."""
    small = Shape(layer_bytes=64, num_layers=4, num_pages=2, num_runs=2)
    assert choose(ASSUMED.up, small, 1 << 20, up=True).method == "zero_copy"
    for up in (True, False):
        for num_pages in (0, 1, 2, 4096):
            packed = Shape(layer_bytes=64, num_layers=4, num_pages=num_pages, num_runs=num_pages, is_packed=True)
            plan = choose(ASSUMED.up if up else ASSUMED.down, packed, 1 << 20, up=up)
            assert plan.method in ("strided", "batched")
            assert [layer for first, end in plan.groups for layer in range(first, end)] == [0, 1, 2, 3]


def test_slot_spaces_of_rows_for_several_tokens_stay_raw() -> None:
    """However a device pool lays them out."""
    (space,) = NSATokenToKVPool(SIZE, 4, BF16, 24, 8, 3, "cpu", False).slot_spaces
    config = EngineConfig(device_tokens=SIZE, host_page_size=PAGE, page_size=4, dtype="bfloat16", kv_packing="3")
    with pytest.raises(ConfigError, match="several tokens"):
        packer_of(config, "full", space, PAGE)
    assert isinstance(space, SlotSpace) and packer_of(config, "mamba", space, PAGE) is None
