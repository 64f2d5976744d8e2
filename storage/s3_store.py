"""Pages in a bucket of S3 or of a server that speaks its protocol: objects `PREFIX/hicache/NAMESPACE/KEY`.

The client is obstore (Rust, without dependencies of its own); docs/decisions/037-remote-clients.md says why. S3 evicts
nothing and has no order of use: a lifecycle rule of the bucket bounds what it keeps, by age.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat
from hicache.storage.header import HEADER_BYTES
from hicache.storage.remote import RemotePageStore

_MAX_RETRIES = 1  # for a kept connection that the server has closed meanwhile


class S3PageStore(RemotePageStore):
    """See `PageStore`; `touch` does nothing.

    `endpoint`: the URL of a server, "" for AWS. `region` "" is that of the environment. Credentials are those of the
    environment or of the machine, as obstore finds them. `timeout_s` bounds one request, and `concurrency` how many are
    under way: a call past its deadline begins none, and ends when those under way have. Present keys keep their object
    where the server knows conditional writes, as AWS, MinIO and Ceph do; others overwrite it by one of the same key.
    Opening connects to nothing: a server that cannot be reached is one that misses, and is counted.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        level: int = 1,
        cipher: PageCipher | None = None,
        endpoint: str = "",
        region: str = "",
        timeout_s: float = 10.0,
        concurrency: int = 16,
    ) -> None:
        if timeout_s <= 0 or concurrency < 1:
            raise StoreError(f"{timeout_s=}, {concurrency=}: one of them is out of range")
        super().__init__(f"s3://{bucket}/{prefix}", identity=identity, formats=formats, level=level, cipher=cipher)
        try:
            self._client: Any = importlib.import_module("obstore")
            self._errors: Any = importlib.import_module("obstore.exceptions")
            s3: Any = importlib.import_module("obstore.store").S3Store
        except ImportError:
            raise StoreError("pages in S3 need the package obstore: pip install 'hicache[s3]'") from None
        limit = timedelta(seconds=timeout_s)
        chosen = {"endpoint": endpoint, "region": region, "prefix": prefix}
        self._bucket = s3(
            bucket,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": endpoint.startswith("http:")},
            retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": limit},
            **{name: value for name, value in chosen.items() if value},
        )
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="hicache-s3")

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        def look(n: int) -> bool:
            self._client.head(self._bucket, self._name(keys[n], "/"))
            return True

        return self._read(look, len(keys), deadline_s)

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        def get(n: int) -> bool:
            answer = self._client.get(self._bucket, self._name(keys[n], "/"))
            value_bytes = answer.meta["size"]
            if not HEADER_BYTES <= value_bytes <= self._codecs.max_value_bytes:
                self._refuse(keys[n], f"value of {value_bytes} bytes")
                return False
            value = memoryview(answer.bytes())
            return self._decode(keys[n], bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:], buffers[n])

        return self._read(get, len(keys), deadline_s)

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        keys = list(pages)

        def put(n: int) -> bool:
            page = pages[keys[n]]
            value = self._encode(keys[n], page, lag)
            parts, name = [value.header, value.payload], self._name(keys[n], "/")
            try:
                self._client.put(self._bucket, name, parts, mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError:
                return True
            self._written(len(page), len(value))
            return True

        stored, errors = self._each(put, len(keys), deadline_s)
        if errors:
            self._failed(errors[0], writes=len(errors))
        return stored

    def _remove(self, keys: Sequence[bytes]) -> int:
        present = [key for key, held in zip(keys, self._exist(keys, math.inf), strict=True) if held]
        names = [self._name(key, "/") for key in dict.fromkeys(present)]
        removed, errors = self._each(lambda _: self._client.delete(self._bucket, names) is None, 1, math.inf)
        if errors:
            self._failed(errors[0], writes=len(names))
        return len(names) if all(removed) else 0

    def _disconnect(self) -> None:
        self._pool.shutdown()

    def _read(self, request: Callable[[int], bool], num_requests: int, deadline_s: float) -> list[bool]:
        """`_each`, where an object that is not there is no failure."""

        def attempt(n: int) -> bool:
            try:
                return request(n)
            except FileNotFoundError:
                return False

        found, errors = self._each(attempt, num_requests, deadline_s)
        if errors:
            self._failed(errors[0], reads=len(errors))
        return found

    def _each(
        self, request: Callable[[int], bool], num_requests: int, deadline_s: float
    ) -> tuple[list[bool], list[Exception]]:
        """What `request` says for 0, 1, ..., in parallel; False, and the error, where it raises."""
        failures = (OSError, self._errors.BaseError)

        def attempt(n: int) -> bool | Exception:
            try:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError("the deadline has passed")
                return request(n)
            except failures as error:
                return error

        said = list(self._pool.map(attempt, range(num_requests)))
        return [answer is True for answer in said], [answer for answer in said if isinstance(answer, Exception)]
