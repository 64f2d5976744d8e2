"""Settings of the disk tier for its pages: the filter before compression, and the key for encryption."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from disk_case import PATIENCE_S
from hicache import CacheEngine, DiskConfig, RemoteConfig, build_engine
from hicache.config.secret import cipher_of
from hicache.errors import ConfigError
from hicache.layout import BufferSpec, PoolLayout
from hicache.storage import PageFilter, StoreError, StoreMismatch
from hicache.stores.page_format import page_filter
from toy_model import GEOMETRY, config, serve

KEY = bytes(range(100, 132))


def tokens_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, 50)


def engine_at(path: Path, **changes: object) -> CacheEngine:
    disk = DiskConfig(path=str(path), budget_bytes=4 << 20, **changes)  # type: ignore[arg-type]
    return build_engine(config(disk=disk), GEOMETRY)


def spec(name: str, dtype: torch.dtype, *shape: int, per: str = "token") -> BufferSpec:
    return BufferSpec(name, dtype, shape, per, (0, 1))  # type: ignore[arg-type]


def test_the_filter_follows_the_layout() -> None:
    """The filter shuffles by the bytes of the smallest element, and fits the page sizes. Packed pages have no
    filter."""
    even = PoolLayout((spec("k", torch.bfloat16, 2, 8), spec("v", torch.bfloat16, 4, 4)), 4)
    fp8 = PoolLayout((spec("kv", torch.uint8, 12),), 4)
    scaled = PoolLayout((spec("k", torch.int8, 2, 8), spec("s", torch.float32, 16)), 4)
    paged = PoolLayout((spec("k", torch.float32, 8, per="page"),), 4)
    for layout, width in ((even, 2), (fp8, 1), (scaled, 1), (paged, 4)):
        assert page_filter(layout) == PageFilter("byte_shuffle", width)
        assert page_filter(layout).mismatch(layout.page_bytes(64)) == ""
    assert page_filter(even, is_packed=True) == PageFilter("uncompressed")


def test_a_key_is_read_in_each_of_its_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 raw bytes, 64 hex digits and base64, from a file or the environment, are the same key."""
    pytest.importorskip("cryptography")
    monkeypatch.delenv("HICACHE_DISK_KEY", raising=False)
    assert cipher_of(DiskConfig(path="/x")) is None
    forms = (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY) + b"\n")
    ids = []
    for n, form in enumerate(forms):
        (tmp_path / f"{n}").write_bytes(form)
        ids.append(cipher_of(DiskConfig(path="/x", key_file=str(tmp_path / f"{n}"))))
    for form in forms[1:]:
        monkeypatch.setenv("HICACHE_DISK_KEY", form.decode())
        ids.append(cipher_of(DiskConfig(path="/x")))
    assert len({cipher.key_id for cipher in ids if cipher is not None}) == 1 and None not in ids
    with pytest.raises(ConfigError):
        cipher_of(DiskConfig(path="/x", key_file=str(tmp_path / "0")))


@pytest.mark.parametrize(
    "form", [b"", KEY + b"\n", KEY[:31], KEY.hex().encode()[:-1], KEY.hex().encode()[:-1] + b"g", b"\xff" * 40]
)
def test_an_invalid_key_is_refused_and_not_shown(form: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid key raises; the message names the file and a valid form, and contains no part of the key."""
    monkeypatch.delenv("HICACHE_DISK_KEY", raising=False)
    path = tmp_path / "key"
    path.write_bytes(form)
    with pytest.raises(ConfigError) as caught:
        cipher_of(DiskConfig(path="/x", key_file=str(path)))
    assert str(path) in str(caught.value) and caught.value.__cause__ is None
    shown = str(caught.value).replace(str(path), "")
    assert not any(form[at : at + 4].decode("latin1") in shown for at in range(max(0, len(form) - 4)))
    with pytest.raises(ConfigError, match="key_file"):
        cipher_of(DiskConfig(path="/x", key_file=str(tmp_path / "none")))


def test_a_store_is_of_no_use_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were written under a key are read back under it. A store with another key, or without a key, is
    refused when the store opens. The file contains no unencrypted page, and neither settings nor messages show the
    key."""
    pytest.importorskip("cryptography")
    monkeypatch.delenv("HICACHE_DISK_KEY", raising=False)
    (tmp_path / "key").write_text(KEY.hex())
    mine = {"key_file": str(tmp_path / "key"), "level": 0}
    with engine_at(tmp_path / "s", **mine) as engine:
        serve(engine, "a", tokens_of(1))
        engine.flush()
        full = engine.inspect.context.full
        page = full.host.bytes_of[1].numpy().tobytes()
        stored_bits = full.pages.stored[full.pages.rows_held()]
        assert any(page) and len(stored_bits) and stored_bits.all()
        assert repr(KEY) not in repr(engine.inspect.context.config)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*.*") if path.is_file())
    assert not any(page[at : at + 32] in stored for at in range(0, len(page), 32))
    with engine_at(tmp_path / "s", **mine) as engine:
        assert engine.lookup(tokens_of(1), disk_wait_s=PATIENCE_S).disk == 48
    for key in ("", bytes(32).hex()):
        monkeypatch.setenv("HICACHE_DISK_KEY", key)
        with pytest.raises(StoreMismatch) as caught:
            engine_at(tmp_path / "s")
        assert KEY.hex() not in str(caught.value) and bytes(32).hex() not in str(caught.value)


def test_a_remote_store_that_cannot_be_opened_leaves_the_disk_free(tmp_path: Path) -> None:
    """If the remote store cannot be opened, the engine is not built, and the next attempt may use the same path of the
    disk."""
    for remote in (RemoteConfig(url="lmdb:///dev/null/pages"), None):
        changes = {"disk": DiskConfig(path=str(tmp_path / "pages")), "remote": remote}
        with contextlib.nullcontext() if remote is None else pytest.raises(StoreError, match="/dev/null"):
            build_engine(config(**changes), GEOMETRY).close()
