"""Packed pages: unpacking restores every bit, tiles that do not fit are counted, and kernel and twin agree in every
byte."""

from __future__ import annotations

import pytest
import torch

from cases import long
from hicache.kernels._triton import Kernels
from hicache.kernels.pack import FOUR_BITS, THREE_BITS, PackFormat, PagePacker
from kernel_case import as_bytes, random_bits

ROOMY = PackFormat(3, (1.0,))  # all tiles fit
NO_ROOM = PackFormat(3, (0.4, 0.0))  # tiles of the second buffer do not fit
NUM_SLOTS = 300
DEVICES: dict[Kernels, str] = {"torch": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
Pool = list[list[torch.Tensor]]


def pool(num_layers: int, num_buffers: int, channels: int, seed: int, kernels: Kernels, kind: str = "values") -> Pool:
    """Buffers, bfloat16 `[NUM_SLOTS, channels]`, that are slices of longer rows if the kernels can read these."""
    generator = torch.Generator().manual_seed(seed)

    def buffer(n: int) -> torch.Tensor:
        if kind == "bits":
            values = random_bits(NUM_SLOTS, channels + 8, dtype=torch.bfloat16, seed=seed + n)
        else:
            scales = torch.exp(torch.randn(channels + 8, generator=generator))
            values = (torch.randn(NUM_SLOTS, channels + 8, generator=generator) * scales).bfloat16()
        return values.to(DEVICES[kernels])[:, :channels]

    return [[buffer(layer * num_buffers + n) for n in range(num_buffers)] for layer in range(num_layers)]


def some_slots(num_tokens: int, seed: int, kernels: Kernels) -> torch.Tensor:
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    return slots.to(DEVICES[kernels])


def packed(packer: PagePacker, slots: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_pages = slots.numel() // packer.page_tokens
    staging = torch.zeros(num_pages, packer.group_bytes(first, count), dtype=torch.uint8, device=slots.device)
    misfits = torch.zeros(num_pages, dtype=torch.int32, device=slots.device)
    packer.gather(slots, staging, first, count, misfits)
    return staging, misfits


def come_back(
    packer: PagePacker, buffers: list[list[torch.Tensor]], slots: torch.Tensor, first: int, count: int
) -> None:
    """Check that overwritten rows, and no others, have their original bits again."""
    staging, misfits = packed(packer, slots, first, count)
    assert not misfits.any()
    flat = [buffer for layer in buffers for buffer in layer]
    before = [as_bytes(buffer).clone() for buffer in flat]
    for layer in buffers[first : first + count]:
        for buffer in layer:
            buffer[slots] = 0
    packer.scatter(staging, slots, first, count)
    assert all(torch.equal(as_bytes(buffer), was) for buffer, was in zip(flat, before, strict=True))


def decoded(tile: bytes, tokens: int, width: int, bits: int, num_escapes: int) -> list[list[int]]:
    """Decode a tile by the description of the format alone."""
    tops, tile = tile[:width], tile[width:]
    escapes, tile = iter(tile[:num_escapes]), tile[num_escapes:]
    fractions, distances = tile[: tokens * width], tile[tokens * width :]
    count, rows = tokens // 16, [[0] * width for _ in range(tokens)]

    def distance(k: int, t: int, c: int) -> int:
        at = 2 * ((k * count + t) * width + c)
        return distances[at] | distances[at + 1] << 8

    for t in range(count):
        for c in range(width):
            for part in range(16):
                k, n = divmod(part, 4)
                if k < bits:
                    code = distance(k, t, c) >> 4 * n & 2**bits - 1
                else:
                    code = sum((distance(i, t, c) >> 4 * n + 3 & 1) << i for i in range(3))
                exponent = next(escapes) if code == 2**bits - 1 else tops[c] - code
                fraction = fractions[2 * ((part // 2 * count + t) * width + c) + part % 2]
                rows[16 * t + part][c] = (fraction & 128) << 8 | exponent << 7 | fraction & 127
    return rows


@pytest.mark.parametrize(
    ("kernels", "tokens", "buffers", "channels", "format"),
    [
        ("torch", 64, 2, 64, FOUR_BITS),
        ("torch", 128, 3, 4, ROOMY),
        ("triton", 64, 1, 192, THREE_BITS),
        ("triton", 16, 2, 24, FOUR_BITS),
        *long(("torch", 64, 1, 192, THREE_BITS), ("torch", 16, 2, 24, FOUR_BITS), ("torch", 16, 1, 96, THREE_BITS)),
        *long(("triton", 64, 2, 64, FOUR_BITS), ("triton", 128, 3, 4, ROOMY), ("triton", 16, 1, 96, THREE_BITS)),
    ],
)
def test_rows_are_restored(kernels: Kernels, tokens: int, buffers: int, channels: int, format: PackFormat) -> None:
    """Rows are restored for groups of layers from any layer on, with full and narrow tiles, at scattered slots."""
    rows = pool(2, buffers, channels, tokens, kernels)
    packer = PagePacker(rows, tokens, kernels, format)
    slots = some_slots(2 * tokens, 1, kernels)
    if kernels == "torch" or channels == 64:  # Triton's interpreter is slow
        come_back(packer, rows, slots, 0, 2)
    come_back(packer, rows, slots[:tokens], 1, 1)
    come_back(packer, rows, slots[:0], 1, 1)
    raw_bytes = tokens * 2 * buffers * channels * 2
    assert packer.page_bytes == packer.group_bytes(0, 2) and (channels < 128 or packer.page_bytes < raw_bytes / 1.3)


@pytest.mark.parametrize(("kernels", "bits"), [("torch", 3), ("torch", 4), ("triton", 3), *long(("triton", 4))])
def test_every_pattern_is_restored(kernels: Kernels, bits: int) -> None:
    """All 65 536 bit patterns are restored: next to each other, in channels with one exponent, and alone among zeros.
    NaNs keep their payloads."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    format = PackFormat(bits, (1.0,))
    alone = torch.zeros(1024, 128, dtype=torch.bfloat16)
    alone.view(-1)[::2] = every
    for patterns in (every.view(-1, 256), every.view(256, -1).T.contiguous(), alone):
        values = patterns.to(DEVICES[kernels])
        packer = PagePacker([[values]], 256, kernels, format)
        come_back(packer, [[values]], torch.arange(values.shape[0], device=values.device), 0, 1)


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("values", THREE_BITS),
        ("bits", FOUR_BITS),
        *long(("values", FOUR_BITS), ("bits", THREE_BITS), *((kind, NO_ROOM) for kind in ("values", "bits"))),
    ],
)
def test_kernel_and_twin_agree(kind: str, format: PackFormat) -> None:
    """Kernel and twin agree in every byte, and in how many tiles of each page do not fit."""
    rows = pool(2, 2, 128, 3, "triton", kind)
    slots = some_slots(128, 4, "triton")
    ours, theirs = (packed(PagePacker(rows, 64, kernels, format), slots, 0, 2) for kernels in ("triton", "torch"))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert ours[1].all() if kind == "bits" or format.escapes[-1] == 0 else not ours[1].any()


def random_rows(kind: str, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 `[1024, 1024]` on the GPU as bits. With "edges", the number of escapes in each tile of 64 rows x 128
    channels is near its maximum; there are constant channels, single infinities, NaNs with payloads, denormals and
    zeros."""

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (1024, 1024), dtype=torch.int16, device="cuda", generator=generator)

    if kind == "bits":
        return integers(-(1 << 15), 1 << 15)
    values = torch.randn(1024, 1024, device="cuda", generator=generator).bfloat16().view(torch.int16)
    if kind == "edges":
        dice, bits = integers(0, 10_000), integers(-(1 << 15), 1 << 15)
        values = torch.where(dice < 12, bits & 0x7F, values)  # denormals, with the lowest exponent
        values = torch.where(dice == 9_999, bits | 0x7F80, values) if bool(dice[0, 0] % 2) else values
        values[:, ::17] = bits[:1, ::17]
    return values


def agree_on_a_gpu(kind: str, format: PackFormat, seed: int) -> int:
    """Check that kernel and twin agree for the geometry of an 8B model with 32 layers, and that rows of pages that fit
    are restored. Returns how many pages fit."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = [[random_rows(kind, generator).view(torch.bfloat16) for _ in range(2)] for _ in range(32)]
    slots = torch.randperm(1024, device="cuda", generator=generator)
    packer = PagePacker(rows, 64, "triton", format)
    ours, theirs = packed(packer, slots, 0, 32), packed(PagePacker(rows, 64, "torch", format), slots, 0, 32)
    assert torch.equal(ours[1], theirs[1])
    fit = ours[1] == 0
    assert torch.equal(ours[0][fit], theirs[0][fit])
    before = [[buffer.clone() for buffer in layer] for layer in rows]
    fitting = slots.view(-1, 64)[fit].flatten()
    for layer in rows:
        for buffer in layer:
            buffer[fitting] = 0
    packer.scatter(ours[0][fit], fitting, 0, 32)
    for layer, kept in zip(rows, before, strict=True):
        for buffer, was in zip(layer, kept, strict=True):
            assert torch.equal(buffer.view(torch.int16), was.view(torch.int16))
    return int(fit.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("format", [FOUR_BITS, THREE_BITS, ROOMY])
@pytest.mark.parametrize("kind", ["values", "bits"])
def test_kernel_and_twin_agree_on_a_gpu(kind: str, format: PackFormat) -> None:
    assert (agree_on_a_gpu(kind, format, 0) > 0) == (kind == "values" or format is ROOMY)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("format", [FOUR_BITS, THREE_BITS, ROOMY])
def test_kernel_and_twin_agree_over_a_billion_values(format: PackFormat) -> None:
    """Kernel and twin agree over 16 times 67 million values: random bits, normal values, and tiles that just fit."""
    num_fitting = sum(agree_on_a_gpu(("edges", "bits", "values")[seed % 3], format, seed) for seed in range(1, 17))
    assert 0 < num_fitting < 16 * 16 or format is ROOMY


@pytest.mark.parametrize("format", [FOUR_BITS, THREE_BITS])
def test_the_format_is_the_documented_one(format: PackFormat) -> None:
    """A decoder that is written from the description alone reads packed pages."""
    rows = pool(1, 2, 96, 5, "torch")
    packer = PagePacker(rows, 32, "torch", format)
    slots = some_slots(32, 6, "torch")
    for buffer in rows[0]:
        buffer[slots[::7], ::50] = 0  # escapes in the first two tiles of 32 channels
    staging, misfits = packed(packer, slots, 0, 1)
    assert not misfits.any()
    left = staging[0].numpy().tobytes()
    for n, buffer in enumerate(rows[0]):
        expected = buffer.view(torch.int16)[slots].to(torch.int32) & 0xFFFF
        for first in (0, 32, 64):
            num_bytes, capacity = format.tile_bytes(n, 32, 32), format.max_escapes(n, 32, 32)
            tile, left = left[:num_bytes], left[num_bytes:]
            assert decoded(tile, 32, 32, format.bits, capacity) == expected[:, first : first + 32].tolist()
    assert not left


def test_a_tile_fits_up_to_its_number_of_escapes() -> None:
    capacity = FOUR_BITS.max_escapes(0, 64, 128)
    for num_escapes in (capacity, capacity + 1):
        values = torch.ones(64, 128, dtype=torch.bfloat16)
        values.view(-1)[torch.arange(num_escapes) * 7] = 2.0**-20
        _, misfits = packed(PagePacker([[values]], 64, "torch", FOUR_BITS), torch.arange(64), 0, 1)
        assert misfits.tolist() == [int(num_escapes > capacity)]


def test_ratios_are_those_that_are_promised() -> None:
    """Ratios for an 8B model: 8 heads of 128 channels, in pages of 64 tokens."""
    rows = [[torch.zeros(1, 1024, dtype=torch.bfloat16)] * 2]
    raw_bytes = 64 * 2 * 1024 * 2
    assert raw_bytes / PagePacker(rows, 64, "torch", FOUR_BITS).page_bytes == pytest.approx(1.318, abs=1e-3)
    assert raw_bytes / PagePacker(rows, 64, "torch", THREE_BITS).page_bytes == pytest.approx(1.397, abs=1e-3)


def test_wrong_pools_and_arguments_are_refused() -> None:
    good = torch.zeros(16, 4, dtype=torch.bfloat16)
    for buffers, tokens, match in (
        ([[good.half()]], 16, "bfloat16"),
        ([[good]], 12, "power of two"),
        ([[good]], 8, "at least 16"),
        ([[good, torch.zeros(16, 8, dtype=torch.bfloat16)]], 16, "row sizes"),
        ([[torch.zeros(16, 6, dtype=torch.bfloat16)]], 16, "multiples of 4"),
        ([[good, good], [good]], 16, "row sizes"),
    ):
        with pytest.raises(ValueError, match=match):
            PagePacker(buffers, tokens, "torch", FOUR_BITS)
    for bits, escapes in ((2, (0.1,)), (5, (0.1,)), (3, ()), (3, (1.1,))):
        with pytest.raises(ValueError, match=r"bits|escapes"):
            PackFormat(bits, escapes)
    packer = PagePacker([[good]], 16, "torch", FOUR_BITS)
    slots, staging = torch.arange(16), torch.zeros(1, packer.page_bytes, dtype=torch.uint8)
    for wrong in (torch.zeros(1), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="misfits"):
            packer.gather(slots, staging, 0, 1, wrong)
    with pytest.raises(ValueError, match="staging"):
        packer.scatter(staging[:, 1:], slots, 0, 1)
    with pytest.raises(ValueError, match="layers"):
        packer.group_bytes(0, 2)
