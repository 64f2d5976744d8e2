"""The commands of an operator for stores that several machines share: list, verify, remove, keep a budget.

    dir://   the last use of a page is the modification time of its file, exact to an hour
    s3://    S3 records no uses, so the last use of a page is the time at which the page was stored

These commands need no identity and no encryption key. A value is verified by the checksum over its stored bytes, and by
the namespace in its header.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import StoreError, StoreLocked, opening_error
from hicache.storage.dir_store import (
    FOLDER,
    IDENTITY_FILE,
    LEASES,
    directory_options,
    file_of,
    read_file,
    shared_folder,
)
from hicache.storage.directory import NEW_SUFFIX
from hicache.storage.header import HEADER_BYTES, MAX_PAGE_BYTES, parse_header, read_header
from hicache.storage.remote import DIGEST_PREFIX
from hicache.storage.s3_store import S3Bucket
from hicache.storage.store_url import StoreUrl, scheme_of

_LOCK_FILE = "prune.lock"
_HOUR_S, _DAY_S = 3600.0, 86400.0
_REMOVES_AT_ONCE = 1000


@dataclass(frozen=True)
class SharedPage:
    """A page of a shared store. `key`: the page key; None if the name has only a digest of the key. `name`: name of the
    file or object. `num_bytes`: size of the file or object. `used_s`: time of the last use, in seconds since 1970."""

    namespace: str
    key: bytes | None
    name: str
    num_bytes: int
    used_s: float


@dataclass(frozen=True)
class PruneReport:
    """Number and bytes of the removed pages, and of the pages that are left."""

    removed: int
    removed_bytes: int
    left: int
    left_bytes: int


class SharedPages(ABC):
    """The pages of all identities in one shared store; one thread. Methods raise StoreError or OSError."""

    @abstractmethod
    def pages(self) -> Iterator[SharedPage]:
        """Yield every page, in no order."""

    @abstractmethod
    def identity(self, namespace: str) -> dict[str, Any] | None:
        """Return the identity of a namespace; None if the store does not record the identity."""

    @abstractmethod
    def remove(self, pages: Sequence[SharedPage]) -> int:
        """Remove pages. Return the number of pages that were present."""

    @abstractmethod
    def _value(self, page: SharedPage) -> tuple[bytes, bytes, memoryview] | str | None:
        """Return key, header and payload of a page. Return the reason if the page cannot be read, and None if the page
        is absent or cannot be verified."""

    @contextlib.contextmanager
    def pruning(self) -> Iterator[None]:
        """Prevent other prunes of this store on any machine until the `with` block ends. Raises StoreLocked if another
        prune is running."""
        yield

    def fault(self, page: SharedPage) -> str:
        """Read and verify a page. Returns the fault, or "" if the page is valid or was removed during the call."""
        found = self._value(page)
        if found is None or isinstance(found, str):
            return found or ""
        key, header, payload = found
        fields = parse_header(header)
        if isinstance(fields, str):
            return fields
        if not fields.namespace.hex().startswith(page.namespace):
            return "another namespace"
        read = read_header(key, header, payload, fields.raw_bytes, fields.namespace)
        return read if isinstance(read, str) else ""

    def prune(self, budget_bytes: int) -> PruneReport:
        """Remove the least recently used pages until the remaining pages need at most `budget_bytes`. Times of use are
        exact to an hour. Of the pages used in the same hour, the pages stored last are removed first, because the end
        of a prompt is useless without its beginning."""
        with self.pruning():
            found = sorted(self.pages(), key=lambda page: (page.used_s // _HOUR_S, -page.used_s))
            excess_bytes = sum(page.num_bytes for page in found) - budget_bytes
            removed = list[SharedPage]()
            for page in found:
                if excess_bytes <= 0:
                    break
                removed.append(page)
                excess_bytes -= page.num_bytes
            for start in range(0, len(removed), _REMOVES_AT_ONCE):
                self.remove(removed[start : start + _REMOVES_AT_ONCE])
        left = found[len(removed) :]
        removed_bytes, left_bytes = (sum(page.num_bytes for page in some) for some in (removed, left))
        return PruneReport(len(removed), removed_bytes, len(left), left_bytes)


def shared_pages(url: str) -> SharedPages:
    """Return the pages of the shared store at `url`. Raises StoreError if this kind of store cannot list its pages."""
    scheme, at = scheme_of(url), StoreUrl.parse(url)
    if scheme == "dir":
        directory_options(at)
        return DirPages(at.path)
    if scheme == "s3":
        return S3Pages(S3Bucket(at))
    if scheme == "mooncake":
        raise StoreError(
            "Mooncake lists no pages, and evicts by itself; the metrics of its master (--metrics_port) have the sizes"
        )
    raise StoreError(f"a store of {scheme}:// cannot list its pages; give dir:// or s3://, or the directory of a disk")


class DirPages(SharedPages):
    """The pages in the directory `path`. A reader that has the file of a page open can still read the page after it is
    removed."""

    def __init__(self, path: str) -> None:
        self._folder = shared_folder(path)

    def pages(self) -> Iterator[SharedPage]:
        for namespace, entry in self._files():
            if not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat()
                    yield SharedPage(namespace, _key_of(entry.name), entry.path, about.st_size, about.st_mtime)

    def identity(self, namespace: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / namespace / IDENTITY_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remove(self, pages: Sequence[SharedPage]) -> int:
        return sum(map(_unlink, (page.name for page in pages)))

    @contextlib.contextmanager
    def pruning(self) -> Iterator[None]:
        """Prevent other prunes as the base class does. Also remove leases, and unpublished files of killed writers,
        that are older than a day."""
        file = self._folder / _LOCK_FILE
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # no server has stored a page yet
            yield
            return
        except OSError as error:
            raise opening_error(f"the lock {file}", error) from error
        try:
            with contextlib.suppress(PermissionError):  # another user has created the file
                os.fchmod(descriptor, self._folder.stat().st_mode & 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_leftovers()
            yield
        except BlockingIOError:
            raise StoreLocked(f"another `hicache store prune` of {self._folder} is running; wait for its end") from None
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        before_s = time.time() - _DAY_S
        leases: dict[Path, list[Path]] = {}
        for file in self._folder.glob(f"*/{LEASES}/*/*"):
            # the earlier leases of a key lead to its last lease, so all of them are removed together
            leases.setdefault(file.with_name(file.name.lstrip(".").partition(".")[0]), []).append(file)
        unpublished = ([Path(entry)] for _, entry in self._files() if entry.name.endswith(NEW_SUFFIX))
        for files in (*leases.values(), *unpublished):
            with contextlib.suppress(FileNotFoundError):
                if max(file.stat().st_mtime for file in files) < before_s:
                    for file in files:
                        file.unlink()

    def _value(self, page: SharedPage) -> tuple[bytes, bytes, memoryview] | str | None:
        try:
            found = read_file(page.name, MAX_PAGE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if not found.reason and not page.name.endswith(f"/{file_of(found.key)}"):
            return "the page of another key"
        return found.reason or (found.key, found.header, found.payload)

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield each file of each namespace, with the name of the namespace. The files lie two levels of folders
        deep."""
        for namespace in filter(Path.is_dir, self._folder.glob("*")):
            for folder in namespace.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]"):
                with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                    for entry in entries:
                        yield namespace.name, entry


class S3Pages(SharedPages):
    """The pages in a bucket, below the prefix of the URL."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def pages(self) -> Iterator[SharedPage]:
        for name, num_bytes, stored_s in self._bucket.objects(f"{FOLDER}/"):
            parts = name.split("/")
            if len(parts) == 3:
                yield SharedPage(parts[1], _decoded(parts[2]), name, num_bytes, stored_s)

    def identity(self, namespace: str) -> dict[str, Any] | None:
        return None

    @contextlib.contextmanager
    def pruning(self) -> Iterator[None]:
        """Remove leases older than a day. S3 has no locks, so concurrent prunes are not prevented; they remove the same
        pages."""
        before_s = time.time() - _DAY_S
        found = self._bucket.objects(f"{FOLDER}/")
        self._bucket.delete([name for name, _, s in found if name.count("/") == 3 and s < before_s])
        yield

    def remove(self, pages: Sequence[SharedPage]) -> int:
        self._bucket.delete([page.name for page in pages])
        return len(pages)

    def _value(self, page: SharedPage) -> tuple[bytes, bytes, memoryview] | str | None:
        if page.key is None:  # the checksum cannot be verified without the key
            return None if page.name.rpartition("/")[2].startswith(DIGEST_PREFIX) else "its name is no key"
        value = self._bucket.get(page.name)
        return None if value is None else (page.key, bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:])


def _key_of(name: str) -> bytes | None:
    with contextlib.suppress(ValueError):
        return bytes.fromhex(name)
    return None


def _decoded(text: str) -> bytes | None:
    with contextlib.suppress(ValueError):  # b64decode would skip characters such as "."
        if not re.fullmatch(r"[\w-]+", text, re.ASCII):
            return None
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return None


def _unlink(file: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
        return True
    return False
