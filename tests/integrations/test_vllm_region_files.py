"""Removal of files that vLLM has left in /dev/shm, without vLLM."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import OutOfMemory
from hicache.integrations.vllm.offloading_settings import cpu_bytes, offloading_settings
from hicache.integrations.vllm.region_files import remove_leftovers, remove_names

FOLDER = Path("/dev/shm")
SETTINGS = "hicache.integrations.vllm.offloading_settings"


@pytest.fixture
def engine() -> Iterator[str]:
    """The beginning of the names of an engine's files. At the end, files that the test has left are removed."""
    name = f"vllm_offload_hicache-test-{uuid.uuid4().hex}"
    yield name
    for path in FOLDER.glob(f"*{name}*"):
        path.unlink()


def test_files_that_nobody_uses_are_removed(engine: str) -> None:
    """Unused files, their further segments and empty ones are removed. Files that a process has open or mapped, and
    other files than vLLM's regions, stay."""
    left = [FOLDER / f"{engine}-{name}" for name in ("left.mmap", "left.mmap.1", "empty.mmap")]
    others = [FOLDER / f"{engine}.txt", FOLDER / f"my_{engine}.mmap"]
    for path in (*left, *others):
        path.write_bytes(b"" if "empty" in path.name else b"1" * mmap.PAGESIZE)
    used, mapped = FOLDER / f"{engine}-open.mmap", FOLDER / f"{engine}-mapped.mmap"
    mapped.write_bytes(b"1" * mmap.PAGESIZE)
    with mapped.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    with used.open("wb"), mapping:
        remove_leftovers()
        assert {*FOLDER.glob(f"*{engine}*")} == {used, mapped, *others}
    remove_leftovers()
    assert {*FOLDER.glob(f"*{engine}*")} == {*others}


def test_old_numbers_of_killed_starts_are_removed(engine: str) -> None:
    """The file with the agreed number of bytes, and the temporary file of its writer, are removed if they are older
    than a day. The number of a server that is starting stays."""
    fresh = FOLDER / f"{engine}-fresh.bytes"
    old = [FOLDER / f"{engine}-old.bytes", FOLDER / f"{engine}-old.bytes.{os.getpid()}"]
    for path in (fresh, *old):
        path.write_text("1")
    for path in old:
        os.utime(path, (0, 0))
    remove_leftovers()
    assert {*FOLDER.glob(f"*{engine}*")} == {fresh}


def test_all_processes_take_what_the_first_finds_free(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "free", the first process takes the free memory less an eighth, at most the capacity of the folder, and all
    processes use its number. The file with this number is removed with the names of the region. If no memory is free,
    the error names the setting, and no file is left."""
    left = iter([1 << 28, 64 << 30, 32 << 30, 16 << 30])
    monkeypatch.setattr(f"{SETTINGS}.available_bytes", lambda: next(left))
    monkeypatch.setattr(f"{SETTINGS}.shared_bytes", lambda: 48 << 30)
    settings = offloading_settings({"cpu_bytes_to_use": "free"})
    name = engine.removeprefix("vllm_offload_")
    with pytest.raises(OutOfMemory, match="cpu_bytes_to_use=free"):
        cpu_bytes(settings, name)
    assert not [*FOLDER.glob(f"*{engine}*")]
    assert [cpu_bytes(settings, name) for _ in range(3)] == [42 << 30] * 3
    assert cpu_bytes(settings, f"{name}-b") == 28 << 30
    remove_names(str(FOLDER / f"{engine}.mmap"))
    assert [path.name for path in FOLDER.glob(f"*{engine}*")] == [f"{engine}-b.bytes"]
