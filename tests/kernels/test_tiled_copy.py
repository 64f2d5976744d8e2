"""Moves of rows between slots, in all buffers at once, against indexing by a copy."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels import tiled_copy
from hicache.kernels.tiled_copy import TiledCopy, tile_bytes_for

SLOTS = 60
# (rows of each buffer, dtype): alike and 16-byte aligned; unlike; odd bytes.
POOLS = [
    ([(2, 64)] * 4, torch.bfloat16),
    ([(3, 8), (3, 5), (1, 300)], torch.float32),
    ([(7,), (1, 13)], torch.uint8),
    ([(2, 8), (2, 24)], torch.float8_e4m3fn),
]


def buffers_of(rows: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for row in rows:
        raw = torch.randint(
            0, 256, (SLOTS, *row[:-1], row[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator
        )
        made.append(raw.view(dtype).to(device))
    return made


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def oracle(buffers: list[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    moved = [as_bytes(b).clone() for b in buffers]
    for b in moved:
        b[target.long()] = b[source.long()].clone()
    return moved


def orders() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Targets and sources: apart, shifted by one either way, a ring, in place, one to many, at random."""
    generator = torch.Generator().manual_seed(2)
    front, back = torch.arange(0, 29), torch.arange(30, 59)
    return [
        ("apart", back, front),
        ("up", front + 1, front),
        ("down", front, front + 1),
        ("ring", front, front.roll(1)),
        ("in place", front, front),
        ("one to many", back, torch.full_like(back, 31)),
        (
            "random",
            torch.randperm(SLOTS, generator=generator)[:37],
            torch.randint(0, SLOTS, (37,), generator=generator),
        ),
    ]


@pytest.mark.parametrize("path", ["few", "many", "many in groups"])
@pytest.mark.parametrize(("rows", "dtype"), POOLS)
def test_moves_read_all_before_they_write(
    device: str, kernels: str, path: str, rows: list[tuple[int, ...]], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """However sources and targets overlap, each buffer ends as if copied first, by either kernel, in any grouping."""
    if path != "few":
        monkeypatch.setattr(tiled_copy, "FEW_BYTES", 0)
    if path == "many in groups":
        monkeypatch.setattr(tiled_copy, "STAGING_BYTES", 5000)
    buffers = buffers_of(rows, dtype, device)
    mover = TiledCopy(buffers, kernels)
    for index, (name, target, source) in enumerate(orders()):
        expected = oracle(buffers, target, source)
        width = torch.int32 if index % 2 else torch.int64
        mover.move(target.to(device, width), source.to(device, width))
        assert all(torch.equal(as_bytes(b), e) for b, e in zip(buffers, expected, strict=True)), name


def test_slots_of_a_wider_buffer(device: str, kernels: str) -> None:
    """Buffers whose slots are apart (views of a larger tensor) move their rows and nothing between them."""
    whole = torch.arange(SLOTS * 3 * 8, dtype=torch.int32, device=device).view(SLOTS, 3, 8)
    before = whole.clone()
    TiledCopy([whole[:, 0], whole[:, 2]], kernels).move(
        torch.tensor([1, 2, 9], device=device), torch.tensor([0, 1, 5], device=device)
    )
    for part in (0, 2):
        before[[1, 2, 9], part] = before[[0, 1, 5], part].clone()
    assert torch.equal(whole, before)


@pytest.mark.parametrize("tile_bytes", [128, 512])
def test_sizes_around_a_power_of_two(device: str, kernels: str, tile_bytes: int) -> None:
    """No rows, one, and numbers around powers of two move right, with any tile."""
    buffers = buffers_of([(2, 40)] * 2, torch.bfloat16, device)
    mover = TiledCopy(buffers, kernels, tile_bytes)
    for n in (0, 1, 2, 3, 15, 16, 17):
        target, source = torch.arange(n), torch.arange(n) + 20 - n
        expected = oracle(buffers, target, source)
        mover.move(target.to(device), source.to(device))
        assert all(torch.equal(as_bytes(b), e) for b, e in zip(buffers, expected, strict=True)), n


def test_wide_rows_go_in_wide_tiles() -> None:
    """Tiles are 512 bytes from strides of 8192, 256 from 4096, else 128."""
    strides = (64, 4095, 4096, 8191, 8192, 1 << 20)
    assert [tile_bytes_for(n) for n in strides] == [128, 128, 256, 256, 512, 512]


def test_wrong_arguments_are_named() -> None:
    """Moves of unequal numbers, buffers of unequal slots or with gaps in a row raise ValueError."""
    buffer = torch.zeros(4, 2, 3)
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"targets \(1,\).*sources \(2,\)"):
        TiledCopy([buffer], "torch").move(one, two)
    with pytest.raises(ValueError, match=r"buffers of \[3, 4\] slots"):
        TiledCopy([buffer, buffer[:3]], "torch")
    with pytest.raises(ValueError, match="need contiguous rows"):
        TiledCopy([buffer.transpose(1, 2)], "torch")


@pytest.mark.gpu
def test_a_move_makes_no_one_wait() -> None:
    """Moves of few and of many rows run without a wait for the device, and right, at a size with many programs."""
    slots = torch.randperm(8192, device="cuda")
    buffers = [torch.randint(0, 1 << 30, (8192, 8, 64), dtype=torch.int32, device="cuda") for _ in range(4)]
    mover = TiledCopy(buffers, "triton")
    for n in (16, 512, 4096):
        target, source = slots[:n], slots[n // 2 : n // 2 + n]
        expected = [b.clone() for b in buffers]
        for b in expected:
            b[target] = b[source].clone()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            mover.move(target, source)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(b, e) for b, e in zip(buffers, expected, strict=True)), n
