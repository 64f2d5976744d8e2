"""`hicache store` on the directory in which servers keep a store for each model, dtype and layout."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from cli_case import output, refused, stats
from hicache.integrations.server_store import ServerStore, ServerStoreConfig
from hicache.integrations.staging import WaitingTier
from hicache.storage import PageFormat, open_existing, store_folders

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
    """3 pages of one, 5 of the other."""
    for identity, num_pages in ((VLLM, 3), (SGLANG, 5)):
        server = ServerStore.open(
            ServerStoreConfig(path=str(tmp_path / "pages"), budget=32 << 20), identity, [PageFormat(PAGE_BYTES)]
        )
        keys = server.keys([bytes([n]) for n in range(num_pages)])
        tier = WaitingTier(server.stores, PAGE_BYTES)
        assert all(tier.write(keys, PAGE_BYTES, lambda _, page: page.fill(7))) and tier.close()
    return tmp_path / "pages"


def test_stat_lists_the_stores_of_all_servers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its server and sizes, as `stat` of the store itself says them; people get the same rows."""
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
    """The other commands work on one of them, and say so where they get all."""
    first, second = store_folders(path)
    assert len(stats(capsys, "store", "ls", first)["entries"]) == 5
    assert stats(capsys, "store", "verify", second)["pages"] == 3
    assert stats(capsys, "store", "evict", first, "--to", "0")["evicted"] == 5
    assert [one["entries"] for one in stats(capsys, "store", "stat", path)["stores"]] == [0, 3]
    for command in (["ls"], ["verify"], ["compact"], ["evict", "--to", "0"]):
        message = refused(capsys, "store", command[0], path, *command[1:])
        assert f"holds 2 stores; name one of them, like {first}" in message


def test_the_stores_of_a_model_are_pruned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only these, and only if they were not used for the given days; without both flags the command is refused."""
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
    """Stores by the days since their last use, which stat shows; one that is open stays, and so does a path of none."""
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
