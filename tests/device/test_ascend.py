"""The page-major pools: they store the same bytes as other pools, but page by page, with the vendor's operation or
without it."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from device_case import normal, pool_of
from hicache.device import ascend

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


mha_of = functools.partial(pool_of, "ascend mha", size=30)
mla_of = functools.partial(pool_of, "ascend mla", size=30)


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3])
def test_keys_and_values_by_page(device: str, kernels: str, dtype: torch.dtype) -> None:
    """Slot s is token s % page_size of page s

    page_size. Keys and values of all layers are one tensor."""
    pool = mha_of(device, dtype=dtype)
    loc = torch.tensor([30, 4, 17], device=device)
    k, v = (normal(3, 2, 8, seed=n).to(device) for n in (1, 2))
    pool.set_kv_buffer(1, loc, k, v, k_scale=0.5)
    assert pool.kv_buffer.shape == (2, 3, 9, 4, 2, 8)
    for kind, (buffer, rows) in enumerate(zip(pool.get_kv_buffer(1), (k.float() / 0.5, v.float()), strict=True)):
        complete = torch.zeros(9, 4, 2, 8)
        for row, slot in zip(rows.to(dtype).float().cpu(), loc.tolist(), strict=True):
            complete[slot // 4, slot % 4] = row
        assert buffer.dtype == dtype and torch.equal(buffer.float().cpu(), complete)
        assert buffer.data_ptr() == pool.kv_buffer[kind, 1].data_ptr()
    assert not pool.kv_buffer[:, ::2].any()


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_latent_rows_by_page(device: str, kernels: str, dtype: torch.dtype) -> None:
    """Rows that are stored at once or in two parts are in their pages, and are read again in two parts."""
    pool = mla_of(device, dtype=dtype)
    loc, other = torch.tensor([30, 4], device=device), torch.tensor([9, 17], device=device)
    nope, rope = normal(2, 1, 24, seed=1).to(device), normal(2, 1, 8, seed=2).to(device)
    rows = torch.cat((nope, rope), dim=-1)
    pool.set_mla_kv_buffer(2, loc, nope, rope)
    pool.set_kv_buffer(2, other, rows, None)
    complete = torch.zeros(9, 4, 32)
    for at in (loc, other):
        for row, slot in zip(rows[:, 0].to(dtype).float().cpu(), at.tolist(), strict=True):
            complete[slot // 4, slot % 4] = row
        parts = pool.get_mla_kv_buffer(2, at)
        assert torch.equal(parts[0].float(), nope.to(dtype).float())
        assert torch.equal(parts[1].float(), rope.to(dtype).float())
    keys, values = pool.get_kv_buffer(2)
    assert torch.equal(keys.float().cpu(), complete) and torch.equal(values.float().cpu(), complete[..., :24])
    assert pool.kv_buffer.shape == (3, 9, 4, 32) and keys.data_ptr() == pool.kv_buffer[2].data_ptr()
    assert pool.layer_buffers(2)[0].shape[0] == 36  # complete pages


class NpuCaches:
    """A stand-in for the vendor's two operations, as their manual describes them: `cache[slot

    block, slot % block] = row`, int32 slots."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _npu_reshape_and_cache(self, **given: torch.Tensor) -> None:
        self.calls.append("both")
        self._cache(given["key"], given["key_cache"], given["slot_indices"])
        self._cache(given["value"], given["value_cache"], given["slot_indices"])

    def _npu_reshape_and_cache_siso(self, **given: torch.Tensor) -> None:
        self.calls.append("one")
        self._cache(given["key"], given["key_cache"], given["slot_indices"])

    def _cache(self, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        assert rows.dim() == 3 and cache.dim() == 4 and rows.shape[1:] == cache.shape[2:]
        assert rows.is_contiguous() and rows.dtype == cache.dtype and slots.dtype == torch.int32
        for row, slot in zip(rows, slots.tolist(), strict=True):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row


def test_the_vendors_operation_stores_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vendor's operations the pools hold the same bytes as without them."""
    npu, loc = NpuCaches(), torch.tensor([30, 4, 17])
    k, v, nope, rope = (normal(3, heads, n, seed=n) for heads, n in ((2, 8), (2, 8), (1, 24), (1, 8)))
    results = []
    for operations in (None, npu):
        monkeypatch.setattr(ascend, "npu_operations", lambda device, found=operations: found)
        mha, mla = mha_of(), mla_of()
        mha.set_kv_buffer(1, loc, k.transpose(1, 2).contiguous().transpose(1, 2), v, v_scale=4.0)
        mla.set_mla_kv_buffer(0, loc[:2], nope[:2], rope[:2])
        mla.set_kv_buffer(0, loc[2:], torch.cat((nope, rope), dim=-1)[2:], None)
        results.append((mha.kv_buffer, mla.kv_buffer))
    assert npu.calls == ["both", "one", "one"]
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*results, strict=True))


def test_the_vendors_package_serves_its_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices the vendor's package is not used, even if it can be imported."""
    monkeypatch.setattr("hicache.device.ascend.torch_npu", SimpleNamespace())
    pool = mha_of()
    pool.set_kv_buffer(0, torch.tensor([4]), normal(1, 2, 8), normal(1, 2, 8))
    assert pool.kv_buffer.any()
