"""The 8-bit pool: each token keeps the scale with which it was stored."""

from __future__ import annotations

import pytest
import torch

from device_case import normal, pool_of
from hicache.device import QuantizedKVCache

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Half a step, for int8 as a share of the row's largest magnitude, for fp8 as a share of each element.
STEP = {"int8": 0.5 / 127, "fp8": 1 / 16}
KINDS = ["int8", "fp8"]


def quantized(device: str = "cpu", kind: str = "int8", dtype: torch.dtype = F32) -> QuantizedKVCache:
    return pool_of(kind, device, dtype=dtype)


def close(got: torch.Tensor, rows: torch.Tensor, kind: str) -> bool:
    top = rows.float().abs().amax(-1, keepdim=True)
    bound = STEP[kind] * (top if kind == "int8" else rows.float().abs() + top / 448)
    return bool(((got.float() - rows.float()).abs() <= bound * 1.01 + rows.float().abs() / 200).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_is_stored_is_read_within_a_step(device: str, kernels: str, kind: str, dtype: torch.dtype) -> None:
    """Reads of complete buffers and of slots return the model's dtype, within half a step of the input. Other slots
    read as zero. The raw pair is the number and the scale."""
    pool = quantized(device, kind, dtype)
    loc = torch.tensor([30, 4, 17], device=device)
    k, v = normal(3, 2, 8, seed=1, dtype=dtype).to(device), normal(3, 2, 12, seed=2, dtype=dtype).to(device)
    pool.set_kv_buffer(1, loc, k, v)
    keys, values = pool.get_kv_buffer(1)
    assert keys.dtype == values.dtype == dtype and keys.shape == (36, 2, 8) and values.shape == (36, 2, 12)
    assert close(keys[loc], k, kind) and close(values[loc], v, kind)
    rest = torch.ones(36, dtype=torch.bool, device=device)
    rest[loc] = False
    assert not keys[rest].any() and not values[rest].any()
    assert torch.equal(pool.get_key_buffer(1), keys) and torch.equal(pool.get_value_buffer(1), values)
    at = torch.tensor([17, 30, 17, 5], dtype=torch.int32, device=device)
    for rows, complete in zip(pool.load_kv(1, at), (keys, values), strict=True):
        assert torch.equal(rows, complete[at.long()])
    raw = pool.get_quantized_buffer(1)
    assert raw.k.dtype == (torch.int8 if kind == "int8" else torch.uint8) and raw.k_scale.shape == (36, 2)
    numbers = raw.v if kind == "int8" else raw.v.view(torch.float8_e4m3fn)
    assert torch.equal((numbers.float() * raw.v_scale[..., None]).to(dtype), values)
