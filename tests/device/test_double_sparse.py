"""The pool of keys, values and labels for double sparse attention."""

from __future__ import annotations

import pytest
import torch

from device_case import normal, pool_of

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [BF16, F32, E4M3])
def test_what_is_stored_is_read(device: str, kernels: str, dtype: torch.dtype) -> None:
    """Keys and values, divided by their scales, and unchanged labels are read back, at their slots only. The inputs do
    not change."""
    pool = pool_of("double sparse", device, dtype=dtype)
    loc = torch.tensor([30, 4, 17], device=device)
    k, v, label = (normal(3, 2, n, seed=n).to(device) for n in (8, 9, 3))
    v = v[..., :8]
    before = [x.clone() for x in (k, v, label)]
    pool.set_kv_buffer(1, loc, k, v, label, 0.5, torch.tensor([2.0], device=device))
    assert all(torch.equal(x, y) for x, y in zip((k, v, label), before, strict=True))
    got = (*pool.get_kv_buffer(1), pool.get_label_buffer(1))
    for buffer, rows in zip(got, (k.float() / 0.5, v.float() / 2, label.float()), strict=True):
        complete = torch.zeros(36, *rows.shape[1:])
        complete[loc.cpu()] = rows.to(dtype).float().cpu()
        assert buffer.dtype == dtype and torch.equal(buffer.float().cpu(), complete)
