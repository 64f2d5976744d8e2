"""Packed chunks in vLLM's CPU tier and on disk, driven by vLLM's own types and managers, on the CPU backend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
)

from compiled_keys import compiled_keys
from hicache.errors import ConfigError
from hicache.integrations.vllm import HiCacheOffloadingSpec
from hicache.integrations.vllm.block_shapes import HeadLayout
from hicache.integrations.vllm.head_layouts import head_layouts
from hicache.kernels import pack, page_copy, upload, zero_copy
from hicache.storage import describe
from vllm_offload_case import Cache, Engine, block_bytes, engines_on, offloading_config
from vllm_tier_case import key

PLAIN = Cache(widths=(65536, 65536), groups=((0, 1),))
CHUNKED = Cache(widths=(32768, 32768), groups=((0, 1),), blocks_per_chunk=2)
TWO_GROUPS = Cache(widths=(32768, 32768, 32768), groups=((0, 1, 2), (0, 2)))


def extra(cache: Cache, rows: int, kv_packing: str = "4", **more: Any) -> dict[str, Any]:
    """Settings of the connector. `rows`: the memory of the CPU tier, as a number of raw rows."""
    of_spec = {"spec_name": "HiCacheOffloadingSpec", "cpu_bytes_to_use": rows * cache.chunk_bytes}
    return {**of_spec, "kv_packing": kv_packing, **more}


def disk(path: Path) -> dict[str, Any]:
    return {"disk": {"path": str(path), "budget": "64MB", "prefill_tokens_per_s": 0}}


@pytest.fixture
def engines(device: str) -> Iterator[Any]:
    with engines_on(device) as make:
        yield make


@pytest.mark.smoke
@pytest.mark.parametrize(("kv_packing", "more"), [("off", 0), ("4", 0.25), ("3", 0.32)])
def test_the_same_memory_holds_more_chunks(engines: Any, kv_packing: str, more: float) -> None:
    """The same memory holds more chunks when they are packed, and all rows are usable. 32 tokens of 131072 bytes take
    100896, or 93728, before rows are rounded up."""
    raw = 64
    engine = engines(PLAIN, extra(PLAIN, raw, kv_packing))
    rows = engine.spec.num_chunks
    assert raw * (1 + more) <= rows and rows * engine.spec.kv_bytes_per_chunk <= raw * PLAIN.chunk_bytes
    assert (rows == raw) == (not more)
    for number in range(rows):
        engine.write(1, number)
        assert engine.store([key(number)], [1]) == [key(number)]
    for number in range(rows):
        assert engine.load([key(number)], [2]) and engine.holds(2, number)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_packing", ["off", "4", "3"])
@pytest.mark.parametrize("cache", [PLAIN, CHUNKED], ids=["plain", "chunked"])
def test_a_worker_that_is_ready_compiles_nothing(engines: Any, cache: Cache, kv_packing: str) -> None:
    """After its start a worker compiles nothing, for any number of chunks and for chunks that do not fit."""
    with compiled_keys(page_copy, pack, zero_copy, upload) as keys:
        engine = engines(cache, extra(cache, 40, kv_packing))
        compiled, per_chunk = [*keys], cache.blocks_per_chunk
        assert compiled
        for count in (1, 2, 3, 16, 17):
            names, blocks = [key(100 * count + number) for number in range(count)], [*range(1, 1 + count * per_chunk)]
            for block in blocks:
                engine.write(block, block, is_random=block == 3)
            assert engine.store(names, blocks) == names
            assert engine.load(names, blocks)
        assert keys == compiled


@pytest.mark.smoke
@pytest.mark.parametrize("cache", [PLAIN, CHUNKED, TWO_GROUPS], ids=["plain", "chunked", "two-groups"])
def test_random_programs_keep_every_byte(engines: Any, tmp_path: Path, cache: Cache) -> None:
    """After any sequence of stores, loads and restarts, each chunk that is found has the bytes that were stored under
    its name. With a disk every stored chunk is found, except chunks that do not fit when packed, which are only in CPU
    memory."""
    rng, rows, per_chunk = random.Random(len(cache.groups) + cache.blocks_per_chunk), 6, cache.blocks_per_chunk
    engine, found = engines(cache, extra(cache, rows, **disk(tmp_path))), 0
    stored: set[tuple[int, int]] = set()
    for step in range(60):
        action = rng.choices(["store", "load", "restart"], [10, 10, 1])[0]
        if action == "restart":
            engine.settle()
            engine.close()
            engine = engines(cache, extra(cache, rows, **disk(tmp_path)))
            continue
        group, first, count = rng.randrange(len(cache.groups)), rng.randrange(20), rng.randrange(1, 4)
        numbers = list(range(first, first + count))
        keys = [key(number, group=group) for number in numbers]
        blocks = rng.sample(range(1, 64), count * per_chunk)
        contents = [per_chunk * number + i for number in numbers for i in range(per_chunk)]
        random_bits = [content // per_chunk % 5 == 0 for content in contents]
        if action == "store":
            engine.settle()
            for content, block, is_random in zip(contents, blocks, random_bits, strict=True):
                engine.write(block, content, group, is_random=is_random)
            taken = engine.store(keys, blocks, group)
            stored |= {(group, n) for n, key in zip(numbers, keys, strict=True) if key in taken and n % 5}
            engine.settle()
        elif engine.load(keys, blocks, group):
            found += 1
            places = zip(blocks, contents, random_bits, strict=True)
            assert all(engine.holds(block, content, group, is_random=is_random) for block, content, is_random in places)
        else:
            assert not stored.issuperset((group, number) for number in numbers), f"step {step}"
    assert found > 5


@pytest.mark.smoke
def test_a_chunk_that_does_not_fit_is_served_from_memory_and_not_from_the_disk(engines: Any, tmp_path: Path) -> None:
    engine = engines(PLAIN, extra(PLAIN, 8, **disk(tmp_path)))
    keys = [key(number) for number in range(3)]
    for number in range(3):
        engine.write(1 + number, number, is_random=number == 1)
    assert engine.store(keys, [1, 2, 3]) == keys
    engine.settle()
    assert engine.load(keys, [4, 5, 6])
    assert all(engine.holds(4 + number, number, is_random=number == 1) for number in range(3))
    [tier] = engine.manager.secondary_tiers
    assert tier.misfit_pages.value == 1
    [folder] = tmp_path.iterdir()
    engine.close()
    assert describe(folder).entries == 2
    restarted = engines(PLAIN, extra(PLAIN, 8, **disk(tmp_path)))
    assert [restarted.load([of], [7]) for of in keys] == [True, False, True]
    assert restarted.holds(7, 2)


@pytest.mark.smoke
def test_packed_and_raw_rows_have_stores_of_their_own(engines: Any, tmp_path: Path) -> None:
    """Packed rows, raw rows and rows with other bits each have their own store, and find their chunks there after a
    restart."""
    for present, kv_packing in enumerate(("off", "4", "3")):
        for is_restart in (False, True):
            engine = engines(PLAIN, extra(PLAIN, 8, kv_packing, **disk(tmp_path)))
            assert engine.load([key(1)], [1]) == is_restart
            assert not is_restart or engine.holds(1, present)
            engine.write(2, present)
            engine.store([key(1)], [2])
            engine.settle()
            engine.close()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.smoke
def test_each_worker_packs_its_part_of_a_row(tmp_path: Path, device: str) -> None:
    """If one worker's part of a chunk does not fit when packed, the chunk is served to both workers, and is not written
    to the disk."""
    config = offloading_config(PLAIN, extra(PLAIN, 16, **disk(tmp_path)))
    config = replace(config, parallel=replace(config.parallel, world_size=2, tp_size=2))
    manager = HiCacheOffloadingSpec(config).get_manager()
    caches = [[torch.zeros(64, n, dtype=torch.int8, device=device) for n in PLAIN.widths] for _ in range(2)]
    workers = [
        HiCacheOffloadingSpec(replace(config, parallel=replace(config.parallel, rank=rank))).get_worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
                [[CanonicalKVCacheRef(i, width) for i, width in enumerate(PLAIN.widths)]],
            )
        )
        for rank, tensors in enumerate(caches)
    ]
    driver = Engine.__new__(Engine)  # the requests and steps of `Engine`, with two workers instead of one
    driver.manager, driver.spec, driver._requests = manager, None, iter(range(99))
    context = driver.request()
    for rank, tensors in enumerate(caches):
        for block in (1, 2):
            for i, tensor in enumerate(tensors):
                is_random = (rank, block) == (1, 2)
                tensor[block] = block_bytes(10 * rank + block, i, PLAIN.widths[i], is_random).to(device)
    keys = [key(1), key(2)]
    output = manager.prepare_store(keys, context)
    for worker in workers:
        assert worker.submit_store(1, GPULoadStoreSpec([1, 2], [2], [0]), output.store_spec)
        worker.wait({1})
        assert [result.success for result in worker.get_finished()] == [True]
    manager.complete_store(keys, context)
    driver.settle()
    assert {manager.lookup(of, context) for of in keys} == {LookupResult.HIT}
    loaded = manager.prepare_load(keys, context)
    for worker, tensors in zip(workers, caches, strict=True):
        assert worker.submit_load(2, loaded, GPULoadStoreSpec([5, 6], [2], [0]))
        worker.wait({2})
        assert [result.success for result in worker.get_finished()] == [True]
        assert all(torch.equal(tensor[5:7], tensor[1:3]) for tensor in tensors)
    [tier] = manager.secondary_tiers
    assert tier.misfit_pages.value == 1
    for worker in workers:
        worker.shutdown()
    manager.shutdown()
    assert describe(next(tmp_path.iterdir())).entries == 1


class Layer(AttentionLayerBase):
    """A layer of a model, with keys and values of 4 heads of 64 elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=dtype)

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        return self._spec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_vllm_tells_of_the_heads_of_a_layer(dtype: torch.dtype) -> None:
    """If vLLM does not name a layer, its heads are unknown. A layer with another dtype than bfloat16 makes the start of
    the worker fail."""
    config, caches = (
        offloading_config(PLAIN, extra(PLAIN, 64)),
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.zeros(2, n, dtype=torch.int8), n) for n in PLAIN.widths],
            [[CanonicalKVCacheRef(i, n) for i, n in enumerate(PLAIN.widths)]],
        ),
    )
    assert head_layouts(config, caches) == [HeadLayout(), HeadLayout()]
    vllm_config = VllmConfig()
    vllm_config.compilation_config.static_forward_context["layers.0.1.attn"] = Layer(dtype)
    with set_current_vllm_config(vllm_config):
        if dtype is torch.bfloat16:
            assert head_layouts(config, caches) == [HeadLayout(), HeadLayout(128)]
            tokens_first = replace(config, kv_cache_layout="LBNHC")
            assert head_layouts(tokens_first, caches)[1] == HeadLayout(128, is_token_first=True)
        else:
            with pytest.raises(ConfigError, match=r"layers\.0\.1\.attn"):
                head_layouts(config, caches)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"dtype": "float16"}}, "float16, not bfloat16"),
        ({"model": {"dtype": "fp8"}}, "fp8, not bfloat16"),
        ({"replicated_layout": True}, "several workers read one part"),
        ({"parallel": {"dcp_size": 2}}, "several workers"),
        ({"cache": {"blocks_per_chunk": 3}}, "96 tokens"),
        ({"groups": 48}, "48 tokens"),
        ({"groups": 4}, "4 tokens"),
        ({"names": ("layers.0.attn", "layers.1.mixer")}, "layers.1.mixer"),
        ({"names": ("layers.0.attn", "layers.1.linear_attn"), "groups": 544}, "layers.1.linear_attn"),
        ({"worker_kv_bytes_per_block": 131073}, "not a multiple of 128"),
        ({"extra_config": {"secondary_tiers": [{"type": "fs"}]}}, "secondary_tiers"),
    ],
)
def test_rows_that_cannot_be_packed(change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot be packed are an error if a number of bits was given; the error says why. With auto such rows
    stay raw."""
    config = offloading_config(PLAIN, extra(PLAIN, 64))
    [group] = config.groups
    parts = {
        name: replace(getattr(config, name), **change[name])
        for name in ("model", "parallel", "cache")
        if name in change
    }
    groups = (
        replace(group, tokens_per_block=change.get("groups", 32), layer_names=change.get("names", group.layer_names)),
    )
    plain = {name: change[name] for name in ("replicated_layout", "worker_kv_bytes_per_block") if name in change}
    config = replace(config, **parts, groups=groups, **plain)
    given = {**config.extra_config, **change.get("extra_config", {})}
    with pytest.raises(ConfigError, match=named):
        HiCacheOffloadingSpec(replace(config, extra_config=given))
    raw = HiCacheOffloadingSpec(replace(config, extra_config={**given, "kv_packing": "off"}))
    monkeypatch.setattr("hicache.integrations.vllm.offloading_spec.current_platform", CudaPlatform())
    auto = HiCacheOffloadingSpec(replace(config, extra_config={**given, "kv_packing": "auto"}))
    assert auto.row_packing is None and auto.num_chunks == raw.num_chunks


class CudaPlatform:
    """A stand-in for vLLM's platform of a machine with a GPU."""

    def is_cuda(self) -> bool:
        return True


@pytest.mark.parametrize(("on_cuda", "is_packed"), [(False, False), (True, True)])
def test_auto_packs_on_cuda_alone(on_cuda: bool, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = offloading_config(PLAIN, extra(PLAIN, 64, "auto"))
    if on_cuda:
        monkeypatch.setattr("hicache.integrations.vllm.offloading_spec.current_platform", CudaPlatform())
    packing = HiCacheOffloadingSpec(config).row_packing
    assert (packing is not None) == is_packed or torch.cuda.is_available()
    assert packing is None or packing.name == "rows=4/0.001"
