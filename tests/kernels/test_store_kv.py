"""The store kernel, compared bit by bit with index assignment."""

from __future__ import annotations

import pytest
import torch

from cases import KERNELS, pairwise
from hicache.kernels.store_kv import store_kv, store_rows
from kernel_case import as_bytes, random_bits

SHAPES = [((2, 8), (2, 8)), ((3, 5), (3, 5)), ((1, 24), (1, 16)), ((8, 192), (8, 128)), ((1, 1), (1, 3))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("rows", SHAPES)
def test_rows_land_at_their_slots(
    device: str, kernels: str, dtype: torch.dtype, rows: tuple[tuple[int, ...], ...]
) -> None:
    """Each named slot holds its new row, bit for bit. All other slots stay unchanged."""
    loc = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:19]
    given = [random_bits(19, *row, dtype=dtype, seed=2 + i) for i, row in enumerate(rows)]
    buffers = [random_bits(40, *row, dtype=dtype, seed=4 + i) for i, row in enumerate(rows)]
    expected = [as_bytes(buffer).clone() for buffer in buffers]
    for x, complete in zip(given, expected, strict=True):
        complete[loc] = as_bytes(x)
    on = [x.to(device) for x in (*given, *buffers)]
    store_kv(*on, loc.to(device), kernels)
    assert all(torch.equal(as_bytes(x), complete) for x, complete in zip(on[2:], expected, strict=True))


def test_rows_of_a_wider_tensor(device: str, kernels: str) -> None:
    """Keys and values that are slices of one projection are stored correctly, also from int32 slots."""
    qkv = random_bits(6, 3, 4, 10, dtype=torch.bfloat16, seed=1).to(device)
    k, v = qkv[:, 1], qkv[:, 2]
    buffers = [torch.zeros(9, 4, 10, dtype=torch.bfloat16, device=device) for _ in range(2)]
    loc = torch.tensor([8, 1, 3, 2, 7, 5], dtype=torch.int32, device=device)
    store_kv(k, v, *buffers, loc, kernels)
    for rows, buffer in zip((k, v), buffers, strict=True):
        assert torch.equal(as_bytes(buffer[loc.long()]), as_bytes(rows))
        assert not buffer[[0, 4, 6]].any()


def test_one_buffer_alone(device: str, kernels: str) -> None:
    """`store_rows` writes only the given slots of one buffer; without rows it writes nothing."""
    buffer = torch.zeros(6, 3, dtype=torch.float32, device=device)
    rows = torch.arange(1.0, 7.0, device=device).view(2, 3)
    store_rows(rows, buffer, torch.tensor([4, 1], device=device), kernels)
    store_rows(rows[:0], buffer, torch.tensor([], dtype=torch.int64, device=device), kernels)
    assert buffer.tolist() == [[0] * 3, [4, 5, 6], [0] * 3, [0] * 3, [1, 2, 3], [0] * 3]


CASTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pairwise(
    kernels=KERNELS,
    source=[torch.float32, torch.bfloat16, torch.float16],
    stored=CASTS,
    scales=[(None, None), (0.37, "tensor"), ("tensor", None)],
)
def test_rows_are_scaled_bounded_and_rounded_once(
    device: str, kernels: str, source: torch.dtype, stored: torch.dtype, scales: tuple[float | str | None, ...]
) -> None:
    """The stored value is x / scale in double precision, rounded to float32 and then to the stored type. fp8 is limited
    to its range."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-20, 13, (31, 3, 20), generator=generator)
    k = (torch.randn(31, 3, 20, generator=generator) * 2.0**exponents).to(source)
    k[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0], dtype=source)
    v = k.flip(0)[:, :, :7].contiguous()
    numbers = [1.7 if scale == "tensor" else scale for scale in scales]
    given = [torch.tensor([1.7], device=device) if scale == "tensor" else scale for scale in scales]
    kept = k.clone(), v.clone()
    loc = torch.randperm(40, generator=generator)[:31]
    buffers = [torch.zeros(40, *x.shape[1:]).to(stored).to(device) for x in (k, v)]
    inputs = k.to(device), v.to(device)
    store_kv(*inputs, *buffers, loc.to(device), kernels, *given)
    for x, old, buffer, number in zip(inputs, kept, buffers, numbers, strict=True):
        assert torch.equal(as_bytes(x), as_bytes(old))
        wide = old.float()
        if number is not None:  # this double quotient, rounded to float32, is the correctly rounded quotient
            wide = (wide.double() / torch.tensor(number, dtype=torch.float32).double()).float()
        expected = wide.clamp(-LIMITS[stored], LIMITS[stored]) if stored in LIMITS else wide
        complete = torch.zeros(40, *x.shape[1:])
        complete[loc] = expected.to(stored).float()
        assert torch.equal(buffer.float().cpu().nan_to_num(nan=-777.0), complete.nan_to_num(nan=-777.0))


def test_one_buffer_alone_with_a_scale(device: str, kernels: str) -> None:
    """`store_rows` divides and converts like `store_kv`."""
    buffer = torch.zeros(6, 3, device=device).to(torch.float8_e4m3fn)
    rows = torch.tensor([[1.0, 2.0, 1000.0], [-4.0, 0.5, 8.0]], device=device)
    store_rows(rows, buffer, torch.tensor([4, 1], device=device), kernels, 2.0)
    assert buffer.float()[[4, 1]].tolist() == [[0.5, 1, 448], [-2, 0.25, 4]] and not buffer.float()[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("scale", [None, 2.0])
def test_keys_or_values_alone(device: str, kernels: str, scale: float | None) -> None:
    """`only` stores the buffer that it names and does not change the other one, whatever the sizes of the rows."""
    k, v = torch.ones(2, 3, device=device), torch.full((2, 5), 8.0, device=device)
    loc = torch.tensor([3, 1], device=device)
    for only in ("k", "v"):
        buffers = [torch.zeros(4, 3, device=device), torch.zeros(4, 5, device=device)]
        store_kv(k, v, *buffers, loc, kernels, scale, scale, only)
        number = scale or 1.0
        assert buffers[0][loc].eq(1 / number if only == "k" else 0).all() and not buffers[0][[0, 2]].any()
        assert buffers[1][loc].eq(8 / number if only == "v" else 0).all() and not buffers[1][[0, 2]].any()
