"""The archive format: the pages of a store in one file or stream, to be moved to another machine.

Pages pass as they are stored: compressed, encrypted if they were, each with its own checksum. All integers are
little-endian; `[a, b)` are the bytes from `a` on, without `b`.

    header  [ 0,  4)      magic, b"HKVA"
            [ 4,  6)      u16 version, 1
            [ 6,  8)      u16 0
            [ 8, 12)      u32 length n of the record, at most 1 MiB
            [12, 12 + n)  the store's record, JSON: its identity record (docs/disk_format.md) and, as "settings", its
                          settings record
            and 4 more    u32 CRC-32, zlib's, over [0, 12 + n)
    entry   [ 0,  2)      u16 length k of the key, 1 to 511
            [ 2,  6)      u32 length v of the value
            [ 6,  6 + k)  the page's key
            and v more    the value
    end     [ 0,  2)      u16 0
            [ 2, 10)      u64 number of entries
            [10, 14)      u32 CRC-32 over header, entries and [0, 10) of the end, without the values

Entries come least recently used first. The last checksum excludes the values because each verifies itself, with its
key: only the damaged one is refused. Nothing follows the end. No length is trusted: a value is at most the largest page
with its overhead.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hicache.settings import INT64_MAX
from hicache.storage.base import StoreCorrupt, StoreError, StoreMismatch
from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.header import HEADER_BYTES
from hicache.storage.records import IdentityRecord, Settings

MAGIC, ARCHIVE_VERSION = b"HKVA", 1
_START = struct.Struct("<4sHHI")
_CHECKSUM = struct.Struct("<I")
_KEY_LENGTH = struct.Struct("<H")
_VALUE_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_MAX_RECORD_BYTES = 1 << 20
_MAX_KEY_BYTES = 511


class ArchiveWriter:
    """Writes header, entries and end to `file`, which is unbuffered; `name` is for messages. One thread.

    StoreError when writing fails. Without `finish` the archive is truncated.
    """

    def __init__(self, file: io.RawIOBase, name: str, identity: IdentityRecord, settings: Settings) -> None:
        self._file, self._name = file, name
        self._checksum, self.num_entries = 0, 0
        self.written_bytes = 0
        record = json.loads(identity.pack()) | {"settings": json.loads(settings.pack())}
        packed = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        header = self._sum(_START.pack(MAGIC, ARCHIVE_VERSION, 0, len(packed)) + packed)
        self._write(self._sum_after(header))

    def add(self, key: bytes, value: bytes) -> None:
        entry = self._sum(_KEY_LENGTH.pack(len(key)) + _VALUE_LENGTH.pack(len(value)) + key)
        self._write(entry)
        self._write(value)
        self.num_entries += 1

    def finish(self) -> None:
        self._write(self._sum_after(self._sum(_KEY_LENGTH.pack(0) + _COUNT.pack(self.num_entries))))

    def _sum(self, data: bytes) -> bytes:
        self._checksum = zlib.crc32(data, self._checksum)
        return data

    def _sum_after(self, data: bytes) -> bytes:
        """`data` and the checksum up to its end; later checksums cover both."""
        return data + self._sum(_CHECKSUM.pack(self._checksum))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise StoreError(
                f"cannot write the archive {self._name}: {error.strerror}; free space or choose another file"
            ) from error
        self.written_bytes += len(data)


class ArchiveReader:
    """Reads the archive in `file`: whose pages they are, and the pages once, in order. One thread.

    The constructor reads the header. Raises `StoreCorrupt` for what is no archive, is cut or damaged, `StoreMismatch`
    for a newer version, `StoreError` if reading fails.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._checksum = 0
        self.done_bytes = 0
        magic, version, reserved, record_bytes = _START.unpack(self._start())
        if magic != MAGIC:
            raise StoreCorrupt(f"{name} is no archive of a store; give a file that `hicache store export` wrote")
        if version != ARCHIVE_VERSION:
            raise StoreMismatch(
                f"the archive {name} has version {version}, this release reads {ARCHIVE_VERSION}; update hicache"
            )
        if reserved or record_bytes > _MAX_RECORD_BYTES:
            raise self._damaged("its header makes no sense")
        record = self._read(record_bytes)
        self._require_checksum("its header does not match its checksum")
        self.identity, self.settings = self._parse(record)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values, not verified; an incomplete archive raises where that shows, at the latest at the end."""
        max_value_bytes = self.identity.page_sizes[-1] + HEADER_BYTES + ENCRYPTION_BYTES
        num_entries = 0
        while key_bytes := _KEY_LENGTH.unpack(self._read(_KEY_LENGTH.size))[0]:
            value_bytes = _VALUE_LENGTH.unpack(self._read(_VALUE_LENGTH.size))[0]
            if key_bytes > _MAX_KEY_BYTES or value_bytes > max_value_bytes:
                raise self._damaged(f"entry {num_entries} has a key of {key_bytes} and a value of {value_bytes} bytes")
            key = self._read(key_bytes)
            yield key, self._take(value_bytes)
            num_entries += 1
        stated = _COUNT.unpack(self._read(_COUNT.size))[0]
        self._require_checksum("its entries do not match its checksum")
        if stated != num_entries:
            raise self._damaged(f"it has {num_entries} entries and states {stated}")
        if self._some(1):
            raise self._damaged("it goes on after its end")

    def _start(self) -> bytes:
        """The first bytes; a shorter file is no archive, unless it starts like one."""
        data = self._some(_START.size)
        if len(data) == _START.size:
            self._checksum = zlib.crc32(data)
            return data
        if data and MAGIC.startswith(data[: len(MAGIC)]):
            raise self._truncated()
        raise StoreCorrupt(f"{self._name} is no archive of a store; give a file that `hicache store export` wrote")

    def _read(self, num_bytes: int) -> bytes:
        data = self._take(num_bytes)
        self._checksum = zlib.crc32(data, self._checksum)
        return data

    def _take(self, num_bytes: int) -> bytes:
        data = self._some(num_bytes)
        if len(data) < num_bytes:
            raise self._truncated()
        return data

    def _some(self, num_bytes: int) -> bytes:
        try:
            data = self._file.read(num_bytes)
        except OSError as error:
            raise StoreError(f"cannot read the archive {self._name}: {error.strerror}; check the disk") from error
        self.done_bytes += len(data)
        return data

    def _require_checksum(self, otherwise: str) -> None:
        actual = self._checksum
        if _CHECKSUM.unpack(self._read(_CHECKSUM.size))[0] != actual:
            raise self._damaged(otherwise)

    def _parse(self, record: bytes) -> tuple[IdentityRecord, Settings]:
        try:
            identity = IdentityRecord.unpack(Path(self._name), record)
            settings = Settings.unpack(json.dumps(json.loads(record)["settings"]).encode(), identity.page_sizes, 0)
        except StoreMismatch as error:
            raise StoreMismatch(
                f"the archive {self._name} comes from a newer store than this release reads; update hicache"
            ) from error
        except (StoreCorrupt, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged("its record cannot be read") from error
        if not _makes_sense(identity, settings):
            raise self._damaged("its record makes no sense")
        return IdentityRecord(identity.identity, identity.page_sizes), settings

    def _truncated(self) -> StoreCorrupt:
        return StoreCorrupt(
            f"the archive {self._name} is cut short after {self.done_bytes} bytes; copy or export it anew"
        )

    def _damaged(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"the archive {self._name} is damaged: {what}; copy or export it anew")


def _makes_sense(identity: IdentityRecord, settings: Settings) -> bool:
    """Whether each field has its type and range: the checksum detects damage, not what another program wrote."""
    filters = [format.filter for format in settings.formats]
    shapes = (number for filter in filters for number in (filter.element_bytes, filter.tokens, filter.channels))
    numbers = (*identity.page_sizes, settings.budget_bytes, settings.level, *shapes)
    texts = (settings.durability, *(filter.kind for filter in filters), *identity.identity)
    return (
        bool(identity.identity)
        and all(type(value) in (str, int) for value in identity.identity.values())
        and all(type(number) is int and 0 <= number <= INT64_MAX for number in numbers)
        and all(isinstance(text, str) for text in texts)
    )
