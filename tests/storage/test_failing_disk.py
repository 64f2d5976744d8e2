"""A disk that fails under an open store: real I/O errors, from a loop device whose image was cut short.

Run as a program, it is the process that has the store open.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_pages import (
    forget_cached,
    found_numbers,
    key_of,
    open_store,
    put_numbers,
    slots_path,
)

NUM_PAGES, PAGE_BYTES = 40, 1 << 20
SETTINGS = {"page_bytes": PAGE_BYTES, "budget_bytes": 80 << 20}


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """The image of a small file system, mounted at `mount` beside it."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    for command in (["mkfs.ext2", "-q", "-F", image], ["mount", "-o", "loop", image, mount]):
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not there")
        if done.returncode:
            pytest.skip(f"{command[0]} is not permitted here")
    yield image
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_failing_disk_costs_what_it_held(image: Path) -> None:
    """Where half of the disk is lost, the values on it are misses and read errors, all others come back byte for
    byte, also the second time, and the process lives."""
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, str(image.parent / "mount" / "store")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parent) as child:
        assert child.stdin is not None and child.stdout is not None
        ready = child.stdout.readline()
        assert ready == "ready\n", child.communicate()
        os.truncate(image, 48 << 20)
        output, errors = child.communicate("go\n", timeout=120)
    assert child.returncode == 0, errors
    seen = json.loads(output)
    assert 0 < seen["found"] < NUM_PAGES and seen["corrupt"] == 0
    assert seen["read_errors"] == NUM_PAGES - seen["found"]
    assert seen["found_later"] == seen["found"]


def main(path: str) -> None:
    """Fill a store, forget what the kernel keeps of it, and use it after the disk has failed."""
    with contextlib.closing(open_store(path, **SETTINGS)) as store:
        assert all(put_numbers(store, range(NUM_PAGES), PAGE_BYTES))
    store = open_store(path, **SETTINGS)
    assert all(store.contains([key_of(n) for n in range(NUM_PAGES)]))
    forget_cached(slots_path(Path(path)))
    print("ready", flush=True)
    sys.stdin.readline()
    found = found_numbers(store, range(NUM_PAGES), PAGE_BYTES)
    stats = store.stats()
    later = found_numbers(store, sorted(found), PAGE_BYTES)
    seen = {"found": len(found), "found_later": len(later)}
    print(json.dumps({**seen, "read_errors": stats.read_errors, "corrupt": stats.corrupt}), flush=True)
    os._exit(0)  # without the last sync: the loop device would grow its image again


if __name__ == "__main__":
    main(sys.argv[1])
