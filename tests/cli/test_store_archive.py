"""Archives of stores: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
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
)
from hicache.storage.records import IdentityRecord, Settings
from hicache.store_command.archive import ArchiveReader, ArchiveWriter
from hicache.store_command.import_export import Loader
from storage_pages import IDENTITY, key_of, open_store, page_of

PAGE_BYTES, NUM_PAGES = 64, 5
SETTINGS = Settings(1 << 20, (PageFormat(PAGE_BYTES, PageFilter("byte_shuffle", 2)),), "commit", 3)
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
    writer = ArchiveWriter(file, "a", IdentityRecord(identity or IDENTITY, (PAGE_BYTES,)), SETTINGS)  # type: ignore[arg-type]
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
    """Record, settings, keys, values and their order, and no byte beyond the documented ones."""
    items = list(pages(store))
    assert [key for key, _ in items] == [key_of(n)[: n + 1] for n in range(NUM_PAGES)]
    data = archived(items)
    archive = ArchiveReader(io.BytesIO(data), "a")
    assert (archive.identity, archive.settings) == (IdentityRecord(IDENTITY, (PAGE_BYTES,)), SETTINGS)
    assert list(archive.entries()) == items
    assert archive.done_bytes == len(data)
    assert unpacked(archived([])) == ([], None)


def test_the_bytes_are_those_of_the_description() -> None:
    """A frozen archive of version 1, put together from the description alone: later releases must read it."""
    record = json.dumps(
        {
            "format": 1,
            "identity": {"model": "m"},
            "page_bytes": [PAGE_BYTES],
            "settings": {
                "budget_bytes": 1 << 20,
                "durability": "commit",
                "formats": [
                    {
                        "filter": {"channels": 0, "element_bytes": 2, "kind": "byte_shuffle", "tokens": 0},
                        "page_bytes": PAGE_BYTES,
                    }
                ],
                "level": 3,
            },
            "slots": False,
        },
        separators=(",", ":"),
    ).encode()
    start = b"HKVA" + struct.pack("<HHI", 1, 0, len(record)) + record
    start += struct.pack("<I", zlib.crc32(start))
    head, value = struct.pack("<HI", 3, 9) + b"key", b"any value"
    end = struct.pack("<HQ", 0, 1)
    data = start + head + value + end + struct.pack("<I", zlib.crc32(start + head + end))
    assert unpacked(data) == ([(b"key", b"any value")], None)
    assert archived([(b"key", b"any value")], {"model": "m"}) == data


def test_every_cut_is_found(store: LmdbPageStore) -> None:
    """Cut after any byte, an archive is refused by name, and what was read before is its first entries."""
    items = list(pages(store))
    data = archived(items)
    for size in range(len(data)):
        found, error = unpacked(data[:size])
        assert isinstance(error, StoreCorrupt), size
        assert ("cut short" if size else "is no archive") in str(error)
        assert found == items[: len(found)]


def test_every_flipped_bit_is_found(store: LmdbPageStore) -> None:
    """Whatever bit is flipped, the archive is refused, or one value is, since it does not verify."""
    items = list(pages(store))
    data = archived(items)
    verify = store.stored_values.verifier.verify
    num_refused_values = 0
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            found, error = unpacked(bytes(damaged))
            valid = [(key, value) for key, value in found if not verify(key, memoryview(value))]
            assert all(item in items for item in valid), (place, bit)
            if error is None:
                assert len(found) == len(items) and len(valid) == len(items) - 1, (place, bit)
                num_refused_values += 1
    assert num_refused_values == 8 * sum(len(value) for _, value in items)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda data: b"PK\3\4" + data[4:], StoreCorrupt, "is no archive of a store"),
        (lambda data: b"", StoreCorrupt, "is no archive of a store"),
        (
            lambda data: data[:4] + b"\2" + data[5:],
            StoreMismatch,
            "has version 2, this release reads 1",
        ),
        (lambda data: data[:8] + b"\xff" * 4 + data[12:], StoreCorrupt, "header makes no sense"),
        (lambda data: data.replace(b"tiny", b"huge"), StoreCorrupt, "header does not match its checksum"),
        (lambda data: data + b"\0", StoreCorrupt, "goes on after its end"),
        (lambda data: data[:-14] + struct.pack("<HI", 600, 1), StoreCorrupt, "a key of 600 and a value of 1 bytes"),
        (lambda data: data[:-14] + struct.pack("<HI", 1, 1 << 31), StoreCorrupt, "a value of 2147483648 bytes"),
    ],
)
def test_what_is_no_whole_archive_is_named(
    change: Callable[[bytes], bytes], kind: type[StoreError], words: str, store: LmdbPageStore
) -> None:
    """Another file, a newer version, lengths out of range, bytes after the end: each is an error that says so."""
    _, error = unpacked(change(archived(list(pages(store)))))
    assert type(error) is kind and words in str(error)


def test_the_count_of_entries_is_compared(store: LmdbPageStore) -> None:
    """An archive with right checksums whose writer counted wrongly is refused."""
    file = io.BytesIO()
    writer = ArchiveWriter(file, "a", IdentityRecord(IDENTITY, (PAGE_BYTES,)), SETTINGS)  # type: ignore[arg-type]
    for key, value in pages(store):
        writer.add(key, value)
    writer.num_entries += 1
    writer.finish()
    _, error = unpacked(file.getvalue())
    assert isinstance(error, StoreCorrupt) and "it has 5 entries and states 6" in str(error)


def resealed(record: bytes, rest: bytes = b"") -> bytes:
    start = b"HKVA" + struct.pack("<HHI", 1, 0, len(record)) + record
    return start + struct.pack("<I", zlib.crc32(start)) + rest


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"format": 9}, StoreMismatch, "comes from a newer store"),
        ({"format": "2"}, StoreCorrupt, "record cannot be read"),
        ({"page_bytes": [0]}, StoreCorrupt, "record cannot be read"),
        ({"page_bytes": [2, 1]}, StoreCorrupt, "record cannot be read"),
        ({"page_bytes": [2, 2]}, StoreCorrupt, "record cannot be read"),
        ({"page_bytes": []}, StoreCorrupt, "record cannot be read"),
        ({"page_bytes": list(range(1, 100))}, StoreCorrupt, "record cannot be read"),
        ({"identity": {}}, StoreCorrupt, "record makes no sense"),
        ({"identity": {"model": ["m"]}}, StoreCorrupt, "record makes no sense"),
        ({"settings": {"budget_bytes": "much"}}, StoreCorrupt, "record makes no sense"),
        ({"settings": {"level": None, "budget_bytes": 1 << 20}}, StoreCorrupt, "record makes no sense"),
        (
            {"settings": {"formats": [{"page_bytes": PAGE_BYTES, "filter": {"tokens": "3"}}]}},
            StoreCorrupt,
            "record makes no sense",
        ),
    ],
)
def test_a_record_that_another_program_wrote_is_checked(
    fields: dict[str, object], kind: type[StoreError], words: str
) -> None:
    """A record with a right checksum and wrong fields is refused by name, and never an error of Python's."""
    record = {"format": 1, "identity": {"model": "m"}, "page_bytes": [PAGE_BYTES], "slots": False, "settings": {}}
    record |= fields
    _, error = unpacked(resealed(json.dumps(record).encode()))
    assert type(error) is kind and words in str(error)
    _, error = unpacked(resealed(b"\xff not json"))
    assert isinstance(error, StoreCorrupt)


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
    keep = {"header": 20, "entry": len(data) - 20 - len(items[-1][1]), "end": len(data) - 1}[size]
    (tmp_path / "a").write_bytes(data[:keep])
    target = tmp_path / "target"
    assert main(["store", "import", str(target), str(tmp_path / "a"), "--json"]) == 2
    out, err = capsys.readouterr()
    num_whole = {"header": 0, "entry": NUM_PAGES - 1, "end": NUM_PAGES}[size]
    assert not out and len(err.splitlines()) == 1 and "is cut short after" in err
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
    damaged[data.index(items[2][1]) + 70] ^= 1
    (tmp_path / "a").write_bytes(damaged)
    target = tmp_path / "target"
    assert main(["store", "import", str(target), str(tmp_path / "a"), "--json"]) == 1
    stats = json.loads(capsys.readouterr().out)
    assert (stats["pages"], stats["stored"], stats["refused"]) == (NUM_PAGES, NUM_PAGES - 1, 1)
    assert stats["reasons"] == {"checksum differs": 1}
    again = open_store(target, page_bytes=PAGE_BYTES, budget_bytes=1 << 20)
    assert list(pages(again)) == [item for item in items if item != items[2]]
    again.close()
