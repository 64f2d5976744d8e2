"""The contract of the base class, tested for every pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases import refused
from device_case import KINDS, Recorder, fill, normal, pool_of, same, scatter_pages, snapshot
from hicache.device import base
from hicache.errors import ConfigError, ShapeError

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"nsa"}))  # not all rows of nsa belong to tokens
def test_copies_and_moves(device: str, kernels: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU copies, in chunks, are restored to other slots, and moves read before they write, in every buffer of every
    layer. Other numbers of slots or layers are refused."""
    monkeypatch.setattr(base, "COPY_CHUNK_TOKENS", 4)
    pool = pool_of(kind, device, start_layer=2)
    fill(pool)
    before = snapshot(pool)
    source, target = scatter_pages(pool, 10, device)
    copy = pool.get_cpu_copy(source)
    assert [[len(rows) for chunk in layer for rows in chunk[:1]] for layer in copy] == [[4, 4, 2]] * 3
    assert all(x.device.type == "cpu" for layer in copy for chunk in layer for x in chunk)
    pool.load_cpu_copy(copy, target)
    pool.load_cpu_copy(pool.get_cpu_copy(source[:0]), source[:0])
    for buffer in (b for layer in before for b in layer):
        buffer[target] = buffer[source].clone()
    assert same(snapshot(pool), before)
    ring = torch.cat((source[1:], source[:1]))
    pool.move_kv_cache(ring, source)
    for buffer in (b for layer in before for b in layer):
        buffer[ring] = buffer[source].clone()
    refused(
        ShapeError,
        lambda: pool.load_cpu_copy(copy, target[:9]),
        lambda: pool.load_cpu_copy(copy[:2], target),
        lambda: pool.move_kv_cache(target[:9], source),
    )
    assert same(snapshot(pool), before)


@pytest.mark.parametrize("kind", KINDS)
def test_it_describes_itself(kind: str) -> None:
    """The layout has the names, dtypes, shapes and bytes of the tensors. The addresses, and the bytes of a page, are
    those of the tensors too."""
    pool = pool_of(kind, start_layer=2)
    layout = pool.layout
    assert layout.layers == pool.layer_ids == (2, 3, 4) and layout.device_page_size == pool.page_size
    total = 0
    for layer_id in pool.layer_ids:
        specs, buffers = layout.specs_of(layer_id), pool.layer_buffers(layer_id)
        assert [(s.dtype, s.shape) for s in specs] == [(b.dtype, tuple(b.shape[1:])) for b in buffers]
        assert all(not b.any() for b in buffers)
        total += sum(b.nbytes for b in buffers)
    assert pool.mem_usage == total / (1 << 30)
    kinds = list(zip(*(pool.layer_buffers(layer_id) for layer_id in pool.layer_ids), strict=True))
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    assert pointers == [b.data_ptr() for buffers in kinds for b in buffers]
    assert lengths == [b.nbytes for buffers in kinds for b in buffers]
    assert sum(page_bytes) == layout.page_bytes(pool.page_size)
    (space,) = pool.slot_spaces
    assert (space.name, space.num_slots) == ("full", 36) and space.layer_buffers(3)[0] is pool.layer_buffers(3)[0]


NAMES = {
    "mha": ["k", "v"],
    "mla": ["kv"],
    "nsa": ["kv", "index_k"],
    "double sparse": ["k", "v", "label"],
    "int8": ["k", "v", "k_scale", "v_scale"],
    "fp8": ["k", "v", "k_scale", "v_scale"],
}
TOKEN_BYTES = {
    "mha": 2 * (8 + 5) * 2,
    "mla": 32 * 2,
    "nsa": 32 * 2 + 132,
    "double sparse": 2 * (8 + 8 + 3) * 2,
    "int8": 2 * (8 + 12 + 4 + 4),
    "fp8": 2 * (8 + 12 + 4 + 4),
}


def test_stored_layouts_keep_their_names() -> None:
    """The identity of a store includes names and bytes of a token, so two kinds of pools never share pages."""
    layouts = {kind: pool_of(kind).layout for kind in NAMES}
    assert {kind: [spec.name for spec in layout.buffers] for kind, layout in layouts.items()} == NAMES
    assert {kind: layout.token_bytes for kind, layout in layouts.items()} == {k: 3 * n for k, n in TOKEN_BYTES.items()}
    assert len({layout.digest() for layout in layouts.values()}) == len(layouts)
    assert [spec.per for spec in layouts["nsa"].buffers] == ["token", "page"] and layouts["nsa"].spans_of(0) == (1, 4)


LOC = torch.tensor([4, 5])
WHOLE, NOPE, ROPE = normal(2, 1, 32), normal(2, 1, 24), normal(2, 1, 8)
K, V5, V12, LABEL = normal(2, 2, 8), normal(2, 2, 5), normal(2, 2, 12), normal(2, 2, 3)
KEYS, SCALES = torch.ones(2, 128).to(E4M3), torch.ones(2)
ROWS: dict[str, dict[str, torch.Tensor]] = {
    **{kind: {"cache_k": K, "cache_v": V5} for kind in ("mha", "lazy mha")},
    **{kind: {"cache_k": K, "cache_v": V12} for kind in ("int8", "fp8")},
    "ascend mha": {"cache_k": K, "cache_v": K},
    "double sparse": {"cache_k": K, "cache_v": K, "cache_label": LABEL},
}
SLOT = torch.tensor([4])
GETTERS: dict[str, list[Callable[[Any], object]]] = {
    "mla": [lambda pool: pool.get_mla_kv_buffer(7, SLOT)],
    "nsa": [
        lambda pool: pool.get_mla_kv_buffer(7, SLOT),
        lambda pool: pool.get_index_k_with_scale_buffer(7),
        lambda pool: pool.get_index_k_continuous(7, 1, SLOT),
        lambda pool: pool.get_index_k_scale_continuous(7, 1, SLOT),
    ],
    "double sparse": [lambda pool: pool.get_label_buffer(7)],
    "int8": [lambda pool: pool.get_quantized_buffer(7), lambda pool: pool.load_kv(7, SLOT)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_getters_wait_for_their_layer(kind: str) -> None:
    """Every getter waits for its layer by dense index, and a move waits for all layers. Stores, and access to buffers,
    do not wait. `load_kv` returns the rows of the buffers."""
    pool, counter = pool_of(kind, start_layer=5), Recorder()
    pool.get_key_buffer(5)
    pool.register_layer_transfer_counter(counter)
    pool.layer_buffers(5)
    pool.set_kv_buffer(5, LOC, **ROWS.get(kind, {"cache_k": WHOLE, "cache_v": WHOLE}))
    assert counter.layers == []
    pool.get_key_buffer(5)
    pool.get_value_buffer(6)
    assert counter.layers == [0, 1]
    for get in [lambda pool: pool.load_kv(7, SLOT), *GETTERS.get(kind, [])]:
        get(pool)
        assert set(counter.layers[2:]) == {2}
        del counter.layers[2:]
    pool.move_kv_cache(SLOT, SLOT + 1)
    assert counter.layers == [0, 1, 0, 1, 2]
    for rows, complete in zip(pool.load_kv(5, LOC), pool.get_kv_buffer(5), strict=True):
        assert rows.any() and torch.equal(rows.reshape(2, -1), complete.reshape(36, -1)[LOC])


WRONG: dict[str, list[Callable[[Any], object]]] = {
    "mha": [
        lambda pool: pool.set_kv_buffer(0, LOC, K[:1], V5),
        lambda pool: pool.set_kv_buffer(0, LOC, K, K),
        lambda pool: pool.set_kv_buffer(0, LOC, K.int(), V5),
        lambda pool: pool.set_kv_buffer(0, LOC, K.to("meta"), V5),
        lambda pool: pool.set_kv_buffer(0, LOC.float(), K, V5),
        lambda pool: pool.set_kv_buffer(0, LOC[None], K, V5),
        lambda pool: pool.set_kv_buffer(0, LOC.to("meta"), K, V5),
        lambda pool: pool.set_kv_buffer(0, torch.tensor([4, 36]), K, V5),
        lambda pool: pool.set_kv_buffer(0, torch.tensor([-1, 3]), K, V5),
        lambda pool: pool.set_kv_buffer(3, LOC, K, V5),
        lambda pool: pool.get_key_buffer(-1),
    ],
    "mla": [
        lambda pool: pool.set_kv_buffer(0, LOC, NOPE, NOPE),
        lambda pool: pool.set_kv_buffer(0, LOC + 31, WHOLE, None),
        lambda pool: pool.set_mla_kv_buffer(0, LOC, ROPE, NOPE),
        lambda pool: pool.set_mla_kv_buffer(0, LOC, NOPE, ROPE[:1]),
        lambda pool: pool.set_mla_kv_buffer(0, LOC, NOPE, ROPE.flatten()),
        lambda pool: pool.set_mla_kv_buffer(0, LOC + 31, NOPE, ROPE),
        lambda pool: pool.get_mla_kv_buffer(3, LOC),
        lambda pool: pool.get_mla_kv_buffer(0, LOC.float()),
    ],
    "nsa": [
        lambda pool: pool.set_index_k_scale_buffer(0, LOC, KEYS[:, :64], SCALES),
        lambda pool: pool.set_index_k_scale_buffer(0, LOC, KEYS.float(), SCALES),
        lambda pool: pool.set_index_k_scale_buffer(0, LOC, KEYS, torch.ones(3)),
        lambda pool: pool.set_index_k_scale_buffer(0, LOC, KEYS, SCALES.double()),
        lambda pool: pool.set_index_k_scale_buffer(0, LOC + 31, KEYS, SCALES),
        lambda pool: pool.set_index_k_buffer(0, LOC, KEYS),
        lambda pool: pool.set_index_k_buffer(0, LOC, torch.ones(2, 64)),
        lambda pool: pool.set_index_k_buffer(0, LOC - 5, torch.ones(2, 128)),
        lambda pool: pool.get_index_k_continuous(0, 9, torch.tensor([1, 2])),
        lambda pool: pool.get_index_k_continuous(0, 1, torch.tensor([[1, 2]])),
        lambda pool: pool.get_index_k_scale_continuous(0, -1, torch.tensor([1, 2])),
    ],
    "double sparse": [
        lambda pool: pool.set_kv_buffer(0, LOC, K, K),
        lambda pool: pool.set_kv_buffer(0, LOC, K, K, 0.5),
        lambda pool: pool.set_kv_buffer(0, LOC, K, K, cache_label=K),
        lambda pool: pool.set_kv_buffer(0, LOC, K, K[:1], cache_label=LABEL),
    ],
    "ascend mha": [lambda pool: pool.set_kv_buffer(0, LOC, K, K[..., :4])],
    "ascend mla": [lambda pool: pool.set_kv_buffer(0, LOC, K, None)],
    "int8": [
        lambda pool: pool.set_kv_buffer(0, LOC, K, K),
        lambda pool: pool.set_kv_buffer(0, LOC + 31, K, V12),
        lambda pool: pool.load_kv(0, torch.tensor([4.0])),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_refused(kind: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, slots and layers that do not fit raise ShapeError, slots only in debug mode. Nothing is stored."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    pool = pool_of(kind)
    refused(ShapeError, *(functools.partial(call, pool) for call in WRONG[kind]))
    if kind == "mha" and kernels == "triton":
        refused(ShapeError, lambda: pool.move_kv_cache(LOC, LOC + 31), lambda: pool.move_kv_cache(LOC + 31, LOC))
    assert not any(buffer.any() for layer_id in pool.layer_ids for buffer in pool.layer_buffers(layer_id))


def test_sizes_that_do_not_fit_are_refused() -> None:
    refused(
        ConfigError,
        *(
            functools.partial(pool_of, kind, **{name: 0})
            for kind in KINDS
            for name in ("size", "page_size", "layer_num")
        ),
        *(functools.partial(pool_of, kind, end_layer=4) for kind in KINDS),
        lambda: pool_of("mha", head_num=0),
        lambda: pool_of("mha", v_head_dim=0),
        lambda: pool_of("mla", kv_lora_rank=0),
        lambda: pool_of("mla", qk_rope_head_dim=0),
        lambda: pool_of("nsa", index_head_dim=64),
        lambda: pool_of("nsa", kv_cache_dim=31),
        lambda: pool_of("double sparse", heavy_channel_num=0),
        lambda: pool_of("ascend mha", v_head_dim=4),
        lambda: pool_of("ascend mha", head_dim=0),
        lambda: pool_of("int8", kv_dtype="int4"),
        lambda: pool_of("int8", dtype=E4M3),
        lambda: pool_of("int8", head_dim=0),
    )
    for last in (2, 3):  # callers may pass the last layer or the one after it
        assert pool_of("mha", end_layer=last).layer_ids == (0, 1, 2)
