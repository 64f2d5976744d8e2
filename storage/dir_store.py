"""Pages in a directory that several machines mount: one file a page, without an index and without locks.

    DIR/hicache/NAMESPACE/identity.json     the identity, for operators
    DIR/hicache/NAMESPACE/ab/cd/NAME        a page; NAME is its key in hex, or for long keys a digest; abcd begins the
                                            SHA-256 of the key
      [0, 4096)   key and header of the value (slot_file.SlotBlock, sequence 0)
      [4096, n)   payload, then zeros up to a multiple of 4096
    DIR/hicache/NAMESPACE/ab/cd/.NAME.RANDOM.new        a page that is being written
    DIR/hicache/NAMESPACE/leases/ab/DIGEST.BEFORE       the end of a lease, in seconds since 1970

A writer writes a page to a temporary file and publishes it under its final name with `link`. So a reader never sees a
part of a page, and the first of several writers of a page wins. A killed writer leaves a file that ends in .new.
`hicache store prune` removes these files, and evicts pages above the budget. A page that a power failure damaged fails
verification and is a miss. The modification time of a file is the last use of its page, updated at most once an hour.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreUnavailable, opening_error
from hicache.storage.directory import NEW_SUFFIX
from hicache.storage.header import HEADER_BYTES, HeaderAndPayload, page_bytes_of, parse_header
from hicache.storage.memory import ALIGNMENT, Scratch, round_up
from hicache.storage.remote import RemotePageStore
from hicache.storage.slot_file import BLOCK_BYTES, SlotBlock, drop_front, is_aligned
from hicache.storage.store_url import StoreUrl

FOLDER, IDENTITY_FILE, LEASES = "hicache", "identity.json", "leases"
_MAX_NAMED_KEY_BYTES = 100  # longer keys would exceed the length of a file name
_TOUCH_S = 3600.0
_MAX_TOUCHED = 1 << 16
_MAX_LEASE_CHARS, _MAX_END_S = 32, 1e12  # a file with other text is no lease
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_blocks, _payloads = Scratch(), Scratch()


class _Stored(NamedTuple):
    """The key and the value in a file, or the reason why the file has no valid page."""

    key: bytes
    header: bytes
    payload: memoryview
    reason: str = ""

    @classmethod
    def refused(cls, reason: str) -> _Stored:
        return cls(b"", b"", memoryview(b""), reason)


class DirPageStore(RemotePageStore):
    """A `PageStore` with `Leases` in a directory of a file system that several machines mount; docs/remote.md has the
    options.

    The directory must exist, because the directory of an unmounted file system would otherwise look like an empty
    store. New files and folders get the permissions of the directory. A file that another machine removes during a call
    is a miss.
    """

    def __init__(self, url: str, /, **about: Any) -> None:
        at = StoreUrl.parse(url)
        options = directory_options(at)
        super().__init__(str(at), level=options["level"], **about)
        self._root = shared_folder(at.path) / self._namespace
        self._touched = OrderedDict[bytes, float]()  # time of the last touch of each key
        try:
            self._mode = os.stat(at.path).st_mode
            for folder in (self._root.parent, self._root):
                self._make_folder(folder)
            self._record_identity(about["identity"])
        except OSError as error:
            raise opening_error(f"the directory {at.path}", error) from error
        self._pool = ThreadPoolExecutor(options["concurrency"], thread_name_prefix="hicache-dir")
        # a second pool, so that no look-up waits for the reads and writes that are queued in the first one
        self._find_pool = ThreadPoolExecutor(options["concurrency"], thread_name_prefix="hicache-dir-find")

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        def look(key: bytes) -> bool:
            return bool(os.stat(self._file(key)))

        return self._each(look, keys, deadline_s, is_read=True, pool=self._find_pool)

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        def get(n: int) -> bool:
            stored = self._read(keys[n], buffers[n])
            return stored is not None and self._decode(keys[n], stored.header, stored.payload, buffers[n])

        return self._each(get, range(len(keys)), deadline_s, is_read=True)

    def _fetch_value(self, key: bytes) -> bytes | None:
        found: list[bytes] = []

        def get(key: bytes) -> bool:
            if (stored := self._read(key)) is not None:
                found.append(stored.header + bytes(stored.payload))
            return True

        self._each(get, [key], math.inf, is_read=True)
        return found[0] if found else None

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        def put(key: bytes) -> bool:
            return self._is_present(key) or self._write(key, self._encode(key, pages[key], lag))

        return self._each(put, list(pages), deadline_s, is_read=False)

    def _send_values(self, values: Mapping[bytes, bytes | memoryview]) -> list[bool]:
        def put(key: bytes) -> bool:
            return self._is_present(key) or self._write(key, HeaderAndPayload.of(values[key]))

        return self._each(put, list(values), math.inf, is_read=False)

    def _remove(self, keys: Sequence[bytes]) -> int:
        def remove(key: bytes) -> bool:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file(key))
                return True
            return False

        return sum(self._each(remove, list(dict.fromkeys(keys)), math.inf, is_read=False))

    def _note_used(self, keys: Sequence[bytes]) -> None:
        now_s = time.time()
        due = [key for key in keys if now_s - self._touched.get(key, 0.0) > _TOUCH_S]
        self._touched.update((key, now_s) for key in due)
        while len(self._touched) > _MAX_TOUCHED:
            self._touched.popitem(last=False)
        self._each(self._is_present, due, math.inf, is_read=True)

    def begin(self, key: bytes, until_s: float) -> bool:
        self._require([key])
        begun = self._each(lambda key: self._begin(key, until_s), [key], math.inf, is_read=False, pool=self._find_pool)
        return begun == [True]

    def who(self, key: bytes) -> float | None:
        self._require([key])
        found: list[float] = []

        def look(key: bytes) -> bool:
            found.append(self._last_lease(key)[1])
            return True

        self._each(look, [key], math.inf, is_read=True, pool=self._find_pool)
        return found[0] if found and found[0] > time.time() else None

    def _begin(self, key: bytes, until_s: float) -> bool:
        file, held_s = self._last_lease(key)
        if held_s > time.time() or until_s <= held_s:
            return False
        for folder in (self._root / LEASES, Path(file).parent):
            self._make_folder(folder)
        new = Path(_unpublished(file))
        try:
            new.write_text(f"{until_s:.3f}")
            new.chmod(self._mode & 0o666)
            return _publish(str(new), file)
        finally:
            new.unlink(missing_ok=True)

    def _last_lease(self, key: bytes) -> tuple[str, float]:
        """Return the file name of the next lease of a key, and the end of the last lease of this key; 0 if the key
        never had a lease. The name of a lease contains the end of the previous lease, so only one machine can follow an
        expired lease."""
        digest, end_s = hashlib.sha256(key).hexdigest(), 0.0
        while True:
            file = f"{self._root}/{LEASES}/{digest[:2]}/{digest}.{end_s:.3f}"
            try:
                with open(file, errors="replace") as lease:
                    text = lease.read(_MAX_LEASE_CHARS)
            except FileNotFoundError:
                return file, end_s
            with contextlib.suppress(ValueError):
                if end_s < float(text) < _MAX_END_S:
                    end_s = float(text)
                    continue
            return file, end_s

    def _disconnect(self) -> None:
        self._pool.shutdown()
        self._find_pool.shutdown()

    def _each(
        self,
        do: Callable[[Any], bool],
        items: Sequence[Any],
        deadline_s: float,
        *,
        is_read: bool,
        pool: ThreadPoolExecutor | None = None,
    ) -> list[bool]:
        """Call `do` for each item in parallel, in the threads of `pool`. Returns False for each item that fails. When
        reading, an absent file is a miss and not a failure."""

        def attempt(item: Any) -> bool | Exception:
            if time.monotonic() >= deadline_s:
                return TimeoutError("the deadline has passed")
            try:
                return do(item)
            except OSError as error:
                return False if is_read and error.errno in (errno.ENOENT, errno.ESTALE) else error

        return self._answers(list((pool or self._pool).map(attempt, items)), is_read=is_read)

    def _file(self, key: bytes) -> str:
        return f"{self._root}/{file_of(key)}"

    def _is_present(self, key: bytes) -> bool:
        """Return whether the page has a file, and record a use of the page."""
        file = self._file(key)
        try:
            _touch(file, os.stat(file).st_mtime)
        except FileNotFoundError:
            return False
        return True

    def _read(self, key: bytes, page: PageBuffer | None = None) -> _Stored | None:
        """Read the value of a page key. Returns None, and counts a failure, if the file does not contain this value. A
        raw payload is read directly into `page` if `page` is aligned. Raises OSError."""
        file = self._file(key)
        stored = read_file(file, self._codecs.max_value_bytes - HEADER_BYTES, key, page)
        if stored.reason:
            self._refuse(key, stored.reason)
            return None
        return stored

    def _write(self, key: bytes, value: HeaderAndPayload) -> bool:
        """Write and publish a value; True also if another writer published the key first. Raises OSError."""
        file = self._file(key)
        folder, new = os.path.dirname(file), _unpublished(file)
        try:
            try:
                descriptor = _open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:
                for missing in (Path(folder).parent, Path(folder)):
                    self._make_folder(missing)
                descriptor = _open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)):
                os.fchmod(descriptor, self._mode & 0o666)
                _transfer(os.pwritev, descriptor, _aligned_parts(SlotBlock(key, 0, value.header), value.payload))
            is_first = _publish(new, file)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(new)
        if is_first:
            self._written(page_bytes_of(value.header), len(value))
        return True

    def _make_folder(self, folder: Path) -> None:
        """Create a folder whose parent exists, with the permissions of the store's directory."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(self._mode & 0o2777)

    def _record_identity(self, identity: Mapping[str, str | int]) -> None:
        file = self._root / IDENTITY_FILE
        if not file.exists():
            new = Path(_unpublished(str(file)))
            new.write_text(json.dumps(dict(identity), sort_keys=True))
            new.chmod(self._mode & 0o666)
            new.replace(file)


def file_of(key: bytes) -> str:
    """Return the path of the file of a page, relative to the folder of its namespace."""
    digest = hashlib.sha256(key).hexdigest()
    name = key.hex() if len(key) <= _MAX_NAMED_KEY_BYTES else f"sha256-{digest}"
    return f"{digest[:2]}/{digest[2:4]}/{name}"


def directory_options(at: StoreUrl) -> dict[str, Any]:
    """Return the options in the URL of a directory. Raises StoreError if the URL or an option is invalid."""
    if at.host or at.path in ("", "/") or at.user or at.password:
        raise StoreError("a URL of a directory names it by its absolute path: dir:///mnt/shared/kv")
    return at.options(level=1, concurrency=8)


def shared_folder(path: str) -> Path:
    """Return the folder of all namespaces in the directory `path`. Raises StoreUnavailable if the directory does not
    exist."""
    if not os.path.isdir(path):
        raise StoreUnavailable(f"the directory {path} does not exist; mount it, or create it")
    return Path(path) / FOLDER


def read_file(file: str, max_payload_bytes: int, key: bytes | None = None, page: PageBuffer | None = None) -> _Stored:
    """Read a file of a page. The payload is valid until the same thread reads the next file. The payload lies in `page`
    if the length and the alignment of `page` allow it. `key`: the key of the expected page; the call records a use of
    this page. If `key` is None, any page is accepted, and no use is recorded. Raises OSError."""
    block = _blocks.take(BLOCK_BYTES)[:BLOCK_BYTES]
    descriptor = _open(file, os.O_RDONLY)
    try:
        about = os.fstat(descriptor)
        room_bytes = about.st_size - BLOCK_BYTES
        if not 0 <= room_bytes <= round_up(max_payload_bytes):
            return _Stored.refused(f"file of {about.st_size} bytes")
        is_direct = page is not None and room_bytes == len(page) and is_aligned(page)
        target = page.data if is_direct and page is not None else _payloads.take(room_bytes)[: round_up(room_bytes)]
        done = _transfer(os.preadv, descriptor, [block, target])
    finally:
        os.close(descriptor)
    found, fields = SlotBlock.unpack(block), parse_header(b"")
    if found is not None:
        fields = parse_header(found.header)
    if done < BLOCK_BYTES or found is None or (key is not None and found.key != key):
        return _Stored.refused("its file has no page, or the page of another key")
    if isinstance(fields, str) or room_bytes != round_up(fields.stored_bytes) or done < about.st_size:
        return _Stored.refused(fields if isinstance(fields, str) else f"file of {about.st_size} bytes")
    if key is not None:
        _touch(file, about.st_mtime)
    payload = target[: fields.stored_bytes]
    if is_direct and fields.stored_bytes != room_bytes:  # payload must not lie in `page` for decoding
        payload = memoryview(bytes(payload))
    return _Stored(found.key, found.header, payload)


def _unpublished(file: str) -> str:
    """Return a file name in the folder of `file` that no other writer uses."""
    folder, name = os.path.split(file)
    return f"{folder}/.{name}.{secrets.token_hex(8)}{NEW_SUFFIX}"


def _touch(file: str, modified_s: float) -> None:
    """Set the modification time of a file to now, unless it is less than an hour old. Does nothing without the
    permission."""
    if time.time() - modified_s > _TOUCH_S:
        with contextlib.suppress(OSError):
            os.utime(file)


def _open(file: str, flags: int) -> int:
    """Open a file, for direct access (O_DIRECT) if its file system supports this."""
    try:
        return os.open(file, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        if flags & os.O_CREAT:
            with contextlib.suppress(FileNotFoundError):  # some file systems create the file before they refuse
                os.unlink(file)
        return os.open(file, flags | os.O_CLOEXEC, 0o600)


def _transfer(call: Callable[..., int], descriptor: int, parts: Sequence[memoryview]) -> int:
    """Read or write all parts from the start of a file. Returns the number of bytes read or written; a read that
    reaches the end of the file returns less than the length of the parts."""
    done, left = 0, [part for part in parts if len(part)]
    while left:
        try:
            moved = call(descriptor, left, done)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno not in _NO_DIRECT or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if not moved:
            break
        done += moved
        drop_front(left, moved)
    return done


def _aligned_parts(block: SlotBlock, payload: memoryview) -> list[memoryview]:
    """Return the content of a file in aligned memory, as parts to write. A payload that is already in aligned memory is
    not copied, except for its end."""
    address = np.frombuffer(payload, np.uint8).ctypes.data if len(payload) else 0
    body = payload[: 0 if address % ALIGNMENT else len(payload) // ALIGNMENT * ALIGNMENT]
    rest = payload[len(body) :]
    end_bytes = round_up(len(rest))
    memory = _payloads.take(BLOCK_BYTES + end_bytes)
    memory[:BLOCK_BYTES] = block.pack()
    memory[BLOCK_BYTES : BLOCK_BYTES + len(rest)] = rest
    memory[BLOCK_BYTES + len(rest) : BLOCK_BYTES + end_bytes] = bytes(end_bytes - len(rest))
    return [memory[:BLOCK_BYTES], body, memory[BLOCK_BYTES : BLOCK_BYTES + end_bytes]]


def _publish(new: str, file: str) -> bool:
    """Publish a complete file under its final name. Returns False if another writer was first. On a file system without
    links the file is renamed; then the last of several writers of a page wins."""
    try:
        os.link(new, file)
    except FileExistsError:
        # If the answer of an NFS server is lost, the client repeats the call, which then finds its own link.
        return os.stat(new).st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(new, file)
    return True
