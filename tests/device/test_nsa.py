"""The pool of sparse latent attention: index keys are stored by page, latent rows by token."""

from __future__ import annotations

import torch

from device_case import fill, normal, pool_of, scatter_pages
from hicache.device import DSATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

BF16, F32, U8, E4M3 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn
PAGE = 4


def held(pool: NSATokenToKVPool, layer_id: int, slot: int) -> tuple[bytes, bytes, bytes]:
    """The content of a slot by the format of the pool: its latent row, its index key and its scale."""
    latent, index = (buffer.cpu() for buffer in pool.layer_buffers(layer_id))
    page, token = divmod(slot, pool.page_size)
    scales = pool.page_size * 128
    parts = (
        latent[slot].view(U8).flatten(),
        index[page, token * 128 : token * 128 + 128],
        index[page, scales + token * 4 : scales + token * 4 + 4],
    )
    return tuple(bytes(part.tolist()) for part in parts)  # type: ignore[return-value]


def everything(pool: NSATokenToKVPool) -> list[list[tuple[bytes, bytes, bytes]]]:
    return [[held(pool, layer_id, slot) for slot in range(36)] for layer_id in pool.layer_ids]


def test_quantised_keys_are_found_by_page(device: str, kernels: str) -> None:
    """Keys that the pool quantises, and given keys with scales, are read back in sequence order, close to the input.
    Latent rows do not change."""
    pool = pool_of("nsa", device)
    pages = torch.tensor([7, 2, 5], dtype=torch.int32, device=device)
    loc = (pages.long()[:, None] * PAGE + torch.arange(PAGE, device=device)).reshape(-1)[:10]
    x = normal(10, 128, seed=3).to(device)
    pool.set_index_k_buffer(1, loc, x)
    keys = pool.get_index_k_continuous(1, 10, pages)
    scales = pool.get_index_k_scale_continuous(1, 10, pages)
    assert (keys.shape, keys.dtype, scales.shape, scales.dtype) == ((10, 128), U8, (10, 4), U8)
    factor = scales.view(F32)
    assert torch.equal(factor[:, 0], x.float().abs().amax(1) / torch.full((10,), 448.0, device=device))
    assert torch.equal(keys, (x.float() / factor).to(E4M3).view(U8))
    assert torch.all((keys.view(E4M3).float() * factor - x.float()).abs() <= x.float().abs() / 16 + factor / 512)
    other = pool_of("nsa", device)
    other.set_index_k_scale_buffer(1, loc, keys.view(E4M3), factor)
    assert torch.equal(other.get_index_k_with_scale_buffer(1), pool.get_index_k_with_scale_buffer(1))
    assert not pool.kv_buffer.any() and not pool.get_index_k_with_scale_buffer(0).any()


def test_a_page_of_64_is_8192_bytes_and_256() -> None:
    """With pages of 64 tokens a page has 8192 bytes of keys and then 256 bytes of scales. The alias is the same
    class."""
    pool = pool_of("nsa", page_size=64)
    assert pool.index_k_with_scale_buffer[0].shape == (2, 8192 + 256)
    pool.set_index_k_scale_buffer(0, torch.tensor([65]), torch.full((1, 128), 9, dtype=U8), torch.tensor([[0.25]]))
    row = pool.get_index_k_with_scale_buffer(0)[1]
    assert row[128:256].tolist() == [9] * 128 and row.view(F32)[2048 + 1] == 0.25
    assert int(row.count_nonzero()) == 128 + int(torch.tensor([0.25]).view(U8).count_nonzero())
    assert DSATokenToKVPool is NSATokenToKVPool and issubclass(NSATokenToKVPool, MLATokenToKVPool)


def test_latent_rows_are_those_of_mla(device: str, kernels: str) -> None:
    """Two-part rows are written and read without changing index keys. A wider row keeps the bytes after its parts."""
    pool = pool_of("nsa", device, kv_cache_dim=40)
    loc = torch.tensor([9, 4], device=device)
    rows, nope, rope = (normal(2, 1, n, seed=n).to(device) for n in (40, 24, 8))
    pool.set_kv_buffer(0, loc, rows, rows)
    pool.set_mla_kv_buffer(0, loc, nope, rope)
    assert torch.equal(pool.get_key_buffer(0)[loc], torch.cat((nope, rope, rows[..., 32:]), dim=-1))
    assert torch.equal(pool.get_mla_kv_buffer(0, loc)[1], rope) and pool.get_value_buffer(0).shape == (36, 1, 24)
    assert not pool.get_index_k_with_scale_buffer(0).any()


def test_copies_and_moves_go_by_token(device: str) -> None:
    """A copy of ten tokens, two and a half pages, and a move of single tokens carry the latent row, the index key and
    the scale of each, and touch no other token of any page."""
    pool = pool_of("nsa", device, start_layer=3)
    fill(pool)
    expected = everything(pool)
    source, target = scatter_pages(pool, 10, device)
    copy = pool.get_cpu_copy(source)
    pool.load_cpu_copy(copy, target)
    for layer in expected:
        for new, old in zip(target.tolist(), source.tolist(), strict=True):
            layer[new] = layer[old]
    assert everything(pool) == expected
    tgt, src = torch.tensor([5, 6, 7, 8, 21, 20], device=device), torch.tensor([4, 5, 6, 7, 20, 21], device=device)
    pool.move_kv_cache(tgt, src)
    for layer in expected:
        for new, row in zip(tgt.tolist(), [layer[slot] for slot in src.tolist()], strict=True):
            layer[new] = row
    assert everything(pool) == expected
