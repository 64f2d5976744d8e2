"""The pool of keys and values: what goes in comes out, by value."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch

from hicache.device import MHATokenToKVPool
from hicache.errors import ConfigError, OutOfMemory, ShapeError

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Layer:
    layer_id: int


class Recorder:
    """A counter that notes what it was asked to wait for."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, threshold: int) -> None:
        self.layers.append(threshold)


def pool_of(device: str = "cpu", dtype: torch.dtype = BF16, size: int = 30, **extra: int | bool) -> MHATokenToKVPool:
    return MHATokenToKVPool(size, 4, dtype, 2, 8, 3, device, False, **extra)


def random_kv(
    tokens: int, v_dim: int = 8, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, 2, dim, generator=generator) for dim in (8, v_dim))
    return k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize("v_dim", [8, 5])
def test_what_is_stored_is_read(device: str, kernels: str, dtype: torch.dtype, v_dim: int) -> None:
    """Each layer's rows read back as the input cast to the pool's dtype, at their slots only."""
    pool = pool_of(device, dtype, v_head_dim=v_dim)
    loc = torch.tensor([30, 4, 17, 9, 33], device=device)
    expected = []
    for layer_id in range(3):
        k, v = random_kv(5, v_dim, seed=layer_id)
        pool.set_kv_buffer(Layer(layer_id) if layer_id else 0, loc, k.to(device), v.to(device))
        expected.append((k.to(dtype).float(), v.to(dtype).float()))
    for layer_id, (k, v) in enumerate(expected):
        keys, values = pool.get_kv_buffer(layer_id)
        assert keys.dtype == values.dtype == dtype
        assert keys.shape == (34, 2, 8) and values.shape == (34, 2, v_dim)
        for got, rows in ((keys, k), (values, v)):
            whole = torch.zeros(34, 2, rows.shape[-1])
            whole[loc.cpu()] = rows
            assert torch.equal(got.float().cpu(), whole)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_scales_divide_and_inputs_stay(device: str, kernels: str, dtype: torch.dtype) -> None:
    """What is stored is the input over its scale; input and scale keep their values."""
    pool = pool_of(device, dtype)
    k, v = (x.to(device) for x in random_kv(3))
    v_scale = torch.tensor([4.0], device=device)
    before = k.clone(), v.clone()
    loc = torch.tensor([5, 6, 8], device=device)
    pool.set_kv_buffer(1, loc, k, v, k_scale=0.5, v_scale=v_scale)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1]) and v_scale.item() == 4.0
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys.float()[loc], (k / 0.5).to(dtype).float())
    assert torch.equal(values.float()[loc], (v / v_scale).to(dtype).float())


def test_slices_of_a_projection() -> None:
    """Keys and values that are slices of one wider tensor, or transposed, are stored by value."""
    pool = pool_of(dtype=F32)
    qkv = torch.randn(4, 6, 8)
    loc = torch.tensor([4, 5, 6, 7])
    pool.set_kv_buffer(0, loc, qkv[:, 2:4], qkv[:, 4:6])
    assert torch.equal(pool.get_key_buffer(0)[loc], qkv[:, 2:4])
    heads_first = torch.randn(2, 4, 8)
    pool.set_kv_buffer(0, loc, heads_first.transpose(0, 1), heads_first.transpose(0, 1))
    assert torch.equal(pool.get_value_buffer(0)[loc], heads_first.transpose(0, 1))


def test_getters_wait_for_their_layer() -> None:
    """Getters wait by dense layer index; buffers for the transfer engine and stores do not."""
    pool = pool_of(start_layer=5)
    counter = Recorder()
    pool.get_key_buffer(5)
    pool.register_layer_transfer_counter(counter)
    pool.get_key_buffer(6)
    pool.get_value_buffer(7)
    pool.layer_buffers(5)
    pool.set_kv_buffer(5, torch.tensor([4]), *random_kv(1))
    assert counter.layers == [1, 2]


def test_layers_are_global() -> None:
    """A pool of layers 5..7 stores by global id, says so in its layout, and refuses others by name."""
    pool = pool_of(start_layer=5, end_layer=7)
    k, v = random_kv(1)
    pool.set_kv_buffer(7, torch.tensor([4]), k, v)
    assert torch.equal(pool.layer_buffers(7)[0][4], k[0]) and not pool.layer_buffers(5)[0].any()
    for layer_id in (4, 8):
        with pytest.raises(ShapeError, match=rf"layer_id={layer_id} is not one of this pool's 5..7"):
            pool.get_key_buffer(layer_id)
    with pytest.raises(ConfigError, match="layer_num=3"):
        pool_of(start_layer=5, end_layer=9)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_layout_tells_what_is_stored(dtype: torch.dtype) -> None:
    """The layout's buffers have the names, order, dtype and row shape of the tensors; bytes add up."""
    pool = pool_of(dtype=dtype, v_head_dim=5, start_layer=2)
    layout = pool.layout
    assert layout.layers == (2, 3, 4) and layout.device_page_size == 4
    for layer_id in layout.layers:
        specs, buffers = layout.specs_of(layer_id), pool.layer_buffers(layer_id)
        assert [s.name for s in specs] == ["k", "v"] and all(s.per == "token" for s in specs)
        assert [(s.dtype, s.shape) for s in specs] == [(b.dtype, tuple(b.shape[1:])) for b in buffers]
    assert layout.token_bytes == 3 * 2 * 13 * dtype.itemsize
    assert pool.mem_usage == layout.token_bytes * 34 / (1 << 30)


@pytest.mark.parametrize("tokens", [0, 7, 8200])
def test_cpu_copies_come_back(device: str, tokens: int) -> None:
    """A copy on the CPU, in chunks of 8192, written to other slots gives the same bytes in all layers."""
    pool = pool_of(device, E4M3, size=2 * 8200)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    order = torch.randperm(2 * 8200, generator=torch.Generator().manual_seed(1)).to(device) + 4
    source, target = order[:tokens], order[8200 : 8200 + tokens]
    expected = [[b[source].cpu() for b in pool.layer_buffers(layer_id)] for layer_id in range(3)]
    copy = pool.get_cpu_copy(source)
    assert len(copy) == 3 and all(chunk[0].device.type == "cpu" for layer in copy for chunk in layer)
    if tokens > 8192:
        assert [len(chunk[0]) for chunk in copy[0]] == [8192, 8]
    pool.load_cpu_copy(copy, target)
    for layer_id, rows in enumerate(expected):
        for buffer, row in zip(pool.layer_buffers(layer_id), rows, strict=True):
            assert torch.equal(buffer[target].cpu(), row)
    with pytest.raises(ShapeError, match=f"{tokens} tokens for {tokens + 1} slots"):
        pool.load_cpu_copy(copy, order[: tokens + 1])


def test_overlapping_moves(device: str) -> None:
    """A move reads all sources before it writes: shifted ranges and swaps are right in every layer."""
    pool = pool_of(device, F32)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    before = [[b.clone() for b in pool.layer_buffers(layer_id)] for layer_id in range(3)]
    source = torch.tensor([4, 5, 6, 7, 20, 21], device=device)
    target = torch.tensor([5, 6, 7, 8, 21, 20], device=device)
    pool.move_kv_cache(target, source)
    for layer_id in range(3):
        for buffer, old in zip(pool.layer_buffers(layer_id), before[layer_id], strict=True):
            old[target] = old[source].clone()
            assert torch.equal(buffer, old)
    with pytest.raises(ShapeError, match="target slots"):
        pool.move_kv_cache(target[:2], source)


def test_buffer_addresses() -> None:
    """Addresses, bytes and bytes a page: keys of all layers, then values, as the tensors have them."""
    pool = pool_of(v_head_dim=5)
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    assert pointers == [b.data_ptr() for b in (*pool.k_buffer, *pool.v_buffer)]
    assert lengths == [34 * 2 * 8 * 2] * 3 + [34 * 2 * 5 * 2] * 3
    assert page_bytes == [4 * 2 * 8 * 2] * 3 + [4 * 2 * 5 * 2] * 3
    assert pointers[1] - pointers[0] == lengths[0]


def test_wrong_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and slots that do not fit raise ShapeError with both shapes, and nothing is stored."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    pool = pool_of()
    k, v = random_kv(2)
    loc = torch.tensor([4, 5])
    bad = [
        (loc, k[:1], v, r"cache_k is \(1, 2, 8\) .* takes \(2, 2, 8\)"),
        (loc, k, v[..., :4], r"cache_v is \(2, 2, 4\) .* takes \(2, 2, 8\)"),
        (loc, k.int(), v, r"torch.int32 .* takes .* torch.bfloat16"),
        (loc.float(), k, v, "need int64 or int32"),
        (torch.tensor([4, 34]), k, v, r"slots 4..34 are outside the pool's 0..33"),
        (torch.tensor([-1, 3]), k, v, r"slots -1..3"),
    ]
    for slots, keys, values, message in bad:
        with pytest.raises(ShapeError, match=message):
            pool.set_kv_buffer(0, slots, keys, values)
    assert not any(b.any() for b in (*pool.k_buffer, *pool.v_buffer))
    with pytest.raises(ConfigError, match="size=0"):
        pool_of(size=0)


@pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is not None, reason="the memory saver is there")
def test_a_missing_memory_saver_is_named() -> None:
    """Asking for the memory saver without its package is a ConfigError with both ways out."""
    with pytest.raises(ConfigError, match="install it, or set enable_memory_saver=False"):
        MHATokenToKVPool(8, 1, BF16, 1, 8, 1, "cpu", True)


@pytest.mark.gpu
def test_a_pool_larger_than_the_device_is_refused() -> None:
    """A pool that does not fit raises OutOfMemory with bytes needed, bytes free and the setting, and leaves nothing."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes on cuda, \d+ bytes are free; lower device_tokens"):
        pool_of("cuda", size=1 << 40)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("alt_stream", [True, False])
def test_store_in_a_captured_graph(alt_stream: bool) -> None:
    """A store captured in a CUDA graph stores what its inputs hold at replay, on one stream or two."""
    pool = pool_of("cuda", enable_alt_stream=alt_stream)
    loc = torch.tensor([9, 4, 30], device="cuda")
    k, v = (x.cuda() for x in random_kv(3))
    pool.set_kv_buffer(0, loc, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set_kv_buffer(2, loc, k, v)
    later = [x.cuda() for x in random_kv(3, seed=9)]
    k.copy_(later[0])
    v.copy_(later[1])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(pool.get_key_buffer(2)[loc], later[0]) and torch.equal(pool.get_value_buffer(2)[loc], later[1])
