"""The archive of a store: a tar file, to be moved to another machine.

    manifest.json   what the store says of itself: the content of its store.json (docs/disk_format.md)
    KEY             one member a page, least recently used first: its value, as it is stored; KEY is in hexadecimal
    end.json        {"pages": N}: an archive without it is cut

Each value has its own checksum, with its key, so only a damaged one is refused. No length is trusted: a value has at
most the length of the largest page with its overhead.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from hicache.storage.base import StoreCorrupt, StoreError, StoreMismatch
from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.header import HEADER_BYTES
from hicache.storage.records import StoreRecord

_MANIFEST, _END = "manifest.json", "end.json"
_MAX_RECORD_BYTES = 1 << 20
_MAX_KEY_BYTES = 511
_MAX_NAME_BYTES = 2 * _MAX_KEY_BYTES + 1  # a key in hexadecimal, and the zero behind it


class ArchiveWriter:
    """Writes an archive to `file`, which is unbuffered; `name` is for messages. One thread.

    StoreError when writing fails, BrokenPipeError when nobody reads a pipe any more. Without `finish` it is cut.
    """

    def __init__(self, file: io.RawIOBase, name: str, record: StoreRecord) -> None:
        self._name, self._file = name, _Whole(file)
        self._tar = tarfile.open(fileobj=self._file, mode="w|", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self.num_entries = 0
        self._add(_MANIFEST, record.pack())

    @property
    def written_bytes(self) -> int:
        return self._file.num_bytes

    def add(self, key: bytes, value: bytes) -> None:
        self._add(key.hex(), value)
        self.num_entries += 1

    def finish(self) -> None:
        self._add(_END, json.dumps({"pages": self.num_entries}).encode())
        with self._writing():
            self._tar.close()

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o600
        with self._writing():
            self._tar.addfile(member, io.BytesIO(content))
        self._tar.members = []  # type: ignore[attr-defined]  # it would grow with every page

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot write the archive {self._name}: {error.strerror}; free space or choose another file"
            ) from error


class ArchiveReader:
    """Reads the archive in `file`: whose pages they are, and the pages once, in order. One thread.

    The constructor reads the manifest. Raises `StoreCorrupt` for what is no archive, is cut or damaged, `StoreMismatch`
    for a newer format, `StoreError` if reading fails.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = _Counted(file), name
        first: tuple[str, bytes] | None = None
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r|", tarinfo=_Header)  # noqa: SIM115
            first = self._next(_MAX_RECORD_BYTES)
        except (StoreCorrupt, tarfile.TarError) as error:
            raise self._no_archive() from error
        except OSError as error:
            raise self._unreadable(error) from error
        if first is None or first[0] != _MANIFEST:
            raise self._no_archive()
        self.record = self._manifest(first[1])

    @property
    def done_bytes(self) -> int:
        return self._file.num_bytes

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values, not verified; an incomplete archive raises where that shows, at the latest at the end."""
        max_value_bytes = self.record.page_sizes[-1] + HEADER_BYTES + ENCRYPTION_BYTES
        num_entries = 0
        while True:
            try:
                found = self._next(max_value_bytes)
            except tarfile.TarError as error:
                raise self._cut() from error
            except OSError as error:
                raise self._unreadable(error) from error
            if found is None:
                raise self._cut()
            name, content = found
            if name == _END:
                if content != json.dumps({"pages": num_entries}).encode():
                    raise self._damaged(f"it has {num_entries} pages and states {content[:40]!r}")
                return
            yield self._key(name), content
            num_entries += 1

    def _next(self, max_bytes: int) -> tuple[str, bytes] | None:
        """Name and content of the next member; None at the end."""
        try:
            member = self._tar.next()
        except (ValueError, OverflowError) as error:  # numbers in a header that are none
            raise self._damaged(str(error)) from error
        self._tar.members = []  # type: ignore[attr-defined]
        if member is None:
            return None
        file = self._tar.extractfile(member) if member.isfile() else None
        if file is None or member.size > max_bytes:
            raise self._damaged(f"the member {member.name[:80]!r} has {member.size} bytes")
        content = file.read()
        if len(content) < member.size:
            raise self._cut()
        return member.name, content

    def _key(self, name: str) -> bytes:
        try:
            key = bytes.fromhex(name)
        except ValueError:
            key = b""
        if not 1 <= len(key) <= _MAX_KEY_BYTES or key.hex() != name:
            raise self._damaged(f"{name[:80]!r} is no key")
        return key

    def _manifest(self, content: bytes) -> StoreRecord:
        try:
            return StoreRecord.unpack(self._name, content)
        except StoreMismatch as error:
            raise StoreMismatch(
                f"the archive {self._name} comes from a newer store than this release reads; update hicache"
            ) from error
        except StoreCorrupt as error:
            raise self._damaged("its manifest cannot be read") from error

    def _no_archive(self) -> StoreCorrupt:
        return StoreCorrupt(f"{self._name} is no archive of a store; give a file that `hicache store export` wrote")

    def _cut(self) -> StoreCorrupt:
        return StoreCorrupt(
            f"the archive {self._name} is cut short or damaged after {self.done_bytes} bytes; copy or export it anew"
        )

    def _damaged(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"the archive {self._name} is damaged: {what}; copy or export it anew")

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"cannot read the archive {self._name}: {error.strerror}; check the disk")


class _Header(tarfile.TarInfo):
    """A header that an archive has: of a file, or of a long name before it. Others state lengths of their own, and
    tarfile reads what follows them whole."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        is_name = self.type == tarfile.GNUTYPE_LONGNAME and self.size <= _MAX_NAME_BYTES
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and not is_name:
            raise tarfile.ReadError(f"a header of type {self.type!r} and {self.size} bytes")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found


class _Whole(io.RawIOBase):
    """An unbuffered file that is written whole, and counted. After an error, or when it is closed, it takes nothing: a
    tar stream that is given up still writes its end."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file, self.num_bytes, self._failed = file, 0, False

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(b"" if self._failed or self._file.closed else data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._failed = True
            raise
        self.num_bytes += len(data)
        return len(data)


class _Counted(io.RawIOBase):
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data
