"""`hicache store` on the directory in which servers keep a store for each model, dtype and layout."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from cli_case import output, refused, stats
from hicache.integrations.server_store import ServerStore, ServerStoreConfig
from hicache.integrations.staging import WaitingTier
from hicache.storage import PageFormat, describe, open_existing, store_folders

PAGE_BYTES = 4096
VLLM = {"server": "vllm", "release": "0.32", "model": "m", "dtype": "bfloat16", "layout": "LBHNC", "page_tokens": 16}
SGLANG = {
    "server": "sglang",
    "release": "0.5.23",
    "model": "n",
    "dtype": "float16",
    "layout": "page_first",
    "page_tokens": 64,
}


@pytest.fixture(name="path")
def of_two_servers(tmp_path: Path) -> Path:
    """A directory with two stores: 3 pages of vLLM, 5 of SGLang."""
    for identity, num_pages in ((VLLM, 3), (SGLANG, 5)):
        server = ServerStore.open(
            ServerStoreConfig(path=str(tmp_path / "pages"), budget=32 << 20), identity, [PageFormat(PAGE_BYTES)]
        )
        keys = server.keys([bytes([n]) for n in range(num_pages)])
        tier = WaitingTier(server.stores, PAGE_BYTES)
        assert all(tier.write(keys, PAGE_BYTES, lambda _, page: page.fill(7))) and tier.close()
    return tmp_path / "pages"


def test_stat_lists_the_stores_of_all_servers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stat` lists each store with its server and sizes, equal to the stat of the store itself. The text has the same
    rows as the JSON."""
    listed = stats(capsys, "store", "stat", path)["stores"]
    assert [(one["identity"]["server"], one["entries"]) for one in listed] == [("sglang", 5), ("vllm", 3)]
    assert listed == [stats(capsys, "store", "stat", folder) for folder in store_folders(path)]
    both = stats(capsys, "store", "stat", path)
    assert (both["entries"], both["file_bytes"]) == (8, sum(one["file_bytes"] for one in listed))
    rows = [line.split(maxsplit=1) for line in output(capsys, "store", "stat", path).splitlines() if line]
    assert [value for name, value in rows if name == "path"] == [str(folder) for folder in store_folders(path)]
    assert [value for name, value in rows if name == "server"] == ["sglang", "vllm"]
    assert [value for name, value in rows if name == "entries"] == ["5", "3"]
    assert {value for name, value in rows if name == "budget"} == {"32.0 MiB (33554432 bytes)"}


def test_each_store_can_be_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other commands work on one store. For a directory of several stores these commands are refused, and the error
    says to name one store."""
    first, second = store_folders(path)
    assert len(stats(capsys, "store", "ls", first)["entries"]) == 5
    assert stats(capsys, "store", "verify", second)["pages"] == 3
    assert stats(capsys, "store", "evict", first, "--to", "0")["evicted"] == 5
    assert [one["entries"] for one in stats(capsys, "store", "stat", path)["stores"]] == [0, 3]
    for command in (["ls"], ["verify"], ["compact"], ["evict", "--to", "0"]):
        message = refused(capsys, "store", command[0], path, *command[1:])
        assert f"holds 2 stores; name one of them, like {first}" in message


def test_a_store_with_the_new_key_is_not_replaced(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a server has already stored pages with the new key, `rekey` is refused before it changes anything. Without
    this store, the store gets the name for the new key."""
    pytest.importorskip("cryptography")
    (key := tmp_path / "key").write_bytes(bytes(range(32)))
    config = ServerStoreConfig(path=str(path), budget=32 << 20, key_file=str(key))
    assert ServerStore.open(config, VLLM, [PageFormat(PAGE_BYTES)]).stores.close()
    names = {folder.name for folder in path.iterdir()}
    plain, encrypted = sorted((one for one in store_folders(path) if "vllm" in one.name), key=_is_encrypted)
    assert str(encrypted) in refused(capsys, "store", "rekey", plain, "--new-key-file", key)
    assert {folder.name for folder in path.iterdir()} == names
    shutil.rmtree(encrypted)
    done = stats(capsys, "store", "rekey", plain, "--new-key-file", key)
    assert (done["path"], done["pages"]) == (str(encrypted), 3)


def _is_encrypted(store: Path) -> bool:
    return describe(store).encrypted


def test_the_stores_of_a_model_are_pruned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --model only stores of the model are removed; with --unused-days only stores that were not used for these
    days. Without both flags the command is refused."""
    sglang, vllm = map(str, store_folders(path))
    assert "--model NAME" in refused(capsys, "store", "prune", path)
    assert stats(capsys, "store", "prune", path, "--model", "m", "--unused-days", "1")["removed"] == []
    assert stats(capsys, "store", "prune", path, "--model", "m")["removed"] == [vllm]
    assert stats(capsys, "store", "prune", path, "--model", "m") == {"path": str(path), "removed": [], "left": [sglang]}


def test_a_store_that_cannot_be_read_is_named_beside_the_others(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = store_folders(path)
    (second / "store.json").write_bytes(b"not a store")
    listed = stats(capsys, "store", "stat", path, status=1)["stores"]
    assert listed[0]["path"] == str(first) and listed[0]["entries"] == 5
    assert listed[1]["path"] == str(second) and str(second) in listed[1]["error"]


def test_prune_removes_what_nobody_uses(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stores are removed by the days since their last use, which stat shows. An open store stays. A path without a
    directory is refused."""
    first, second = store_folders(path)
    os.utime(first / "writer.lock", (86400, 86400))
    assert "1970-01-02 00:00 UTC" in output(capsys, "store", "stat", path)
    prune = ("store", "prune", path, "--unused-days")
    with contextlib.closing(open_existing(first)):
        assert stats(capsys, *prune, 30) == {"path": str(path), "removed": [], "left": [str(first), str(second)]}
    assert stats(capsys, *prune, 30) == {"path": str(path), "removed": [str(first)], "left": [str(second)]}
    assert stats(capsys, "store", "ls", path)["path"] == str(second), "the only one that is left"
    assert stats(capsys, "store", "stat", path)["stores"] == [stats(capsys, "store", "stat", second)]
    assert "removed" in output(capsys, *prune, 0) and not store_folders(path)
    assert stats(capsys, *prune, 0)["removed"] == []
    assert "no directory" in refused(capsys, "store", "prune", path / "nowhere", "--unused-days", 0)
