"""`hicache store` on stores that several machines share: a directory here, and S3 in tests/remote."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from cli_case import output, refused, stats
from hicache.storage import open_store
from hicache.storage.conformance import FORMATS, IDENTITY, LARGE_BYTES, page

KEYS = [bytes([n]) * 32 for n in range(4)]
FILE_BYTES = 4096 + LARGE_BYTES


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a shared directory with four pages. The first of these pages were used last."""
    with closing(open_store(f"dir://{tmp_path}?level=0", identity=IDENTITY, formats=FORMATS)) as store:
        store.put([(key, page(1)) for key in KEYS])
    for hours, key in enumerate(KEYS):
        (file,) = tmp_path.rglob(key.hex())
        os.utime(file, (1e9 - 3600 * hours, 1e9 - 3600 * hours))
    return f"dir://{tmp_path}"


def test_stat_and_ls_describe_the_pages(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has identity, number, size and last use; pages are in the order of their use."""
    found = stats(capsys, "store", "stat", url)
    (store,) = found["stores"]
    assert store["identity"] == IDENTITY and store["last_use_s"] == 1e9
    assert found["entries"] == store["entries"] == 4 and found["bytes"] == 4 * FILE_BYTES
    assert "conformance" in output(capsys, "store", "stat", url)
    listed = stats(capsys, "store", "ls", url, "--limit", 3)["entries"]
    assert [each["key"] for each in listed] == [key.hex() for key in KEYS[:0:-1]]
    assert stats(capsys, "store", "ls", url, "--newest", "--limit", 1)["entries"][0]["key"] == KEYS[0].hex()
    assert len(output(capsys, "store", "ls", url).splitlines()) == 4


def test_verify_finds_and_removes_bad_pages(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a bad page is left, the status is 1."""
    assert stats(capsys, "store", "verify", url)["left"] == 0
    (bad,) = tmp_path.rglob(KEYS[1].hex())
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    found = stats(capsys, "store", "verify", url, status=1)
    assert found["pages"] == 4 and [each["name"] for each in found["faults"]] == [str(bad)]
    assert "checksum differs" in output(capsys, "store", "verify", url, status=1)
    assert stats(capsys, "store", "verify", url, "--repair")["left"] == 0 and not bad.exists()
    assert "3 pages" in output(capsys, "store", "verify", url)


def test_names_of_files_have_no_control_characters(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with control characters in its name cannot change a line of the output or the terminal."""
    (file,) = tmp_path.rglob(KEYS[0].hex())
    (file.parent / "x\x1b[31m\nhicache").write_bytes(b"no page")
    for command, status in (("ls", 0), ("verify", 1)):
        text = output(capsys, "store", command, url, status=status)
        assert r"x\x1b[31m\nhicache" in text and all(line.isprintable() for line in text.splitlines())


def test_prune_keeps_the_budget(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prune removes the pages that were used longest ago."""
    found = stats(capsys, "store", "prune", url, "--budget", f"{2 * FILE_BYTES}B")
    assert (found["removed"], found["left"], found["left_bytes"]) == (2, 2, 2 * FILE_BYTES)
    assert {each["key"] for each in stats(capsys, "store", "ls", url)["entries"]} == {key.hex() for key in KEYS[:2]}
    assert "2 pages" in output(capsys, "store", "prune", url, "--budget", "1TiB")


def test_a_size_without_unit_removes_nothing(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A size without unit is refused, and all pages stay. `B` means bytes, and 0 needs no unit."""
    for size in ("20", " 20 ", "20.0"):
        assert "write 20GB, or 20B for bytes" in refused(capsys, "store", "prune", url, "--budget", size)
        assert "write 20GB, or 20B for bytes" in refused(capsys, "store", "evict", tmp_path, "--to", size)
    assert stats(capsys, "store", "stat", url)["entries"] == len(KEYS)
    assert stats(capsys, "store", "prune", url, "--budget", f"{FILE_BYTES}B")["left"] == 1
    assert stats(capsys, "store", "prune", url, "--budget", "0")["left"] == 0


def test_what_a_store_cannot_do_is_refused(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that the store does not support is refused in one line, which names the command that works."""
    wrong = {
        ("compact", url): "prune",
        ("evict", url, "--to", "0"): "prune",
        ("prune", url, "--unused-days", 1): "--budget",
        ("prune", url, "--model", "small", "--budget", "1GB"): "--model",
        ("prune", tmp_path, "--budget", "1GB"): "--unused-days",
        ("stat", "mooncake://host:50051"): "metrics of its master",
        ("ls", "redis://host"): "cannot list",
        ("verify", f"dir://{tmp_path}/absent"): "mount it",
    }
    for arguments, text in wrong.items():
        assert text in refused(capsys, "store", *arguments), arguments
