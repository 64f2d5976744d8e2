"""The secondary tier with a remote store under vLLM's own tiering manager. Disks over one shared folder stand for
machines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from disk_case import Clock
from hicache.errors import ConfigError
from hicache.integrations.vllm import tier as tier_module
from hicache.storage.dir_store import DirPageStore
from hicache.storage.shared_pages import shared_pages
from vllm_tier_case import CHUNK_TOKENS, CONFIG, NUM_CHUNKS, Scheduler, key, scheduler
from waiting import BOUND_S, eventually

CHUNKS = [key(number) for number in range(20)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a shared folder."""
    (tmp_path / "shared").mkdir()
    return f"dir://{tmp_path / 'shared'}"


@contextlib.contextmanager
def node(path: Path | str, url: str, backup: str = "all", **settings: Any) -> Iterator[Scheduler]:
    """A server of one machine. `path`: its disk; "" for a server without a disk."""
    settings.setdefault("salt", "these weights")
    with scheduler(path, remote={"url": url, "backup": backup}, **settings) as server:  # type: ignore[arg-type]
        yield server


def num_shared(url: str) -> int:
    return sum(1 for _ in shared_pages(url).pages())


def until_shared(server: Scheduler, url: str, num_pages: int) -> None:
    """Wait until the shared folder has these pages, and no copy is queued."""
    tier = server.tiers[0]
    eventually(lambda: tier._poll() or num_shared(url) == num_pages, lambda: (num_shared(url), tier.metrics.snapshot()))


def loads(server: Scheduler, expected: Sequence[bool] = (True,) * 20) -> None:
    """Check that the chunks are loaded with the bytes that another server stored. On a busy machine the remote store
    may at first answer too late."""
    eventually(lambda: server.reset() or server.load(CHUNKS) == [*expected], server.tiers[0].metrics.snapshot)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["in threads", pytest.param("in processes", marks=pytest.mark.store_process)])
def test_a_chunk_of_another_machine_is_loaded_and_kept_on_the_disk(tmp_path: Path, url: str, mode: str) -> None:
    """A chunk that another machine stored is loaded and kept on the disk. Then the disk serves it without the remote
    store."""
    with node(tmp_path / "a", url) as first:
        first.store(CHUNKS)
        until_shared(first, url, 20)
    with node(tmp_path / "b", url) as second:
        loads(second)
        read = second.tiers[0].metrics.snapshot()
        assert read["remote.hit_pages"] >= 20
        eventually(lambda: second.tiers[0]._poll() or second.tiers[0].metrics.snapshot()["disk.stored_pages"] == 20)
    with scheduler(tmp_path / "b", salt="these weights") as alone:
        assert alone.load(CHUNKS) == [True] * 20


@pytest.mark.smoke
def test_a_server_without_a_disk_shares_chunks(tmp_path: Path, url: str) -> None:
    """A server without a disk shares chunks through the remote store. The server's stores pin at most a quarter of the
    rows. With `backup` none it only reads."""
    with node("", url) as first:
        assert first.tiers[0]._max_waiting_bytes == first.rows.nbytes // 4
        for start in range(0, 20, 4):
            first.store(CHUNKS[start : start + 4])
        assert num_shared(url) == 20
    with node("", url, "none") as second:
        loads(second)
        second.store([key(99)])
    assert num_shared(url) == 20


@pytest.mark.smoke
def test_release_path_and_by_choice_the_device_do_not_divide_machines(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights in two folders, under two releases, share chunks on the disk and in the remote store. Servers of
    other weights share no chunk. Servers on another kind of device share no chunk unless the setting allows it."""
    for name in ("models", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1 << 16))

    def of(name: str) -> dict[str, Any]:
        return {"model": replace(CONFIG.model, name=str(tmp_path / name)), "salt": ""}

    with node(tmp_path / "a", url, **of("models")) as first:
        first.store(CHUNKS)
        until_shared(first, url, 20)
    monkeypatch.setattr(tier_module, "vllm_release", lambda: "9.9")
    with node(tmp_path / "b", url, **of("data")) as second:
        loads(second)
    with scheduler(tmp_path / "a", **of("data")) as third:
        assert third.load(CHUNKS) == [True] * 20
    (tmp_path / "data" / "model.safetensors").write_bytes(bytes([1]) * (1 << 16))
    with node(tmp_path / "c", url, **of("data")) as other:
        assert other.load(CHUNKS) == [False] * 20


@pytest.mark.smoke
def test_weights_that_cannot_be_read_need_a_salt(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"salt is empty.*set salt to"), node(tmp_path / "a", url, salt=""):
        pass


@pytest.mark.smoke
def test_used_and_costly_chunks_are_copied(tmp_path: Path, url: str) -> None:
    """The chunks of a prompt that takes longer than a second to compute are copied at once. The chunks of another
    prompt are copied after a request has loaded them."""
    per_s = CHUNK_TOKENS * 5  # so computing 20 chunks takes 4 seconds, and 4 chunks less than one
    with node(tmp_path / "a", url, "used", prefill_tokens_per_s=per_s) as server:
        server.store(CHUNKS[:4])
        server.reset()
        assert server.tiers[0].metrics.snapshot()["disk.backup_sent_pages"] == 0 == num_shared(url)
        eventually(lambda: server.load(CHUNKS[:4]) == [True] * 4)
        until_shared(server, url, 4)
        server.store(CHUNKS)
        until_shared(server, url, 20)


@pytest.mark.smoke
def test_a_chunk_that_is_gone_when_it_is_read_is_a_miss(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that another machine removes between look-up and read is a miss."""
    with node(tmp_path / "a", url) as first:
        first.store(CHUNKS)
        until_shared(first, url, 20)
    contains = DirPageStore.contains
    monkeypatch.setattr(DirPageStore, "contains", lambda store, keys, **more: [True] * len(keys))
    with node(tmp_path / "b", url) as second:
        found = eventually(lambda: second.load([*CHUNKS[:4], key(99), *CHUNKS[5:9]]))
        assert not found[4]
        monkeypatch.setattr(DirPageStore, "contains", contains)
        loads(second)


@pytest.mark.smoke
def test_a_remote_store_that_hangs_delays_a_request_by_a_quarter_of_computing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The remote store hangs, in the look-up or in the read. After a quarter of the time for computing, the request
    computes, and its rows are free, although the store's call has not returned. Bytes that this call reads later reach
    no row."""
    with node(tmp_path / "a", url) as first:
        first.store(CHUNKS)
        until_shared(first, url, 20)
    opened, held = threading.Event(), list[str]()

    def hanging(name: str) -> Any:
        original = getattr(DirPageStore, name)

        def call(self: DirPageStore, *args: Any, **kwargs: Any) -> Any:
            held.append(name)
            assert opened.wait(BOUND_S)
            return original(self, *args, **kwargs)

        return call

    # Computing 20 chunks takes 4 seconds.
    with node(tmp_path / "b", url, prefill_tokens_per_s=CHUNK_TOKENS * 5) as second:
        with monkeypatch.context() as patched, second.request() as context:
            patched.setattr(DirPageStore, "get_into", hanging("get_into"))
            second.until(lambda: second.ask(CHUNKS, context) is None and bool(held))
            clock.now_s += 0.9
            assert second.ask(CHUNKS, context) is None
            clock.now_s += 0.2
            second.until(lambda: second.ask(CHUNKS, context) == [False] * 20)
            second.until(lambda: not second.manager.has_pending_work())
            second.store([key(100 + n) for n in range(NUM_CHUNKS)])
        opened.set()
    opened.clear()
    held.clear()
    with node(tmp_path / "c", url, prefill_tokens_per_s=CHUNK_TOKENS * 5) as third:
        with monkeypatch.context() as patched, third.request() as context:
            patched.setattr(DirPageStore, "contains", hanging("contains"))
            third.until(lambda: third.ask(CHUNKS, context) is None and bool(held))
            clock.now_s += 1.1
            third.until(lambda: third.ask(CHUNKS, context) == [False] * 20)
        opened.set()
