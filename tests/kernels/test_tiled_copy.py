"""Moves of rows between slots, in all buffers at once, compared with indexing through a copy."""

from __future__ import annotations

import pytest
import torch

from cases import KERNELS, pairwise, refused
from hicache.kernels import tiled_copy
from hicache.kernels.tiled_copy import TiledCopy, tile_bytes_for
from kernel_case import as_bytes, no_waits, random_bits

SLOTS = 60
# (rows of each buffer, dtype): equal and 16-byte aligned rows; different rows; rows of odd sizes.
POOLS = {
    "alike": ([(2, 64)] * 4, torch.bfloat16),
    "unlike": ([(3, 8), (3, 5), (1, 300)], torch.float32),
    "odd": ([(7,), (1, 13)], torch.uint8),
    "fp8": ([(2, 8), (2, 24)], torch.float8_e4m3fn),
}
FRONT, BACK = torch.arange(0, 29), torch.arange(30, 59)
# Targets and sources of a move, by name.
ORDERS = {
    "apart": (BACK, FRONT),
    "up": (FRONT + 1, FRONT),
    "down": (FRONT, FRONT + 1),
    "ring": (FRONT, FRONT.roll(1)),
    "in place": (FRONT, FRONT),
    "one to many": (BACK, torch.full_like(BACK, 31)),
    "random": (torch.arange(37) * 23 % SLOTS, torch.arange(37) * 7 % 41),
}


def buffers_of(rows: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [random_bits(SLOTS, *row, dtype=dtype, seed=i).to(device) for i, row in enumerate(rows)]


def check_move(mover: TiledCopy, buffers: list[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> None:
    """Check that each buffer ends as if its rows had been copied out before the move."""
    expected = [as_bytes(b).clone() for b in buffers]
    for b in expected:
        b[target.long().cpu()] = b[source.long().cpu()].clone()
    mover.move(target, source)
    assert all(torch.equal(as_bytes(b), e) for b, e in zip(buffers, expected, strict=True))


@pairwise(kernels=KERNELS, path=["few", "many", "many in groups"], pool=list(POOLS), order=list(ORDERS))
def test_moves_read_all_before_they_write(
    device: str, kernels: str, path: str, pool: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However sources and targets overlap, each buffer ends as if its rows had been copied out first, with either
    kernel and any grouping."""
    monkeypatch.setattr(tiled_copy, "SCAN_ROWS", 32)
    if path != "few":
        monkeypatch.setattr(tiled_copy, "FEW_BYTES", 0)
    if path == "many in groups":
        monkeypatch.setattr(tiled_copy, "STAGING_BYTES", 5000)
    buffers = buffers_of(*POOLS[pool], device)
    mover = TiledCopy(buffers, kernels)
    target, source = ORDERS[order]
    for dtype in (torch.int64, torch.int32):
        check_move(mover, buffers, target.to(device, dtype), source.to(device, dtype))


def test_slots_of_a_wider_buffer(device: str, kernels: str) -> None:
    """Buffers whose slots are apart, as views of a larger tensor, move only their rows."""
    complete = torch.arange(SLOTS * 3 * 8, dtype=torch.int32, device=device).view(SLOTS, 3, 8)
    before = complete.clone()
    TiledCopy([complete[:, 0], complete[:, 2]], kernels).move(
        torch.tensor([1, 2, 9], device=device), torch.tensor([0, 1, 5], device=device)
    )
    for part in (0, 2):
        before[[1, 2, 9], part] = before[[0, 1, 5], part].clone()
    assert torch.equal(complete, before)


@pytest.mark.parametrize("tile_bytes", [128, 512])
def test_sizes_around_a_power_of_two(device: str, kernels: str, tile_bytes: int) -> None:
    """Moves of no row, of one, and of numbers around powers of two are correct with any tile size."""
    buffers = buffers_of([(2, 40)] * 2, torch.bfloat16, device)
    mover = TiledCopy(buffers, kernels, tile_bytes)
    for n in (0, 1, 2, 3, 15, 16, 17):
        target = torch.arange(n, device=device)
        check_move(mover, buffers, target, target + 20 - n)


def test_wide_rows_go_in_wide_tiles() -> None:
    """Tiles are 512 bytes for strides from 8192 bytes on, 256 bytes from 4096 on, else 128 bytes."""
    strides = (64, 4095, 4096, 8191, 8192, 1 << 20)
    assert [tile_bytes_for(n) for n in strides] == [128, 128, 256, 256, 512, 512]


def test_wrong_arguments_are_refused() -> None:
    """These raise: moves with unequal numbers of slots, buffers with unequal numbers of slots or with gaps in a row,
    and unknown kernels."""
    buffer = torch.zeros(4, 2, 3)
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    refused(
        ValueError,
        lambda: TiledCopy([buffer], "torch").move(one, two),
        lambda: TiledCopy([buffer], "torch").move(one[None], one[None]),
        lambda: TiledCopy([buffer], "torch").move(one.to("meta"), one),
        lambda: TiledCopy([buffer, buffer[:3]], "torch"),
        lambda: TiledCopy([], "torch"),
        lambda: TiledCopy([buffer.transpose(1, 2)], "torch"),
        lambda: TiledCopy([buffer[:, 0, 0]], "torch"),
        lambda: TiledCopy([buffer], "cuda"),
    )


@pytest.mark.gpu
def test_a_move_makes_no_one_wait() -> None:
    """Moves of few and of many rows do not wait for the device, and are correct at a size with many programs."""
    slots = torch.randperm(8192, device="cuda")
    buffers = [torch.randint(0, 1 << 30, (8192, 8, 64), dtype=torch.int32, device="cuda") for _ in range(4)]
    mover = TiledCopy(buffers, "triton")
    for n in (16, 512, 4096):
        target, source = slots[:n], slots[n // 2 : n // 2 + n]
        expected = [b.clone() for b in buffers]
        for b in expected:
            b[target] = b[source].clone()
        with no_waits():
            mover.move(target, source)
        assert all(torch.equal(b, e) for b, e in zip(buffers, expected, strict=True)), n
