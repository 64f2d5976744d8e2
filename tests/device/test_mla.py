"""The pool of latent rows: what goes in whole or in two parts comes out, by value."""

from __future__ import annotations

import pytest
import torch

from device_case import Recorder, check_copies_and_moves, check_description, normal
from hicache.device import MLATokenToKVPool
from hicache.errors import ConfigError, ShapeError

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def pool_of(device: str = "cpu", dtype: torch.dtype = BF16, **extra: int) -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=32, page_size=4, dtype=dtype, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=3, device=device,
        enable_memory_saver=False, **extra,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F32, E4M3, E5M2])
def test_parts_and_whole_rows_are_the_same(device: str, kernels: str, dtype: torch.dtype) -> None:
    """A row stored in two parts reads as one, a row stored whole reads as two, and values are the row's first part."""
    pool = pool_of(device, dtype)
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


def test_scales_divide_and_inputs_stay(device: str, kernels: str) -> None:
    """A whole row is stored over its scale, a number or a tensor; the row and the scale keep their values."""
    pool = pool_of(device, E4M3)
    rows, loc = normal(2, 1, 32).to(device), torch.tensor([5, 9], device=device)
    before = rows.clone()
    for scale in (0.5, torch.tensor([4.0], device=device)):
        pool.set_kv_buffer(0, loc, rows, rows, k_scale=scale)
        assert torch.equal(rows, before)
        assert torch.equal(pool.get_key_buffer(0)[loc].float(), (rows.float() / scale).to(E4M3).float())


def test_copies_and_moves(device: str) -> None:
    """CPU copies and moves carry whole rows."""
    check_copies_and_moves(pool_of(device, start_layer=2), device)


def test_it_describes_itself() -> None:
    """Layout, addresses and bytes are those of the one tensor over all layers."""
    pool = pool_of(start_layer=5)
    check_description(pool)
    assert [spec.name for spec in pool.layout.buffers] == ["kv"] and pool.kv_buffer.shape == (3, 36, 1, 32)
    assert pool.layout.token_bytes == 3 * 32 * 2


def test_getters_wait_for_their_layer() -> None:
    """Every getter waits for its layer by dense index; stores do not."""
    pool, counter = pool_of(start_layer=5), Recorder()
    pool.register_layer_transfer_counter(counter)
    loc = torch.tensor([4])
    pool.set_mla_kv_buffer(5, loc, normal(1, 1, 24), normal(1, 1, 8))
    assert counter.layers == []
    pool.get_key_buffer(5)
    pool.get_value_buffer(6)
    pool.get_mla_kv_buffer(7, loc)
    assert counter.layers == [0, 1, 2]


def test_wrong_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, parts, slots, layers and sizes that do not fit raise an error with both shapes, and nothing is stored."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    pool, loc = pool_of(), torch.tensor([4, 5])
    nope, rope, rows = normal(2, 1, 24), normal(2, 1, 8), normal(2, 1, 32)
    with pytest.raises(ShapeError, match=r"cache_k is \(2, 1, 24\) .* takes \(2, 1, 32\)"):
        pool.set_kv_buffer(0, loc, nope, nope)
    with pytest.raises(ShapeError, match=r"k_nope is \(2, 1, 8\) .* takes \(2, 1, 24\)"):
        pool.set_mla_kv_buffer(0, loc, rope, nope)
    with pytest.raises(ShapeError, match=r"k_rope is \(1, 1, 8\) .* takes \(2, 1, 8\)"):
        pool.set_mla_kv_buffer(0, loc, nope, rope[:1])
    with pytest.raises(ShapeError, match=r"k_rope is \(16,\)"):
        pool.set_mla_kv_buffer(0, loc, nope, rope.flatten())
    with pytest.raises(ShapeError, match=r"slots 4..36 are outside the pool's 0..35"):
        pool.set_kv_buffer(0, torch.tensor([4, 36]), rows, rows)
    with pytest.raises(ShapeError, match=r"layer_id=3 is not one of this pool's 0\.\.2"):
        pool.get_mla_kv_buffer(3, loc)
    with pytest.raises(ConfigError, match="qk_rope_head_dim=0"):
        MLATokenToKVPool(8, 1, BF16, 8, 0, 1, "cpu", False)
    assert not pool.kv_buffer.any()
