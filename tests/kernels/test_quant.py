"""Keys and values in 8 bits: scales and rounding compared with plain arithmetic, and both implementations compared bit
by bit."""

from __future__ import annotations

import pytest
import torch

from cases import KERNELS, pairwise
from hicache.kernels import quant
from hicache.kernels.quant import dequantise_kv, quantise_kv
from kernel_case import random_bits, spread

STORED = {"int8": torch.int8, "fp8": torch.uint8}
LIMITS = {"int8": 127.0, "fp8": 448.0}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def filled(
    slots: int, heads: int, dims: tuple[int, int], kind: str, device: str
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Data and scales of keys and values whose elements are all 3."""
    data = tuple(torch.full((slots, heads, dim), 3, dtype=STORED[kind], device=device) for dim in dims)
    return data, tuple(torch.full((slots, heads), 3.0, device=device) for _ in dims)


def numbers(data: torch.Tensor, kind: str) -> torch.Tensor:
    return (data.view(torch.float8_e4m3fn) if kind == "fp8" else data).cpu().double()


def nearest(y: torch.Tensor, kind: str) -> torch.Tensor:
    """Distance of each element from the nearest number of the format."""
    if kind == "int8":
        return (y - y.round()).abs()
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return (y[..., None] - values[~values.isnan()]).abs().min(-1).values


@pairwise(kernels=KERNELS, kind=["int8", "fp8"], dtype=[BF16, F16, F32], shape=[(2, 8, 8), (3, 5, 12), (1, 128, 64)])
def test_each_head_is_rounded_at_its_own_scale(
    device: str, kernels: str, kind: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """The scale of a token's head is max|x|/L to the last bit, its numbers are the nearest ones, and no other slot
    changes."""
    (heads, k_dim, v_dim), slots, tokens = shape, 30, 13
    loc = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:tokens]
    rows = [spread(tokens, heads, dim, dtype=dtype, seed=dim) for dim in (k_dim, v_dim)]
    rows[0][4, 0] = 0
    data, scales = filled(slots, heads, (k_dim, v_dim), kind, device)
    quantise_kv(*(x.to(device) for x in rows), data, scales, loc.to(device), kernels)
    others = [slot for slot in range(slots) if slot not in loc.tolist()]
    for x, values, scale in zip(rows, data, scales, strict=True):
        assert bool((values[others] == 3).all()) and bool((scale[others] == 3).all())
        top = x.float().abs().amax(-1).clamp(min=2.0**-100)
        assert torch.equal(scale.cpu()[loc], top / torch.full_like(top, LIMITS[kind]))
        y = x.double() / scale.cpu()[loc].double()[..., None]
        distance = (numbers(values, kind)[loc] - y).abs()
        assert torch.all(distance <= nearest(y, kind) * (1 + 1e-6) + 1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_numbers_times_scales_are_read(device: str, kernels: str, kind: str, dtype: torch.dtype) -> None:
    """Reading returns number times scale, computed in float32 and rounded once, for given slots in their order or for
    all slots."""
    slots, heads, dims = 9, 3, (5, 12)
    data, scales = [], []
    for dim in dims:
        bits = random_bits(slots, heads, dim, seed=dim)
        bits[(bits & 0x7F) == 0x7F] = 0  # fp8's NaN is never stored
        data.append(bits.view(STORED[kind]).to(device))
        scales.append((torch.rand(slots, heads, generator=torch.Generator().manual_seed(dim)) + 0.01).to(device))
    complete = [
        (numbers(x, kind).float() * scale.cpu()[..., None]).to(dtype) for x, scale in zip(data, scales, strict=True)
    ]
    loc = torch.tensor([7, 0, 3, 3], dtype=torch.int32, device=device)
    for at, expected in ((loc, [x[loc.cpu().long()] for x in complete]), (None, complete)):
        got = dequantise_kv(data, scales, at, dtype, kernels)
        assert [x.dtype for x in got] == [dtype, dtype]
        assert all(torch.equal(x.cpu(), y) for x, y in zip(got, expected, strict=True))
        (one,) = dequantise_kv(data[1:], scales[1:], at, dtype, kernels)
        assert torch.equal(one.cpu(), expected[1])
    empty = dequantise_kv(data, scales, loc[:0], dtype, kernels)
    assert [tuple(x.shape) for x in empty] == [(0, heads, dim) for dim in dims]


def test_ties_go_to_even(device: str, kernels: str) -> None:
    """With scale one, int8 rounds halves to the even number, and fp8 equals torch's cast, for both signs."""
    halves = torch.arange(-126, 127).float() + 0.5
    x = torch.cat([halves, torch.tensor([127.0, -0.0, 0.49999997])]).view(1, 1, -1).to(device)
    loc = torch.zeros(1, dtype=torch.int64, device=device)
    data, scales = filled(1, 1, (x.shape[2],) * 2, "int8", device)
    quantise_kv(x, x, data, scales, loc, kernels)
    assert scales[0].item() == 1.0 and data[0].flatten().tolist() == [round(v) for v in x.flatten().tolist()]
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0).sort().values
    middles = (values[1:] + values[:-1]) / 2
    y = torch.cat([middles, middles * (1 + 2.0**-20), torch.tensor([31.6, 448.0])]).view(1, 1, -1)
    y = y.clamp(-448, 448)
    data, scales = filled(1, 1, (y.shape[2],) * 2, "fp8", device)
    quantise_kv(y.to(device), y.to(device), data, scales, loc, kernels)
    assert scales[0].item() == 1.0 and torch.equal(data[0].cpu(), y.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_slices_of_a_projection(device: str, kernels: str, kind: str) -> None:
    """Keys and values that are slices of a wider tensor, or are stored head by head, are quantised by value."""
    complete = spread(6, 3, 4, 20, dtype=BF16, seed=3).to(device)
    heads_first = spread(4, 6, 10, dtype=BF16, seed=4).to(device)
    k, v = complete[:, 1, :, 5:15], heads_first.transpose(0, 1)
    loc = torch.tensor([8, 1, 3, 2, 7, 5], dtype=torch.int32, device=device)
    results = []
    for pair in ((k, v), (k.contiguous(), v.contiguous())):
        data, scales = filled(9, 4, (10, 10), kind, device)
        quantise_kv(*pair, data, scales, loc, kernels)
        quantise_kv(k[:0], v[:0], data, scales, loc[:0], kernels)
        results.append([x.cpu() for x in (*data, *scales)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_hardware_and_arithmetic_round_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that converts in hardware, the arithmetic for other devices and the twin give the same bits."""
    x = spread(300, 8, 128, dtype=BF16, seed=5).cuda()
    loc = torch.arange(300, device="cuda")
    results = []
    for native, kernels in ((True, "triton"), (False, "triton"), (False, "torch")):
        if not native:
            monkeypatch.setattr(quant, "native_floats", lambda device: False)
        data, scales = filled(300, 8, (128, 128), kind, "cuda")
        quantise_kv(x, x, data, scales, loc, kernels)
        results.append([*data, *scales, *dequantise_kv(data, scales, loc, BF16, kernels)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
