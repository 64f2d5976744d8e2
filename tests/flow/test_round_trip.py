"""One round trip for every pool: device -> host -> disk -> host -> device, and every byte compared.

A row of `POOLS` builds a pool. The test only uses the slot spaces of the pool, as transfers, host pages and the page
store do. kernels/test_page_copy.py checks the order of rows in a host page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache import build_engine
from hicache.build.factory import build_transfer
from hicache.config import AdvancedConfig, EngineConfig
from hicache.device import (
    AscendMLAPagedTokenToKVPool,
    AscendTokenToKVPool,
    DoubleSparseTokenToKVPool,
    HybridLinearKVPool,
    Mamba2CacheParams,
    Mamba2StateShape,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
    QuantizedKVCache,
    SlotSpace,
    SWAKVPool,
)
from hicache.errors import ConfigError
from hicache.host.pool import HostPagePool
from hicache.storage import LmdbPageStore, PageFormat
from hicache.storage.process.jobs import PageRows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZE, LAYERS, START = 76, 3, 2  # tokens, layers, and the first layer's global id
COMMON = {"size": SIZE, "page_size": 4, "dtype": BF16, "layer_num": LAYERS, "enable_memory_saver": False}
HEADS, LATENT = {"head_num": 2, "head_dim": 8}, {"kv_lora_rank": 24, "qk_rope_head_dim": 8}


@dataclass(frozen=True)
class Case:
    """Functions that build a pool's slot spaces on a device, and the tokens of a host page. A recurrent state is a
    complete page."""

    build: Callable[[str], tuple[SlotSpace, ...]]
    host_page: int = 16


def pool(kind: type, host_page: int = 16, **settings: Any) -> Case:
    values = {**COMMON, "start_layer": START, **settings}
    return Case(lambda device: kind(**values, device=device).slot_spaces, host_page)


def swa(dtype: torch.dtype) -> Case:
    return Case(lambda device: SWAKVPool(SIZE, SIZE - 8, 4, dtype, 2, 8, [0, 1, 4], [2, 6], device).slot_spaces)


def mamba(device: str) -> MambaPool:
    shape = Mamba2StateShape.create(1, 16, 1, 4, 4, 5, 4)
    return MambaPool(12, Mamba2CacheParams(shape, [1, 3, 4]), device)


def hybrid(**extra: Any) -> Case:
    return Case(
        lambda device: HybridLinearKVPool(SIZE, BF16, 4, 2, 8, [2, 7], device, mamba(device), **extra).slot_spaces
    )


POOLS = {
    "mha bf16": pool(MHATokenToKVPool, **HEADS),
    "mha page 1": pool(MHATokenToKVPool, **HEADS, page_size=1),
    "mha fp8 e4m3": pool(MHATokenToKVPool, **HEADS, dtype=E4M3),
    "mha fp8 e5m2": pool(MHATokenToKVPool, **HEADS, dtype=E5M2),
    "mha fp32, values narrower": pool(MHATokenToKVPool, **HEADS, dtype=F32, v_head_dim=5),
    "mla": pool(MLATokenToKVPool, **LATENT),
    "mla fp8": pool(MLATokenToKVPool, **LATENT, dtype=E4M3),
    "nsa": pool(NSATokenToKVPool, **LATENT),
    "nsa, device page is host page": pool(NSATokenToKVPool, **LATENT, page_size=16),
    "nsa, device page of one": pool(NSATokenToKVPool, 8, **LATENT, page_size=1),
    "nsa fp8, wider rows": pool(NSATokenToKVPool, **LATENT, page_size=8, dtype=E4M3, kv_cache_dim=41),
    "double sparse": pool(DoubleSparseTokenToKVPool, **HEADS, heavy_channel_num=3),
    "ascend mha": pool(AscendTokenToKVPool, **HEADS, dtype=F16),
    "ascend mla": pool(AscendMLAPagedTokenToKVPool, **LATENT),
    "quantized int8": pool(QuantizedKVCache, **HEADS, v_head_dim=12, kv_dtype="int8"),
    "quantized fp8": pool(QuantizedKVCache, **HEADS, v_head_dim=12, kv_dtype="fp8"),
    "swa": swa(BF16),
    "swa fp8": swa(E4M3),
    "mamba": Case(lambda device: mamba(device).slot_spaces),
    "hybrid linear": hybrid(),
    "hybrid linear mla": hybrid(use_mla=True, **LATENT),
}
# Each pool with one of the two kernels. Families that share a layout use both kernels.
ROWS = [(name, ("torch", "triton")[n % 2]) for n, name in enumerate(POOLS)]


def buffers_of(space: SlotSpace) -> list[torch.Tensor]:
    """The buffers of all layers, as bytes."""
    buffers = [buffer for layer in space.layout.layers for buffer in space.layer_buffers(layer)]
    return [buffer.view(torch.uint8) if buffer.dim() > 1 else buffer[:, None].view(torch.uint8) for buffer in buffers]


def some_pages(space: SlotSpace, host_page: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Disjoint source and target slots: two host pages each, of scattered complete device pages."""
    page = space.layout.device_page_size
    order = torch.randperm(space.num_slots // page - 1, generator=torch.Generator().manual_seed(3)) + 1
    assert len(order) * page >= 4 * host_page, "the pool is too small for this test"
    slots = (order[:, None] * page + torch.arange(page)).reshape(-1)[: 4 * host_page].to(device)
    return slots[: 2 * host_page], slots[2 * host_page :]


def through_the_disk(path: Path, host: HostPagePool, source: torch.Tensor, target: torch.Tensor) -> None:
    """Write host pages `source` into a store, open the store again, and read them into host pages `target`."""
    keys, identity = [b"%d" % i for i in range(len(source))], {"layout": host.layout.digest().hex()}
    for is_back in (False, True):
        store = LmdbPageStore(path, identity=identity, formats=[PageFormat(host.page_bytes)], budget_bytes=16 << 20)
        with contextlib.closing(store):
            moved = (
                store.get_into(keys, PageRows(host.memory, target.tolist()))
                if is_back
                else store.put(list(zip(keys, PageRows(host.memory, source.tolist()), strict=True)))
            )
            assert moved == [True] * len(keys)


def one_round_trip(space: SlotSpace, host_page: int, device: str, path: Path) -> None:
    page = space.layout.device_page_size
    config = EngineConfig(
        device_tokens=max(SIZE, host_page), host_bytes=1, host_page_size=host_page, page_size=page, device=device,
        advanced=AdvancedConfig(staging_bytes=1 << 16, transfer_chunk_tokens=host_page),
    )  # fmt: skip
    host = HostPagePool(space.layout, host_page, 8 * space.layout.page_bytes(host_page), pin=device == "cuda")
    backend, counter = build_transfer(config, space, host)
    assert backend is not None
    backend.start()
    with contextlib.closing(host), contextlib.closing(backend):
        for buffer in buffers_of(space):
            buffer.random_()
        expected = [buffer.clone() for buffer in buffers_of(space)]
        source, target = some_pages(space, host_page, device)
        down, up = torch.tensor([5, 2]), torch.tensor([3, 6])
        stored = backend.store(source, down)
        stored.wait()
        through_the_disk(path, host, down, up)
        assert torch.equal(host.bytes_of[down], host.bytes_of[up]) and host.bytes_of[down].any(1).all()
        host.bytes_of[down] = 0
        load = backend.load(up, target, counter.begin())
        load.wait()
        assert stored.error is load.error is None and load.num_bytes == stored.num_bytes == 2 * host.page_bytes
        for buffer in expected:
            span = 1 if len(buffer) == space.num_slots else page  # tokens of a row
            buffer[target[::span] // span] = buffer[source[::span] // span]
        assert all(torch.equal(*pair) for pair in zip(buffers_of(space), expected, strict=True))
        assert not host.bytes_of[[1, 2, 4, 5, 7]].any()


@pytest.mark.parametrize(("name", "kernels"), ROWS, indirect=["kernels"])
def test_bytes_are_restored(device: str, kernels: str, name: str, tmp_path: Path) -> None:
    """Random bytes of a pool survive host pages and the disk and arrive at other slots; all other slots and pages stay
    unchanged."""
    spaces = POOLS[name].build(device)
    assert spaces
    for space in spaces:
        states = any(spec.per == "request" for spec in space.layout.buffers)
        one_round_trip(space, 1 if states else POOLS[name].host_page, device, tmp_path / space.name)


def test_host_pages_are_complete_device_pages() -> None:
    """A host page that is no multiple of a device page is refused if a row belongs to a page; the error names the
    setting. The size is accepted if every row belongs to a token."""
    (space,) = pool(NSATokenToKVPool, **LATENT, page_size=8).build("cpu")
    with pytest.raises(ConfigError, match="host_page_size"):
        HostPagePool(space.layout, 12, 1 << 20, pin=False)
    (space,) = pool(MLATokenToKVPool, **LATENT, page_size=8).build("cpu")
    assert space.layout.page_bytes(12) == 12 * LAYERS * 32 * 2


def test_a_pool_that_does_not_fit_the_settings() -> None:
    """The error names each setting that disagrees with a given pool. Pools of several slot spaces are refused."""
    good = {"device_tokens": SIZE, "host_bytes": 0, "page_size": 4}
    mla = MLATokenToKVPool(**COMMON, **LATENT, device="cpu")
    build_engine(EngineConfig(**good), mla).close()
    for setting, value in (("device_tokens", 40), ("page_size", 2), ("dtype", "float16")):
        with pytest.raises(ConfigError, match=setting):
            build_engine(EngineConfig(**{**good, setting: value}), mla)
    with pytest.raises(ConfigError):
        build_engine(EngineConfig(**good), SWAKVPool(SIZE, SIZE - 8, 4, BF16, 2, 8, [0], [1], "cpu"))
