"""Pages in a bucket of S3, or of a server with the protocol of S3, as objects `PREFIX/hicache/NAMESPACE/KEY`.

The client is obstore (Rust, no dependencies); docs/decisions/037-remote-clients.md explains why. S3 does not evict and
has no order of use: a lifecycle rule of the bucket, or `hicache store prune`, removes the oldest pages.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.header import HEADER_BYTES, HeaderAndPayload, page_bytes_of
from hicache.storage.remote import RemotePageStore, first_line
from hicache.storage.store_url import StoreUrl

LEASES = "leases"  # the folder of leases in a namespace
_MAX_LEASE_BYTES, _MAX_END_S = 32, 1e12  # an object with other content is no lease
_MAX_RETRIES = 1  # one retry, because the server may have closed a reused connection
_NO_CREDENTIALS = "no credentials, nor a role of the machine; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_PANIC_REMEDY = "check bucket and region, and AWS_* in the environment"
# Maps text in an error message of the client to a message with cause and remedy. The texts are error codes of the
# server, and the URL paths at which an AWS machine requests the credentials of its role.
_CAUSES = {
    "<Code>NoSuchBucket<": "its bucket does not exist; create it",
    "/latest/api/token": _NO_CREDENTIALS,
    "/latest/meta-data/iam/": _NO_CREDENTIALS,
}


class S3Bucket:
    """A client of the bucket of a URL, `s3://bucket/prefix?options`. Names of objects are relative to the prefix. Any
    thread may call the methods. `options`: the options in the URL. The constructor does not connect, and raises
    StoreError if the URL or an option is invalid."""

    def __init__(self, at: StoreUrl) -> None:
        if not re.fullmatch(r"[\w.-]+", at.host, re.ASCII) or at.port or at.user or at.password:
            raise StoreError("a URL of S3 is s3://bucket/prefix?endpoint=..., with credentials in the environment")
        options = self.options = at.options(level=1, endpoint_url="", region="", timeout_s=10.0, concurrency=16)
        try:
            self.client: Any = importlib.import_module("obstore")
            self.errors: Any = importlib.import_module("obstore.exceptions")
            s3: Any = importlib.import_module("obstore.store").S3Store
        except ImportError:
            raise StoreError("pages in S3 need the package obstore of hicache[s3]: pip install 'hicache[s3]'") from None
        limit, endpoint = timedelta(seconds=options["timeout_s"]), options["endpoint_url"]
        chosen = {"endpoint": endpoint, "region": options["region"], "prefix": at.path.strip("/")}
        try:
            self.store: Any = s3(
                at.host,
                client_options={"timeout": limit, "connect_timeout": limit, "allow_http": endpoint.startswith("http:")},
                retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": limit},
                **{name: value for name, value in chosen.items() if value},
            )
        except (ValueError, self.errors.BaseError) as error:
            raise StoreError(f"cannot open {at}: {first_line(error)}") from None

    def objects(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Yield the name, the length in bytes and the time of the last change of each object below `prefix`. Raises
        StoreError."""
        with self._operating():
            for batch in self.client.list(self.store, prefix):
                for each in batch:
                    yield each["path"], each["size"], each["last_modified"].timestamp()

    def get(self, name: str) -> memoryview | None:
        """Return the content of an object; None if the object is absent. Raises StoreError."""
        with self._operating(), contextlib.suppress(FileNotFoundError):
            return memoryview(self.client.get(self.store, name).bytes())
        return None

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects. Raises StoreError."""
        with self._operating():
            if names:
                self.client.delete(self.store, list(names))

    @contextlib.contextmanager
    def _operating(self) -> Iterator[None]:
        """Convert errors of the client to StoreError, except the error for an absent object."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, self.errors.BaseError) as error:
            cause = next((cause for mark, cause in _CAUSES.items() if mark in str(error)), first_line(error))
            raise StoreError(f"the bucket cannot be used: {cause}") from None
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise StoreError(f"the bucket cannot be used: {error}; {_PANIC_REMEDY}") from None


class S3PageStore(RemotePageStore):
    """A `PageStore` with `Leases` in S3; docs/remote.md has the options of the URL.

    After its deadline, a call starts no request, and returns when its running requests have ended. A present key keeps
    its object if the server supports conditional writes, as AWS, MinIO, Ceph and SeaweedFS do; other servers overwrite
    the object with a page of the same key. Opening the store does not connect. If the server cannot be reached, reads
    are misses and count as read errors.
    """

    def __init__(self, url: str, /, **about: Any) -> None:
        at = StoreUrl.parse(url)
        opened = S3Bucket(at)
        super().__init__(str(at), level=opened.options["level"], **about)
        self._client, self._errors, self._bucket = opened.client, opened.errors, opened.store
        self._found_bucket = False
        self._pool = ThreadPoolExecutor(opened.options["concurrency"], thread_name_prefix="hicache-s3")
        # a second pool, so that no look-up waits for the reads and writes that are queued in the first one
        self._find_pool = ThreadPoolExecutor(opened.options["concurrency"], thread_name_prefix="hicache-s3-find")

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        def look(n: int) -> bool:
            name = self._name(keys[n], "/")
            try:
                self._client.head(self._bucket, name)
            except FileNotFoundError:
                if not self._found_bucket:
                    # the error of a GET shows whether the bucket is missing; the error of a HEAD does not
                    self._client.get(self._bucket, name)
                raise
            return True

        return self._each(look, len(keys), deadline_s, is_read=True, pool=self._find_pool)

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        def get(n: int) -> bool:
            value = self._download(keys[n])
            return value is not None and self._decode(
                keys[n], bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:], buffers[n]
            )

        return self._each(get, len(keys), deadline_s, is_read=True)

    def _fetch_value(self, key: bytes) -> bytes | None:
        found: list[memoryview | None] = []

        def get(_: int) -> bool:
            found.append(self._download(key))
            return True

        self._each(get, 1, math.inf, is_read=True)
        value = found[-1] if found else None
        return None if value is None else bytes(value)

    def _download(self, key: bytes) -> memoryview | None:
        """Return the object of a key. Returns None if the length of the object is not possible for a value."""
        answer = self._client.get(self._bucket, self._name(key, "/"))
        value_bytes = answer.meta["size"]
        if HEADER_BYTES <= value_bytes <= self._codecs.max_value_bytes:
            return memoryview(answer.bytes())
        self._refuse(key, f"value of {value_bytes} bytes")
        return None

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        return self._upload(list(pages), lambda key: self._encode(key, pages[key], lag), deadline_s)

    def _send_values(self, values: Mapping[bytes, bytes | memoryview]) -> list[bool]:
        return self._upload(list(values), lambda key: HeaderAndPayload.of(values[key]), math.inf)

    def _upload(
        self, keys: Sequence[bytes], value_of: Callable[[bytes], HeaderAndPayload], deadline_s: float
    ) -> list[bool]:
        def put(n: int) -> bool:
            value = value_of(keys[n])
            parts, name = [value.header, value.payload], self._name(keys[n], "/")
            try:
                self._client.put(self._bucket, name, parts, mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError:
                return True
            self._written(page_bytes_of(value.header), len(value))
            return True

        return self._each(put, len(keys), deadline_s, is_read=False)

    def _remove(self, keys: Sequence[bytes]) -> int:
        present = [key for key, held in zip(keys, self._exist(keys, math.inf), strict=True) if held]
        names = [self._name(key, "/") for key in dict.fromkeys(present)]

        def delete(_: int) -> bool:
            self._client.delete(self._bucket, names)
            return True

        return len(names) if all(self._each(delete, 1, math.inf, is_read=False)) else 0

    def begin(self, key: bytes, until_s: float) -> bool:
        self._require([key])
        name, body = self._lease(key), [repr(until_s).encode()]

        def put(_: int) -> bool:
            try:
                self._client.put(self._bucket, name, body, mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError:
                held = self._client.get(self._bucket, name)
                lease = _lease_in(held)
                if lease == body[0]:  # the client repeated the put because its answer was lost
                    return True
                if _until_s(lease) > time.time():
                    return False
                known = {"e_tag": held.meta["e_tag"]}  # replace only this expired lease
                try:
                    self._client.put(self._bucket, name, body, mode=known, use_multipart=False)
                except (self._errors.PreconditionError, self._errors.AlreadyExistsError):
                    return False
            return True

        return self._each(put, 1, math.inf, is_read=False, pool=self._find_pool) == [True]

    def who(self, key: bytes) -> float | None:
        self._require([key])
        found: list[float] = []

        def look(_: int) -> bool:
            found.append(_until_s(_lease_in(self._client.get(self._bucket, self._lease(key)))))
            return True

        self._each(look, 1, math.inf, is_read=True, pool=self._find_pool)
        return found[-1] if found and found[-1] > time.time() else None

    def _lease(self, key: bytes) -> str:
        folder, _, name = self._name(key, "/").rpartition("/")
        return f"{folder}/{LEASES}/{name}"

    def _disconnect(self) -> None:
        self._pool.shutdown()
        self._find_pool.shutdown()

    def _each(
        self,
        request: Callable[[int], bool],
        num: int,
        deadline_s: float,
        *,
        is_read: bool,
        pool: ThreadPoolExecutor | None = None,
    ) -> list[bool]:
        """Call `request` in parallel with the numbers 0 to `num` - 1, in the threads of `pool`. Returns False for each
        call that fails. When reading, an absent object counts as a miss, not as a failure."""

        def attempt(n: int) -> bool | Exception:
            if time.monotonic() >= deadline_s:
                return TimeoutError("the deadline has passed")
            try:
                return request(n)
            except (OSError, self._errors.BaseError) as error:
                cause = next((cause for mark, cause in _CAUSES.items() if mark in str(error)), None)
                if cause is None and is_read and isinstance(error, FileNotFoundError):
                    self._found_bucket = True
                    return False
                return StoreError(cause) if cause else error
            except BaseException as error:
                if not _is_panic(error):
                    raise
                return StoreError(f"{error}; {_PANIC_REMEDY}")

        return self._answers(list((pool or self._pool).map(attempt, range(num))), is_read=is_read)


def _is_panic(error: BaseException) -> bool:
    """Return whether the error is a panic of the Rust client, whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _lease_in(answer: Any) -> bytes:
    """Return the content of an object; b"" if it is too long for a lease, so that it is not downloaded."""
    return bytes(answer.bytes()) if answer.meta["size"] <= _MAX_LEASE_BYTES else b""


def _until_s(text: bytes) -> float:
    """Return the end time of a lease; 0 if the object is not a lease."""
    with contextlib.suppress(ValueError):
        if (until_s := float(text)) < _MAX_END_S:
            return until_s
    return 0.0
