"""An independent check of cached KV: digests of pages when they are computed, compared when the pages come back.

The audit reads pages from the device pool by `get_cpu_copy` while a lease protects them, in those layers that keep
every token; freed window slots cannot be read, and recurrent states are not pages. A page is identified by a digest of
its namespace and all tokens up to its end, never by a slot or a key of the store, so the comparison relies on nothing
that the cache itself maintains. With a sidecar file, the digests survive the process and are compared with what a later
one finds on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch

from hicache.device.base import COPY_CHUNK_TOKENS
from hicache.engine import CacheEngine, Lease
from hicache.errors import ConfigError

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class AuditCounts:
    """`compared`: pages from host or disk whose digest was known; `mismatched` of them differed from what was computed.
    `unrecorded`: pages from host, disk or remote tier without a known digest. `recorded`: pages computed here."""

    compared: int = 0
    mismatched: int = 0
    unrecorded: int = 0
    recorded: int = 0


class KVAudit:
    """The scheduler's `Auditor`. Called on the scheduler thread only. It owns the sidecar file until `close`.

    `identity`: model and dtype, which the digests cover in addition to the tokens. `sidecar`: a file that digests are
    appended to and earlier ones are read from; a last line that a killed process wrote half is dropped. `is_shared`:
    other processes store pages too, which they computed with other rounding; what they stored is known once it was
    seen. Raises ConfigError if the file cannot be used.
    """

    def __init__(
        self, engine: CacheEngine, identity: str, sidecar: Path | None = None, *, is_shared: bool = False
    ) -> None:
        self._engine = engine
        self._is_shared = is_shared
        self._seed = hashlib.blake2b(f"{identity}\0{engine.page_size}".encode(), digest_size=_DIGEST_BYTES).digest()
        # A page that was evicted from every tier is computed again with other rounding: any earlier digest is accepted.
        self._known: dict[bytes, set[bytes]] = {}
        self._file: IO[str] | None = None
        self._counts: Counter[str] = Counter()
        if sidecar is not None:
            self._file = self._open(sidecar)

    @property
    def counts(self) -> AuditCounts:
        return AuditCounts(**self._counts)

    def audit(self, lease: Lease, tokens: npt.NDArray[np.int64]) -> None:
        """Compare pages [hit.device, cached_len) of the lease and record pages [cached_len, last whole page)."""
        page_size = self._engine.page_size
        # Pages: [0, loaded) were on the device, [loaded, computed) were loaded, [computed, end) were computed.
        loaded, computed, end = (n // page_size for n in (lease.hit.device, lease.cached_len, len(tokens)))
        if loaded >= end:
            return
        keys = self._page_keys(lease.namespace, tokens[: end * page_size])
        self._engine.begin_forward([lease])
        digests = self._digests(lease.slots[loaded * page_size : end * page_size])
        for page, digest in zip(range(loaded, end), digests, strict=True):
            if page < computed:
                self._compare(keys[page], digest)
            else:
                self._record(keys[page], digest)
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _compare(self, key: bytes, digest: bytes) -> None:
        known = self._known.get(key)
        if known is None or (self._is_shared and digest not in known):
            self._counts["unrecorded"] += 1
            if self._is_shared:
                self._known.setdefault(key, set()).add(digest)
            return
        self._counts["compared"] += 1
        self._counts["mismatched"] += digest not in known

    def _record(self, key: bytes, digest: bytes) -> None:
        self._counts["recorded"] += 1
        known = self._known.setdefault(key, set())
        if digest not in known and self._file is not None:
            self._file.write(json.dumps({"page": key.hex(), "kv": digest.hex()}) + "\n")
        known.add(digest)

    def _page_keys(self, namespace: str, tokens: npt.NDArray[np.int64]) -> list[bytes]:
        """Chained digests: the key of a page covers the namespace and every token up to the page's end."""
        page_size = self._engine.page_size
        key = hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, key=self._seed).digest()
        keys = []
        for start in range(0, len(tokens), page_size):
            page = np.ascontiguousarray(tokens[start : start + page_size], dtype="<i8")
            key = hashlib.blake2b(page.tobytes(), digest_size=_DIGEST_BYTES, key=key).digest()
            keys.append(key)
        return keys

    def _digests(self, slots: torch.Tensor) -> list[bytes]:
        """One digest per page of `slots`, over every buffer of every layer that keeps all tokens, in order."""
        page_size, pool = self._engine.page_size, self._engine.pool
        full_layers = pool.slot_spaces[0].layout.layers
        digests: list[bytes] = []
        for part in slots.split(max(1, COPY_CHUNK_TOKENS // page_size) * page_size):
            layers = [
                buffer.view(torch.uint8).flatten(1).numpy()
                for layer_id, chunks in zip(pool.layer_ids, pool.get_cpu_copy(part), strict=True)
                if layer_id in full_layers
                for buffer in chunks[0]
            ]
            for start in range(0, len(part), page_size):
                digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
                for rows in layers:
                    digest.update(np.ascontiguousarray(rows[start : start + page_size]).data)
                digests.append(digest.digest())
        return digests

    def _open(self, path: Path) -> IO[str]:
        """Read the digests in the file and open it for appending; an incomplete last line is cut off."""
        try:
            data = path.read_bytes() if path.exists() else b""
            whole, _, torn = data.rpartition(b"\n")
            for number, line in enumerate(whole.split(b"\n"), start=1):
                if line and not self._parse(line):
                    raise ConfigError(f"{path}:{number} is not a line of an audit file; remove the file")
            file = path.open("a", encoding="ascii")
            if torn:
                file.truncate(len(data) - len(torn))
        except OSError as error:
            raise ConfigError(
                f"cannot use the audit file {path}: {error}; remove it or choose another --disk"
            ) from error
        return file

    def _parse(self, line: bytes) -> bool:
        try:
            entry = json.loads(line)
            self._known.setdefault(bytes.fromhex(entry["page"]), set()).add(bytes.fromhex(entry["kv"]))
        except (ValueError, KeyError, TypeError):
            return False
        return True
