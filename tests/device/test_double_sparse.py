"""The pool of keys, values and labels."""

from __future__ import annotations

import pytest
import torch

from device_case import Recorder, check_copies_and_moves, check_description, normal
from hicache.device import DoubleSparseTokenToKVPool
from hicache.errors import ConfigError, ShapeError

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def pool_of(device: str = "cpu", dtype: torch.dtype = BF16, **extra: int) -> DoubleSparseTokenToKVPool:
    return DoubleSparseTokenToKVPool(
        size=32, page_size=4, dtype=dtype, head_num=2, head_dim=8, layer_num=3, device=device, heavy_channel_num=3,
        enable_memory_saver=False, **extra,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F32, E4M3])
def test_what_is_stored_is_read(device: str, kernels: str, dtype: torch.dtype) -> None:
    """Keys and values over their scales, and labels as they are, read back at their slots only; inputs stay."""
    pool = pool_of(device, dtype)
    loc = torch.tensor([30, 4, 17], device=device)
    k, v, label = (normal(3, 2, n, seed=n).to(device) for n in (8, 9, 3))
    v = v[..., :8]
    before = [x.clone() for x in (k, v, label)]
    pool.set_kv_buffer(1, loc, k, v, label, 0.5, torch.tensor([2.0], device=device))
    assert all(torch.equal(x, y) for x, y in zip((k, v, label), before, strict=True))
    got = (*pool.get_kv_buffer(1), pool.get_label_buffer(1))
    for buffer, rows in zip(got, (k.float() / 0.5, v.float() / 2, label.float()), strict=True):
        whole = torch.zeros(36, *rows.shape[1:])
        whole[loc.cpu()] = rows.to(dtype).float().cpu()
        assert buffer.dtype == dtype and torch.equal(buffer.float().cpu(), whole)


def test_copies_and_moves(device: str) -> None:
    """CPU copies and moves carry labels beside keys and values."""
    check_copies_and_moves(pool_of(device, start_layer=2), device)


def test_it_describes_itself() -> None:
    """Layout, addresses and bytes cover the labels."""
    pool = pool_of(start_layer=4)
    check_description(pool)
    assert [spec.name for spec in pool.layout.buffers] == ["k", "v", "label"]
    assert pool.layout.token_bytes == 3 * 2 * (8 + 8 + 3) * 2


def test_getters_wait_for_their_layer() -> None:
    """The labels' getter waits as those of keys and values do."""
    pool, counter = pool_of(start_layer=5), Recorder()
    pool.register_layer_transfer_counter(counter)
    pool.get_key_buffer(5)
    pool.get_value_buffer(6)
    pool.get_label_buffer(7)
    assert counter.layers == [0, 1, 2]


def test_wrong_input_is_named() -> None:
    """Missing or misshapen labels, keys and sizes raise an error with both shapes, and nothing is stored."""
    pool, loc, k = pool_of(), torch.tensor([4, 5]), normal(2, 2, 8)
    with pytest.raises(ShapeError, match=r"cache_label is None, the pool takes \(2, 2, 3\)"):
        pool.set_kv_buffer(0, loc, k, k)
    with pytest.raises(ShapeError, match=r"cache_label is 0.5, the pool takes \(2, 2, 3\)"):
        pool.set_kv_buffer(0, loc, k, k, 0.5)
    with pytest.raises(ShapeError, match=r"cache_label is \(2, 2, 8\) .* takes \(2, 2, 3\)"):
        pool.set_kv_buffer(0, loc, k, k, cache_label=k)
    with pytest.raises(ShapeError, match=r"cache_v is \(1, 2, 8\) .* takes \(2, 2, 8\)"):
        pool.set_kv_buffer(0, loc, k, k[:1], cache_label=k[..., :3])
    with pytest.raises(ConfigError, match="heavy_channel_num=0"):
        DoubleSparseTokenToKVPool(8, 1, BF16, 1, 8, 1, "cpu", 0, False)
    assert not any(b.any() for layer_id in range(3) for b in pool.layer_buffers(layer_id))
