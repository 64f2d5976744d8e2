"""Archives of stores: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.cli import main
from hicache.storage import (
    LmdbPageStore,
    PageFilter,
    PageFormat,
    StoreCorrupt,
    StoreError,
    StoreMismatch,
    describe,
    pages,
    store_at,
)
from hicache.storage.records import StoreRecord
from hicache.store_command.archive import ArchiveReader, ArchiveWriter
from hicache.store_command.import_export import Loader
from storage_pages import IDENTITY, key_of, open_store, page_of

PAGE_BYTES, NUM_PAGES = 64, 5
RECORD = StoreRecord(IDENTITY, (PageFormat(PAGE_BYTES, PageFilter("byte_shuffle", 2)),), 1 << 20, "commit", 3)
Items = list[tuple[bytes, bytes]]


@pytest.fixture(name="store")
def a_store(tmp_path: Path) -> Iterator[LmdbPageStore]:
    """A store of five small pages, whose archive is short enough to be damaged at every bit."""
    store = open_store(tmp_path / "store", page_bytes=PAGE_BYTES, budget_bytes=1 << 20)
    for number in range(NUM_PAGES):
        store.put([(key_of(number)[: number + 1], page_of(number, PAGE_BYTES))])
    yield store
    store.close()


def archived(items: Items, identity: dict[str, str | int] | None = None) -> bytes:
    file = io.BytesIO()
    # An unbuffered file and this one are written alike.
    record = replace(RECORD, identity=identity or IDENTITY)
    writer = ArchiveWriter(file, "a", record)  # type: ignore[arg-type]
    for key, value in items:
        writer.add(key, value)
    writer.finish()
    assert writer.written_bytes == len(file.getvalue())
    return file.getvalue()


def unpacked(data: bytes) -> tuple[Items, StoreError | None]:
    """What is read before the end or the error, and the error."""
    found: Items = []
    try:
        for item in ArchiveReader(io.BytesIO(data), "a").entries():
            found.append(item)
    except StoreError as error:
        return found, error
    return found, None


def test_an_archive_gives_back_what_was_put_in(store: LmdbPageStore) -> None:
    """Record, settings, keys of any length, values, their order; tar shows each value as a member, and extracts it."""
    items = list(pages(store))
    assert [key for key, _ in items] == [key_of(n)[: n + 1] for n in range(NUM_PAGES)]
    data = archived(items)
    archive = ArchiveReader(io.BytesIO(data), "a")
    assert archive.record == RECORD
    assert list(archive.entries()) == items
    assert unpacked(archived([])) == ([], None)
    long = [(bytes([length % 256]) * length, b"value") for length in (1, 49, 50, 51, 127, 128, 511)]
    assert unpacked(archived(long)) == (long, None)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = ["manifest.json", *(key.hex() for key, _ in items), "end.json"]
        assert tar.getnames() == names
        contents = [file.read() for name in names if (file := tar.extractfile(name)) is not None]
    assert contents[1:-1] == [value for _, value in items] and contents[-1] == b'{"pages": 5}'
    assert json.loads(contents[0])["identity"] == IDENTITY


def test_every_cut_is_found(store: LmdbPageStore) -> None:
    """Cut in or before its last member, an archive is refused by name, and what was read before is its first pages."""
    items = list(pages(store))
    data = archived(items)
    end = data.index(b'{"pages": 5}') + len(b'{"pages": 5}')
    for size in range(end):
        found, error = unpacked(data[:size])
        assert isinstance(error, StoreCorrupt), size
        assert "cut short" in str(error) or "is no archive" in str(error)
        assert found == items[: len(found)]


def test_a_flipped_bit_anywhere_is_harmless(store: LmdbPageStore) -> None:
    """Whatever bit is flipped, the archive is refused, or a value is, since it does not verify, or nothing is lost."""
    items = list(pages(store))
    data = archived(items)
    verify = store.verify_value
    for place in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        found, error = unpacked(bytes(damaged))
        valid = [(key, value) for key, value in found if not verify(key, value)]
        assert all(item in items for item in valid), place
        assert error is not None or (len(found) == len(items) and len(valid) >= len(items) - 1), place


def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    return info.tobuf() + content.ljust(-(-len(content) // 512) * 512, b"\0")


OTHERS: list[tuple[Callable[[bytes], bytes], type[StoreError]]] = [
    (lambda data: b"PK\3\4" + data[4:], StoreCorrupt),
    (lambda data: b"", StoreCorrupt),
    (lambda data: data.replace(b"tiny", b"huge"), StoreCorrupt),
    (lambda data: data.replace(b'"format":1', b'"format":2'), StoreMismatch),
    (lambda data: member("zz", b"v") + data, StoreCorrupt),
    (lambda data: data[:2048] + member("zz", b"v"), StoreCorrupt),
    (lambda data: data[:2048] + member("AB", b"v"), StoreCorrupt),
    (lambda data: data[:2048] + member("../x", b"v"), StoreCorrupt),
    (lambda data: data[:2048] + member("ab" * 512, b"v"), StoreCorrupt),
    (lambda data: data[:2048] + member("ab", b"v" * 9999), StoreCorrupt),
    (lambda data: data[:2048] + member("ab", b"", tarfile.SYMTYPE), StoreCorrupt),
    (lambda data: data[:2048] + member("end.json", b'{"pages": 7}'), StoreCorrupt),
]


@pytest.mark.parametrize(("change", "kind"), OTHERS)
def test_what_is_no_whole_archive_is_named(
    change: Callable[[bytes], bytes], kind: type[StoreError], store: LmdbPageStore
) -> None:
    """Another file, a newer format, members that are no pages, a wrong count: each is an error of its kind."""
    _, error = unpacked(change(archived(list(pages(store)))))
    assert type(error) is kind


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_no_length_of_a_header_is_trusted(kind: bytes, store: LmdbPageStore) -> None:
    """A name, a link or a table of attributes that goes on for megabytes is refused before it is read."""
    header = tarfile.TarInfo("x")
    header.size, header.type = 1 << 32, kind
    for first in (b"", archived(list(pages(store)))[:2048]):
        file = io.BytesIO(first + header.tobuf() + b"1" * (8 << 20))
        with pytest.raises(StoreCorrupt):
            list(ArchiveReader(file, "a").entries())
        assert file.tell() < 64 << 10


def test_a_later_use_in_the_archive_counts(store: LmdbPageStore, tmp_path: Path) -> None:
    """A page that comes twice, as it may from a store in use, is stored once, in the place of the second time."""
    items = list(pages(store))
    target = open_store(tmp_path / "target", page_bytes=PAGE_BYTES, budget_bytes=1 << 20)
    loader = Loader(target)
    for key, value in [*items, items[1]]:
        loader.add(key, value)
    loader.flush()
    assert list(pages(target)) == [*items[:1], *items[2:], items[1]]
    assert loader.kept == len(items) + 1 and not loader.refused
    target.check()
    target.close()


@pytest.mark.parametrize("size", ["header", "entry", "end"])
def test_what_came_before_the_damage_is_imported(
    size: str, store: LmdbPageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an archive that is cut, the whole entries are imported and the error counts them; without a whole header
    nothing is made."""
    items = list(pages(store))
    data = archived(items)
    last = data.index(items[-1][0].hex().encode())
    keep = {"header": 20, "entry": last + 512 + 20, "end": data.index(b'{"pages": 5}')}[size]
    (tmp_path / "a").write_bytes(data[:keep])
    target = tmp_path / "target"
    assert main(["store", "import", str(target), str(tmp_path / "a"), "--json"]) == 2
    out, err = capsys.readouterr()
    num_whole = {"header": 0, "entry": NUM_PAGES - 1, "end": NUM_PAGES}[size]
    assert not out and len(err.splitlines()) == 1 and ("is cut short" in err or size == "header")
    if size == "header":
        assert not target.exists()
        return
    assert f"{num_whole} pages that came before are imported" in err
    assert describe(target).entries == num_whole
    assert main(["store", "verify", str(target)]) == 0


def test_a_value_that_does_not_verify_is_refused_alone(
    store: LmdbPageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit of a value: that page is refused and counted with its reason, all others are imported, status 1;
    what the store held before stays."""
    items = list(pages(store))
    data = archived(items)
    damaged = bytearray(data)
    damaged[data.index(items[2][1]) + 74] ^= 1
    (tmp_path / "a").write_bytes(damaged)
    target = tmp_path / "target"
    assert main(["store", "import", str(target), str(tmp_path / "a"), "--json"]) == 1
    stats = json.loads(capsys.readouterr().out)
    assert (stats["pages"], stats["stored"], stats["refused"]) == (NUM_PAGES, NUM_PAGES - 1, 1)
    assert stats["reasons"] == {"checksum differs": 1}
    again = open_store(store_at(target), page_bytes=PAGE_BYTES, budget_bytes=1 << 20)
    assert list(pages(again)) == [item for item in items if item != items[2]]
    again.close()
