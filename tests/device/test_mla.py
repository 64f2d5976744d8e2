"""The pool of latent rows: what goes in whole or in two parts comes out, by value."""

from __future__ import annotations

import pytest
import torch

from device_case import normal, pool_of

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [BF16, F32, E4M3, E5M2])
def test_parts_and_whole_rows_are_the_same(device: str, kernels: str, dtype: torch.dtype) -> None:
    """A row stored in two parts reads as one, a row stored whole reads as two, and values are the row's first part."""
    pool = pool_of("mla", device, dtype=dtype)
    loc, other = torch.tensor([30, 4, 17, 9, 33], device=device), torch.tensor([5, 6, 7, 8, 10], device=device)
    nope, rope = normal(5, 1, 24, seed=1).to(device), normal(5, 1, 8, seed=2).to(device)
    rows = torch.cat((nope, rope), dim=-1)
    pool.set_mla_kv_buffer(1, loc, nope, rope[:, 0])
    pool.set_kv_buffer(1, other, rows, rows)
    keys, values = pool.get_kv_buffer(1)
    assert keys.shape == (36, 1, 32) and values.shape == (36, 1, 24) and keys.dtype == values.dtype == dtype
    whole = torch.zeros(36, 1, 32)
    whole[loc.cpu()] = whole[other.cpu()] = rows.cpu().to(dtype).float()
    assert torch.equal(keys.float().cpu(), whole) and torch.equal(values.float().cpu(), whole[..., :24])
    for at in (loc, other):
        parts = pool.get_mla_kv_buffer(1, at)
        assert [x.dtype for x in parts] == [dtype, dtype]
        assert torch.equal(parts[0].float(), nope.to(dtype).float())
        assert torch.equal(parts[1].float(), rope.to(dtype).float())
        wide = pool.get_mla_kv_buffer(1, at.int(), F32)
        assert [x.dtype for x in wide] == [F32, F32] and torch.equal(wide[1], rope.to(dtype).float())
    assert not pool.layer_buffers(0)[0].any() and not pool.layer_buffers(2)[0].any()
    assert pool.kv_buffer.shape == (3, 36, 1, 32) and keys.data_ptr() == pool.kv_buffer[1].data_ptr()
