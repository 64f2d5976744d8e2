"""Index keys: the format of a page byte by byte, and quantisation compared with the nearest fp8 values."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels import nsa
from hicache.kernels.nsa import (
    gather_index_keys,
    gather_index_scales,
    index_row_bytes,
    quantise_index_keys,
    store_index_keys,
)
from kernel_case import random_bits, spread

U8, F32, E4M3 = torch.uint8, torch.float32, torch.float8_e4m3fn
VALUES = torch.arange(256, dtype=U8).view(E4M3).float().nan_to_num(1e9)  # by byte; NaN is never nearest


def random_buffer(pages: int, page_size: int, device: str) -> torch.Tensor:
    return random_bits(pages, index_row_bytes(page_size), seed=pages).to(device)


def parts(buffer: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys, bytes `[pages, page_size, 128]`, and then the scales, `[pages, page_size]`, of each page."""
    return buffer[:, : page_size * 128].unflatten(1, (page_size, 128)), buffer[:, page_size * 128 :].view(F32)


def keys_of(tokens: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values whose exponents span many binades, and a row of zeros."""
    x = spread(tokens, 128, dtype=dtype, seed=seed)
    x[tokens // 2] = 0
    return x


@pytest.mark.parametrize("page_size", [64, 16, 3, 1])
@pytest.mark.parametrize("scale_dims", [1, 2])
def test_keys_and_scales_land_in_their_page(device: str, kernels: str, page_size: int, scale_dims: int) -> None:
    """A page holds the keys of its tokens and then their scales; no other byte changes."""
    tokens = 5 if page_size == 1 else 13
    loc = torch.randperm(5 * page_size, generator=torch.Generator().manual_seed(1))[:tokens]
    keys = random_bits(tokens, 128, seed=2)
    scales = torch.rand((tokens, 1)[:scale_dims], generator=torch.Generator().manual_seed(3))
    expected = random_buffer(5, page_size, "cpu")
    on = expected.to(device, copy=True)
    for part, rows in zip(parts(expected, page_size), (keys, scales.view(-1)), strict=True):
        part[loc // page_size, loc % page_size] = rows
    store_index_keys(keys.view(E4M3).to(device), scales.to(device), on, loc.to(device), page_size, kernels)
    assert torch.equal(on.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
def test_quantised_keys_are_the_nearest(device: str, kernels: str, dtype: torch.dtype) -> None:
    """The scale is max|x|/448 to the last bit. The byte of each key is an fp8 value nearest to x divided by the
    scale."""
    x, page_size = keys_of(21, dtype, seed=4), 8
    loc = torch.randperm(40, generator=torch.Generator().manual_seed(5))[:21].to(torch.int32)
    at = loc // page_size, loc % page_size
    buffer = random_buffer(5, page_size, "cpu")
    on = buffer.to(device, copy=True)
    quantise_index_keys(x.to(device), on, loc.to(device), page_size, kernels)
    keys, scales = (part[at] for part in parts(on.cpu(), page_size))
    top = x.float().abs().amax(1)
    assert torch.equal(scales, top.clamp(min=2.0**-100) / torch.full_like(top, 448.0))
    distance = ((x.double() / scales.double()[:, None])[..., None] - VALUES.double()).abs()
    chosen = distance.gather(2, keys.long()[..., None])[..., 0]
    assert torch.all(chosen <= distance.min(2).values * (1 + 1e-6) + 1e-12)
    assert torch.all((VALUES[keys.long()].abs().amax(1) == 448) | (top == 0))
    for part, rows in zip(parts(buffer, page_size), (keys, scales), strict=True):
        part[at] = rows
    assert torch.equal(on.cpu(), buffer)


def test_quantising_equals_the_cast_of_torch(device: str, kernels: str) -> None:
    """If the scale is one, bytes are those of torch's cast: for all fp8 values, ties between them, both signs, and
    zeros."""
    values = VALUES[VALUES.abs() <= 448].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([middles * (1 + 2.0**-20), middles * (1 - 2.0**-20)])
    x = torch.cat([values, middles, near, torch.tensor([-0.0, 31.6, 2.0**-10, 3 * 2.0**-10, 2.0**-30])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], dim=1)
    buffer = torch.zeros(len(x), index_row_bytes(1), dtype=U8, device=device)
    quantise_index_keys(x.to(device), buffer, torch.arange(len(x), device=device), 1, kernels)
    assert torch.equal(buffer[:, :128].cpu(), x.to(E4M3).view(U8))
    assert buffer.view(F32)[:, 32].tolist() == [1.0] * len(x)


@pytest.mark.parametrize("page_size", [64, 5, 1])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gathers_follow_the_pages(device: str, kernels: str, page_size: int, index: torch.dtype) -> None:
    """Keys and scales of a sequence are gathered in its order, up to its length."""
    buffer, pages = random_buffer(7, page_size, device), torch.tensor([4, 0, 6], dtype=index, device=device)
    complete = [part.contiguous().view(U8).view(7, page_size, -1) for part in parts(buffer, page_size)]
    for tokens in {0, 1, page_size, 2 * page_size + 1, 3 * page_size}:
        for gather, part in zip((gather_index_keys, gather_index_scales), complete, strict=True):
            got = gather(buffer, pages, tokens, page_size, kernels)
            assert got.dtype == U8 and torch.equal(got, part[pages.long()].flatten(0, 1)[:tokens])


def test_slices_and_no_rows(device: str, kernels: str) -> None:
    """Keys that are slices of a projection are quantised by value. A call without keys changes nothing."""
    complete = keys_of(6, torch.bfloat16, seed=8).repeat(1, 2).to(device)
    loc = torch.tensor([3, 9, 0, 7, 1, 2], device=device)
    buffers = [torch.zeros(3, index_row_bytes(4), dtype=U8, device=device) for _ in range(2)]
    quantise_index_keys(complete[:, 64:192], buffers[0], loc, 4, kernels)
    quantise_index_keys(complete[:, 64:192].contiguous(), buffers[1], loc, 4, kernels)
    assert torch.equal(*buffers) and buffers[0].any()
    quantise_index_keys(complete[:0, :128], buffers[0], loc[:0], 4, kernels)
    store_index_keys(complete[:0, :128].to(E4M3), complete[:0, 0].float(), buffers[0], loc[:0], 4, kernels)
    assert torch.equal(*buffers)


@pytest.mark.gpu
def test_hardware_and_arithmetic_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that converts to fp8 itself, the arithmetic for other devices gives the same bytes."""
    x = keys_of(512, F32, seed=6).cuda()
    loc = torch.arange(512, device="cuda")
    buffers = [torch.zeros(8, index_row_bytes(64), dtype=U8, device="cuda") for _ in range(2)]
    quantise_index_keys(x, buffers[0], loc, 64, "triton")
    monkeypatch.setattr(nsa, "native_floats", lambda device: False)
    quantise_index_keys(x, buffers[1], loc, 64, "triton")
    assert torch.equal(*buffers)
