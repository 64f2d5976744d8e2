"""Memory of the device tier: how many tokens fit, where the memory comes from, when it is allocated, and how full it
is."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import pytest
import torch

from cases import refused
from component_case import MODELS, config
from hicache import build_engine
from hicache.alloc import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.device import (
    HybridReqToTokenPool,
    MHATokenToKVPool,
    plan_capacity,
)
from hicache.device.memory import LazyColumn, nvlink_pool
from hicache.errors import ConfigError, OutOfMemory
from hicache.layout import BufferSpec, LatentGeometry, ModelGeometry, PoolLayout
from hicache.metrics import memory_pressure
from hicache.monitoring.plot import MemorySample, plot_memory_usage

BF16 = torch.bfloat16
GIB = 1 << 30
EVERY_MODEL = {**MODELS, "latent": ModelGeometry(3, 1, 48, latent=LatentGeometry(32, 16))}


PACKAGES = ("torch_memory_saver", "mooncake", "mooncake.allocator")


@pytest.fixture
def fakes(no_packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports find the packages of tests/support/fake_packages, even if the real ones are installed."""
    for name in PACKAGES:
        del sys.modules[name]
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "support" / "fake_packages")


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports find none of `PACKAGES`."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


def lazy_pool(device: str = "cpu", lazy: bool = True) -> MHATokenToKVPool:
    return MHATokenToKVPool(16, 4, BF16, 2, 8, 3, device, False, v_head_dim=4, start_layer=5, lazy=lazy)


def test_a_layer_is_allocated_at_its_first_use(device: str) -> None:
    """Only layers that were used take memory, each once and zero-filled. Reads and writes of a lazy pool give the bytes
    of an eager pool."""
    pool, eager = lazy_pool(device), lazy_pool(device, lazy=False)
    layer_bytes = 20 * 2 * (8 + 4) * 2
    assert (
        pool.slot_spaces[0].num_slots == 20
        and pool.mem_usage == 0.0
        and eager.mem_usage == 3 * layer_bytes / GIB
        and pool.layout == eager.layout
    )
    loc = torch.tensor([4, 9], device=device)
    k, v = torch.randn(2, 2, 8, device=device).to(BF16), torch.randn(2, 2, 4, device=device).to(BF16)
    for each in (pool, eager):
        each.set_kv_buffer(6, loc, k, v)
    assert pool.mem_usage == layer_bytes / GIB
    assert all(torch.equal(a, b) for a, b in zip(pool.get_kv_buffer(6), eager.get_kv_buffer(6), strict=True))
    assert pool.mem_usage == layer_bytes / GIB and not pool.get_value_buffer(5).any()
    assert pool.mem_usage == 2 * layer_bytes / GIB
    assert isinstance(pool.k_buffer, LazyColumn) and len(pool.k_buffer) == 3
    assert [b.shape for b in pool.k_buffer[1:]] == [(20, 2, 8)] * 2 and pool.mem_usage == eager.mem_usage
    assert pool.k_buffer[-1].data_ptr() == pool.layer_buffers(7)[0].data_ptr()
    assert len(pool.get_contiguous_buf_infos()[0]) == 6
    refused(IndexError, lambda: pool.k_buffer[3])


@pytest.mark.gpu
def test_no_first_use_within_a_graph() -> None:
    """If a layer is first used while a graph is captured, it is refused, and the error names both remedies. A layer
    that was used before is written in each replay."""
    pool = lazy_pool("cuda")
    loc = torch.tensor([4, 9], device="cuda")
    k, v = torch.ones(2, 2, 8, device="cuda", dtype=BF16), torch.ones(2, 2, 4, device="cuda", dtype=BF16)
    pool.set_kv_buffer(5, loc, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set_kv_buffer(5, loc, k, v)
        with pytest.raises(ConfigError, match="lazy=False"):
            pool.set_kv_buffer(6, loc, k, v)
    k.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((pool.get_key_buffer(5)[loc] == 3).all())


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("kind", sorted(EVERY_MODEL))
def test_an_engine_allocates_in_the_region_of_the_memory_saver(kind: str) -> None:
    """With `enable_memory_saver` pools, states and request table of an engine are allocated in the region kv_cache.
    Without `enable_memory_saver` the region is empty."""
    saver, sizes = importlib.import_module("torch_memory_saver").torch_memory_saver, []
    for enabled in (True, False):
        saver.num_bytes.clear()
        with build_engine(config(enable_memory_saver=enabled, host_bytes=0), EVERY_MODEL[kind]) as engine:
            pool, table = engine.inspect.context.pool, engine.inspect.context.req_to_token
            spaces = {space.name: space for space in pool.slot_spaces}
            if isinstance(table, HybridReqToTokenPool):
                spaces |= {space.name: space for space in table.mamba_pool.slot_spaces}
            buffers = [b for at in spaces.values() for layer in at.layout.layers for b in at.layer_buffers(layer)]
            sizes.append(sum(tensor.nbytes for tensor in (*buffers, table.req_to_token)))
        assert saver.num_bytes == ({"kv_cache": sizes[0]} if enabled else {})
    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("fakes")
def test_a_pool_of_ones_own_agrees_about_the_memory_saver() -> None:
    """An engine with the memory saver refuses a pool outside the region. The error names the setting."""
    pool = MHATokenToKVPool(128, 4, torch.float32, 1, 8, 2, "cpu", False)
    with pytest.raises(ConfigError, match="enable_memory_saver"):
        build_engine(config(enable_memory_saver=True), pool)


@pytest.mark.gpu
@pytest.mark.usefixtures("fakes")
def test_a_pool_lies_in_the_memory_pool_of_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the buffers of a pool are segments of the memory pool. A pool that was built without the memory pool has
    its buffers elsewhere."""
    monkeypatch.setenv("HICACHE_CUSTOM_MEM_POOL", "nvlink")
    try:
        pool = lazy_pool("cuda", lazy=False)
        segments = nvlink_pool(pool.device).snapshot()
        monkeypatch.delenv("HICACHE_CUSTOM_MEM_POOL")
        for built, inside in ((pool, True), (lazy_pool("cuda", lazy=False), False)):
            at = built.get_key_buffer(5).data_ptr()
            found = [s for s in segments if s["address"] <= at < s["address"] + s["total_size"]]
            assert bool(found) == inside
        del pool, built
    finally:
        nvlink_pool.cache_clear()


def kv_layout() -> PoolLayout:
    """A layout of 32 layers with 8 heads of 128 in bf16: 128 KiB a token."""
    layers = tuple(range(32))
    return PoolLayout(tuple(BufferSpec(name, BF16, (8, 128), "token", layers) for name in "kv"), 16)


def test_capacity_is_what_a_pool_takes() -> None:
    """A pool of the planned size takes at most the budget; with one more page it would take more."""
    spec = {"head_num": 2, "head_dim": 8, "layer_num": 3, "device": "cpu", "enable_memory_saver": False}
    layout = MHATokenToKVPool(size=4, page_size=4, dtype=BF16, **spec).layout
    size = plan_capacity(100_000, 30_000, layout, reserve_ratio=0.25)
    pools = [MHATokenToKVPool(size=s, page_size=4, dtype=BF16, **spec) for s in (size, size + 4)]
    fits, more = (pool.mem_usage * GIB for pool in pools)
    assert fits <= 70_000 * 0.75 < more


def test_rows_of_pages_and_requests_are_counted() -> None:
    """A row for a page takes its share of the page. States are reserved for the requests and the sink."""
    kv, page = BufferSpec("k", BF16, (50,), "token", (0, 1)), BufferSpec("s", torch.uint8, (7,), "page", (0, 1))
    state = BufferSpec("temporal", torch.float32, (250,), "request", (2, 3))
    per_page = 2 * (4 * 100 + 7)
    assert plan_capacity(100 * per_page, 0, PoolLayout((kv, page), 4), reserve_ratio=0.0) == 99 * 4
    layout = PoolLayout((kv, page, state), 4)
    assert plan_capacity(100 * per_page + 11 * 2000, 0, layout, reserve_ratio=0.0, max_requests=10) == 99 * 4
    refused(ConfigError, lambda: plan_capacity(GIB, 0, PoolLayout((state,), 1), reserve_ratio=0.0))


def test_bad_plans_are_refused() -> None:
    """Both shares together or none, shares out of range, and models that are too large raise an error."""
    plan = functools.partial(plan_capacity, GIB, 0, kv_layout())
    refused(
        ConfigError,
        plan,
        lambda: plan(mem_fraction_static=0.9, reserve_ratio=0.1),
        lambda: plan(mem_fraction_static=1.5),
        lambda: plan(mem_fraction_static=0.0),
        lambda: plan(reserve_ratio=1.0),
        lambda: plan(reserve_ratio=-0.1),
        lambda: plan_capacity(GIB, -1, kv_layout(), reserve_ratio=0.1),
        lambda: plan_capacity(0, 0, kv_layout(), reserve_ratio=0.1),
    )
    for share in ("mem_fraction_static", "reserve_ratio"):  # the settings that the user could change
        with pytest.raises(OutOfMemory, match=share):
            plan_capacity(GIB, GIB - 1000, kv_layout(), **{share: 0.9})


@pytest.mark.parametrize("page", [1, 4])
def test_allocators_tell_how_full_they_are(page: int) -> None:
    """Total, used, utilisation, pages and free pages follow the allocations. Levels change above their limits."""
    sizes = (100, BF16) if page == 1 else (100 * page + 3, page, BF16)
    allocator = (TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator)(*sizes, "cpu", None, True)
    seen = []
    for _ in range(20):
        seen.append(allocator.check_memory_pressure())
        assert allocator.alloc(5 * page) is not None
    assert [seen.count(level) for level in ("low", "medium", "high", "critical")] == [15, 3, 2, 0]
    assert allocator.get_stats() == {
        "total_tokens": 100 * page, "used_tokens": 100 * page, "utilization": 1.0, "num_pages": 100, "free_pages": 0,
    }  # fmt: skip
    assert allocator.check_memory_pressure() == "critical"
    allocator.clear()
    assert allocator.get_stats()["utilization"] == 0.0 and allocator.get_stats()["free_pages"] == 100
    levels = {0.0: "low", 0.7: "low", 0.71: "medium", 0.85: "medium", 0.86: "high", 0.95: "high", 0.951: "critical"}
    assert {u: memory_pressure(u) for u in levels} == levels


HISTORY = [
    MemorySample(0.0, {"device": 1 * GIB, "host": 0}, {"device": 3 * GIB, "host": 8 * GIB}),
    MemorySample(1.5, {"device": 2 * GIB}, {"device": 2 * GIB}),
    MemorySample(2.0, {"device": 4 * GIB, "host": 6 * GIB}, {"device": 0, "host": 2 * GIB}),
]


def test_the_plot_shows_used_and_free_by_tier(tmp_path: Path) -> None:
    """The plot has one panel for each tier, with one line for used and one for free memory in GiB, from the samples
    that name the tier. The plot is saved to a file."""
    pytest.importorskip("matplotlib")
    figure = plot_memory_usage(HISTORY)
    assert [axes.get_title() for axes in figure.axes] == ["device", "host"]
    lines = {
        (axes.get_title(), line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for axes in figure.axes
        for line in axes.get_lines()
    }
    assert lines == {
        ("device", "used"): ([0.0, 1.5, 2.0], [1, 2, 4]),
        ("device", "free"): ([0.0, 1.5, 2.0], [3, 2, 0]),
        ("host", "used"): ([0.0, 2.0], [0, 6]),
        ("host", "free"): ([0.0, 2.0], [8, 2]),
    }
    figure.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    refused(ConfigError, lambda: plot_memory_usage([]), lambda: plot_memory_usage(HISTORY[::-1]))
