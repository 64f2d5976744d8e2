"""Packed host pages: the host, a store, and a store after a restart restore every bit, also of pages that do not fit.
The tiers count packed bytes."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hicache.flow.packing
from cases import each_value, pairwise
from disk_case import TroubledStore, page_keys
from hicache import CacheEngine, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.build.packing import packer_of
from hicache.build.sizing import host_page_bytes
from hicache.cli import main
from hicache.device import KVCache, MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool
from hicache.errors import ConfigError
from hicache.kernels.pack import FOUR_BITS
from hicache.storage import open_existing, store_folders
from memory_store import MemoryPageStore
from packed_case import MODELS, PAGE, Kind, config, prompt, serve

KINDS: tuple[Kind, ...] = ("fit", "some", "none")
TOKENS = prompt(1)


def disk_at(path: Path) -> DiskConfig:
    return DiskConfig(path=str(path / "store"), budget_bytes=4 << 20)


def forget(engine: CacheEngine, *tiers: str) -> None:
    assert engine.reset(tiers)  # type: ignore[arg-type]
    engine.check()


@pairwise(bits=["4", "3"], name=list(MODELS), kind=KINDS)
def test_every_bit_is_restored(tmp_path: Path, device: str, name: str, bits: str, kind: Kind) -> None:
    """The host restores every page, and the disk restores every page that fits, before and after a restart. Pages that
    do not fit are counted, take two host pages each, and are in no store."""
    settings, model = config(kv_packing=bits, disk=disk_at(tmp_path), device=device), MODELS[name]
    misfits, stored = {"fit": 0, "some": 3, "none": 6}[kind], 6 * PAGE * (kind == "fit")  # the first page is raw
    with build_engine(settings, model) as engine:
        assert serve(engine, "a", TOKENS, kind).cached_len == 0
        stats = engine.stats()
        assert (stats["packing.packed_pages"], stats["packing.misfit_pages"]) == (6, misfits)
        full = engine.inspect.context.full
        assert stats["host.used_tokens"] == 6 * PAGE
        assert stats["host.used_ratio"] == 1 - full.host.available() / full.host.num_pages
        assert stats["packing.raw_pages"] == misfits and stats["disk.stored_pages"] >= 6 - misfits
        assert full.host.available() == full.host.num_pages - 6 - misfits
        forget(engine, "device")
        assert serve(engine, "b", TOKENS, kind).hit.host == 6 * PAGE
        forget(engine, "device", "host")
        assert full.host.available() == full.host.num_pages
        stats = engine.stats()
        assert (stats["evict.host_demoted_tokens"], stats["evict.host_lost_tokens"]) == (
            (6 - misfits) * PAGE,
            misfits * PAGE,
        )
        assert serve(engine, "c", TOKENS, kind).hit.disk == stored
        assert engine.stats()["packing.raw_pages"] == misfits
    with build_engine(settings, model) as engine:
        assert serve(engine, "d", TOKENS, kind).hit.disk == stored
        assert engine.stats()["packing.packed_pages"] == (0 if stored else 6)
        forget(engine, "device")
        assert serve(engine, "e", TOKENS, kind).hit.host == 6 * PAGE
    store = open_existing(tmp_path / "store")
    store.check()
    store.close()


@each_value(bits=["4", "3"], name=list(MODELS), kind=KINDS)
def test_another_engine_restores_every_bit(device: str, name: str, bits: str, kind: Kind) -> None:
    """Another engine restores every bit from a remote store if all pages fit, and then from the host."""
    shared, settings, model = MemoryPageStore(4 << 20), config(kv_packing=bits, device=device), MODELS[name]
    with build_engine(settings, model, remote=shared) as engine:
        serve(engine, "a", TOKENS, kind)
    with build_engine(settings, model, remote=shared) as engine:
        assert serve(engine, "b", TOKENS, kind).hit.remote == 6 * PAGE * (kind == "fit")
        forget(engine, "device")
        assert serve(engine, "c", TOKENS, kind).hit.host == 6 * PAGE
        assert engine.stats()["packing.packed_pages"] == 6 * (kind != "fit")


def test_pages_after_a_raw_page_are_stored(device: str) -> None:
    """Pages after a raw page are stored, and found while memory has the raw page. Without the raw page a prompt is
    found up to the raw page. Stored pages are not written again, however often requests use them."""
    store, tokens = TroubledStore(MemoryPageStore(4 << 20)), TOKENS.copy()
    tokens[[0, 4 * PAGE]] = 20  # only page 2 does not fit
    with build_engine(config(device=device), MODELS["mha"], store=store) as engine:  # type: ignore[arg-type]
        serve(engine, "a", tokens, "some")
        pages = engine.inspect.context.full.pages
        pages.discard(pages.table.known(page_keys(engine, tokens[:-1])[3:]))
        forget(engine, "device")
        hit = serve(engine, "b", tokens, "some").hit
        assert (hit.host, hit.disk, engine.stats()["packing.raw_pages"]) == (3 * PAGE, 3 * PAGE, 1)
        forget(engine, "device", "host")
        assert serve(engine, "c", tokens, "some").hit.disk == 2 * PAGE
        num_puts = store.verbs("put")
        for n in range(3):
            assert serve(engine, f"d{n}", tokens, "some").cached_len == 6 * PAGE
            assert serve(engine, f"e{n}", TOKENS[: PAGE + 1], "some").cached_len == (n > 0) * PAGE  # all pages are raw
        assert store.verbs("put") == num_puts and pages.stored[pages.rows_held()].all()


def test_a_shutdown_stores_pages_after_raw_ones(device: str) -> None:
    """A shutdown writes pages in several batches, each of which has raw pages. The closed engine has stored all pages
    that are not raw."""
    store, prompts = MemoryPageStore(4 << 20), [prompt(seed) for seed in (1, 2)]
    host_bytes = 9 * host_page_bytes(config(), MODELS["mha"])["full"]
    settings = config(device=device, write_policy="write_back", host_bytes=host_bytes)
    with build_engine(settings, MODELS["mha"], store=store) as engine:
        for seed, tokens in enumerate(prompts):
            serve(engine, str(seed), tokens, "some")
        keys = [key for tokens in prompts for key in page_keys(engine, tokens[:-1])]
    assert store.contains(keys) == [False, True] * 6


@each_value(dtype=["bfloat16", "float8_e4m3fn"], page_size=[1, 4, PAGE])
def test_sparse_latent_attention_stays_raw(tmp_path: Path, device: str, page_size: int, dtype: str) -> None:
    """Sparse latent attention stays raw, because its index keys are bytes. The host, a remote store, and the disk after
    a restart restore all its bytes."""
    settings = config(
        kv_packing="auto", dtype=dtype, page_size=page_size, device=device, disk=disk_at(tmp_path), host_bytes=1 << 20
    )

    def pool() -> NSATokenToKVPool:
        return NSATokenToKVPool(256, page_size, settings.torch_dtype, 32, 16, 3, device, False)

    shared = MemoryPageStore(4 << 20)
    with build_engine(settings, pool(), remote=shared) as engine:
        serve(engine, "a", TOKENS, "some")
        assert engine.inspect.context.full.packing is None
        forget(engine, "device")
        assert serve(engine, "b", TOKENS, "some").hit.host == 6 * PAGE
    with build_engine(settings, pool()) as engine:
        assert serve(engine, "c", TOKENS, "some").hit.disk == 6 * PAGE
    alone = dataclasses.replace(settings, disk=None)
    with build_engine(alone, pool(), remote=shared) as engine:
        assert serve(engine, "d", TOKENS, "some").hit.remote == 6 * PAGE
    with pytest.raises(ConfigError, match="several tokens" if page_size > 1 else "bfloat16") as refused:
        build_engine(dataclasses.replace(alone, kv_packing="4"), pool())
    assert "kv_packing" in str(refused.value)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: NSATokenToKVPool(256, 4, torch.bfloat16, 32, 16, 3, "cpu", False), "buffer index_k"),
        (lambda: MLATokenToKVPool(256, 4, torch.float8_e4m3fn, 32, 16, 3, "cpu", False), "bfloat16"),
        (lambda: MHATokenToKVPool(256, 4, torch.bfloat16, 2, 16, 3, "cpu", False, v_head_dim=8), "row sizes"),
        (lambda: MHATokenToKVPool(256, 4, torch.bfloat16, 2, 16, 3, "cpu", False), ""),
    ],
)
def test_an_unpacked_cache_on_cuda_is_logged(
    build: Callable[[], KVCache], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA engine whose cache is not packed logs the reason once."""
    (space,) = build().slot_spaces
    with caplog.at_level(logging.INFO, "hicache"):
        packer = packer_of(config(kv_packing="auto", device="cuda"), "full", space, PAGE)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(reason) == (packer is None)
    assert all("component full stay raw" in line and reason in line for line in told)


def test_the_documented_decoder_reads_a_page() -> None:
    """The code of docs/disk_format.md, with the sizes in its text, decodes a page."""
    text = (Path(__file__).parents[2] / "docs/disk_format.md").read_text()
    (code,) = re.findall(r"```python\n(def values\(.*?)```", text, re.DOTALL)
    decoder: dict[str, Any] = {}
    exec(code, decoder)
    for name, bits, shares in (("wide rows", 3, (0.03, 0.05)), ("mla", 4, (0.001,))):
        settings = config(kv_packing=str(bits), write_policy="write_through")
        with build_engine(settings, MODELS[name]) as engine:
            serve(engine, "a", TOKENS, "fit")
            full = engine.inspect.context.full
            key = next(iter(full.pages))
            page = full.host.bytes_of[int(full.pages.pool_page[full.pages.table.row(key)])].numpy().tobytes()
            slots = engine_slots(engine, TOKENS[:PAGE])
            for layer in full_layers(engine):
                for at, buffer in enumerate(layer):
                    rows = buffer.flatten(1)[slots].view(torch.int16).numpy().view(np.uint16).copy()
                    width = min(128, rows.shape[1] & -rows.shape[1])
                    for first in range(0, rows.shape[1], width):
                        num_escapes = math.ceil(shares[min(at, len(shares) - 1)] * PAGE * width)
                        num_escapes = -(-num_escapes // 16) * 16
                        size = width + num_escapes + PAGE * width + bits * PAGE * width // 8
                        for token, channel, value in decoder["values"](page[:size], PAGE, width, bits, num_escapes):
                            assert value == rows[token, first + channel]
                            rows[token, first + channel] ^= 1  # each element occurs once
                        page = page[size:]
            assert len(page) < 128


def full_layers(engine: CacheEngine) -> list[tuple[torch.Tensor, ...]]:
    (space,) = engine.pool.slot_spaces
    return [tuple(space.layer_buffers(layer)) for layer in space.layout.layers]


def engine_slots(engine: CacheEngine, tokens: np.ndarray) -> torch.Tensor:
    tree = engine.inspect.context.tree
    return tree.pages["full"].value(tree.match(tokens).rows)[: len(tokens)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", ["off", "3", "4"])
def test_sizes_are_those_of_packed_pages(name: str, bits: str) -> None:
    """Sizes that are computed from the geometry equal those of the built pools, and packed pages are smaller."""
    settings = config(kv_packing=bits)
    with build_engine(settings, MODELS[name]) as engine:
        hosts = {component.name: component.host for component in engine.inspect.context.components}
        assert {name: host.page_bytes for name, host in hosts.items()} == host_page_bytes(settings, MODELS[name])
        for host in hosts.values():
            raw_bytes = host.layout.page_bytes(PAGE)
            assert host.page_bytes == raw_bytes if bits == "off" else host.page_bytes < 0.85 * raw_bytes


def test_packed_pages_begin_where_the_copy_engine_is_fast() -> None:
    """Packed pages begin at multiples of 4096 bytes unless the padding is more than 1/256 of the page, and always at
    multiples of 16."""
    for model, alignment in ((ModelGeometry(32, 8, 128), 4096), (ModelGeometry(2, 8, 128), 1024), (MODELS["mha"], 16)):
        settings, buffers = config(host_page_size=64), 2 * model.layer_num
        channels = model.head_num * model.head_dim
        (page_bytes,) = host_page_bytes(settings, model).values()
        packed_bytes = buffers * FOUR_BITS.buffer_bytes(0, 64, channels)
        assert page_bytes % alignment == 0 and packed_bytes <= page_bytes < packed_bytes * (1 + 1 / 256)


def test_pages_of_another_packing_are_never_read(tmp_path: Path) -> None:
    """Each packing has its own store on one path, and keys differ between packings."""
    keys = []
    for bits in ("off", "3", "4"):
        with build_engine(config(kv_packing=bits, disk=disk_at(tmp_path)), MODELS["mha"]) as engine:
            serve(engine, "a", TOKENS, "fit")
            keys += [*engine.inspect.context.full.pages]
    assert len({*keys}) == 18 and len(store_folders(disk_at(tmp_path).path)) == 3


def test_packed_pages_are_not_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hicache store verify` finds no damaged page."""
    disk = disk_at(tmp_path)
    with build_engine(config(disk=disk), MODELS["mha"]) as engine:
        serve(engine, "a", TOKENS, "some")
        stats = engine.stats()
        assert stats["disk.stored_pages"] == 3
        assert stats["disk.live_bytes"] >= stats["disk.raw_bytes"]
    assert main(["store", "verify", disk.path]) == 0
    assert "damaged" not in capsys.readouterr().err


def test_where_there_is_no_second_place(device: str) -> None:
    """A page that does not fit when packed is not backed up if no second host page is free. All other pages are backed
    up, and the first page that does not fit takes the last free host page."""
    model = MODELS["mha"]
    page_bytes = host_page_bytes(config(), model)["full"]
    settings = config(host_bytes=8 * page_bytes, device=device, write_policy="write_through")
    with build_engine(settings, model) as engine:
        serve(engine, "a", TOKENS, "some")
        full = engine.inspect.context.full
        assert (full.host.num_pages, len(full.pages), full.pages.num_raw) == (7, 4, 1)
        assert engine.stats()["packing.dropped_pages"] == 2
        forget(engine, "device")
        assert serve(engine, "b", TOKENS, "some").cached_len == 2 * PAGE


def test_too_many_misfits_are_logged(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many pages that do not fit are logged once, with the remedy. Later pages are still packed."""
    monkeypatch.setattr(hicache.flow.packing, "_MIN_JUDGED_PAGES", 10)
    with (
        build_engine(config(device=device, write_policy="write_through"), MODELS["windows"]) as engine,
        caplog.at_level(logging.WARNING),
    ):
        for seed in range(6):
            serve(engine, f"r{seed}", prompt(seed, 3), "some")
            told = [record.getMessage() for record in caplog.records if "component full" in record.getMessage()]
            assert len(told) == (seed >= 3) and all("kv_packing=off" in line for line in told)
        assert engine.stats()["packing.packed_pages"] == 18


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"host_page_size": 4, "page_size": 4}, "4 tokens"),
        ({"host_page_size": 24, "mamba_track_interval": 240}, "24 tokens"),
    ],
)
def test_caches_that_cannot_be_packed(changes: dict[str, object], reason: str) -> None:
    """A cache that cannot be packed is refused if bits were given, with the remedy in the error. With auto such a cache
    stays raw."""
    with pytest.raises(ConfigError, match=reason) as refused:
        build_engine(config(**changes), MODELS["mha"])
    assert "kv_packing" in str(refused.value)
    with build_engine(config(kv_packing="auto", **changes), MODELS["mha"]) as engine:
        full = engine.inspect.context.full
        assert full.packing is None and full.host.page_bytes == full.host.layout.page_bytes(full.host.page_tokens)


def test_values_of_another_shape_than_keys_stay_raw() -> None:
    model = ModelGeometry(3, 4, 16, v_head_dim=8)
    with pytest.raises(ConfigError, match="row sizes"):
        build_engine(config(), model)
    assert host_page_bytes(config(), model)["full"] == 3 * PAGE * 4 * 24 * 2


def test_words_of_the_setting() -> None:
    """YAML reads off as false and 3 as a number. auto packs only on CUDA."""
    of = EngineConfig.from_dict
    given = {False: "off", "off": "off", 3: "3", "4": "4", "auto": "auto"}
    assert {word: of({"device_tokens": 64, "kv_packing": word}).kv_packing for word in given} == given
    for wrong in (True, 2, 5, "on", None):
        with pytest.raises(ConfigError, match="kv_packing"):
            of({"device_tokens": 64, "kv_packing": wrong})
    model = MODELS["mha"]
    sizes = [host_page_bytes(config(kv_packing="auto", device=device), model) for device in ("cpu", "cuda", "cuda:1")]
    assert sizes[0] == host_page_bytes(config(kv_packing="off"), model)
    assert sizes[1] == sizes[2] == host_page_bytes(config(kv_packing="4"), model)
