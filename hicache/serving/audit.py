"""A second opinion on every byte: digests of pages when they are computed, compared when they come back.

The auditor reads pages out of the device pool on its own, by `get_cpu_copy`, while a request still holds them: those
layers whose every token is kept. What window layers have let go of cannot be read, and states are no pages. A page is
known by a digest of its namespace and all tokens up to its end, never by a slot or a store's key, so nothing that
the cache itself believes enters the comparison. With a file the digests outlive the process and judge what a later one
finds on disk.

Owns that file. May import numpy, torch, the engine and errors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
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
    """`compared`: pages that came back from host or disk and were checked; `mismatched` of them differed from what was
    computed. `unrecorded`: pages that came back and of which no digest is known. `recorded`: pages computed here."""

    compared: int = 0
    mismatched: int = 0
    unrecorded: int = 0
    recorded: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class KVAudit:
    """The `Auditor` of a scheduler. Scheduler thread only.

    `identity`: what the digests belong to beside the tokens (model, dtype). `sidecar`: a file to which they are
    appended and from which earlier ones are read; a last line that a killed process left torn is left out.
    """

    def __init__(self, engine: CacheEngine, identity: str, sidecar: Path | None = None) -> None:
        self._engine = engine
        self._seed = hashlib.blake2b(f"{identity}\0{engine.page_size}".encode(), digest_size=_DIGEST_BYTES).digest()
        # A page that was lost everywhere is computed again, with other rounding: any digest it ever had will do.
        self._known: dict[bytes, set[bytes]] = {}
        self._file: IO[str] | None = None
        self._compared = self._mismatched = self._unrecorded = self._recorded = 0
        if sidecar is not None:
            self._file = self._open(sidecar)

    @property
    def counts(self) -> AuditCounts:
        return AuditCounts(self._compared, self._mismatched, self._unrecorded, self._recorded)

    def review(self, lease: Lease, tokens: npt.NDArray[np.int64]) -> None:
        """Compare pages [hit.device, cached_len) of the lease and record pages [cached_len, last whole page)."""
        page_size = self._engine.page_size
        # Pages of the lease: [0, back) were on the device, [back, new) came back, [new, end) were computed.
        back, new, end = (n // page_size for n in (lease.hit.device, lease.cached_len, len(tokens)))
        if back >= end:
            return
        keys = self._page_keys(lease.namespace, tokens[: end * page_size])
        self._engine.begin_forward([lease])
        digests = self._digests(lease.slots[back * page_size : end * page_size])
        for page, digest in zip(range(back, end), digests, strict=True):
            if page < new:
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
        if known is None:
            self._unrecorded += 1
            return
        self._compared += 1
        self._mismatched += digest not in known

    def _record(self, key: bytes, digest: bytes) -> None:
        self._recorded += 1
        known = self._known.setdefault(key, set())
        if digest not in known and self._file is not None:
            self._file.write(json.dumps({"page": key.hex(), "kv": digest.hex()}) + "\n")
        known.add(digest)

    def _page_keys(self, namespace: str, tokens: npt.NDArray[np.int64]) -> list[bytes]:
        """A chain: the key of a page covers the namespace and every token up to the page's end."""
        step = self._engine.page_size
        key = hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, key=self._seed).digest()
        keys = []
        for start in range(0, len(tokens), step):
            page = np.ascontiguousarray(tokens[start : start + step], dtype="<i8")
            key = hashlib.blake2b(page.tobytes(), digest_size=_DIGEST_BYTES, key=key).digest()
            keys.append(key)
        return keys

    def _digests(self, slots: torch.Tensor) -> list[bytes]:
        """One digest a page of `slots`: every layer that keeps all tokens, every buffer, in order."""
        step, pool = self._engine.page_size, self._engine.pool
        whole = pool.slot_spaces[0].layout.layers
        digests: list[bytes] = []
        for part in slots.split(max(1, COPY_CHUNK_TOKENS // step) * step):
            layers = [
                buffer.view(torch.uint8).flatten(1).numpy()
                for layer_id, chunks in zip(pool.layer_ids, pool.get_cpu_copy(part), strict=True)
                if layer_id in whole
                for buffer in chunks[0]
            ]
            for start in range(0, len(part), step):
                digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
                for rows in layers:
                    digest.update(np.ascontiguousarray(rows[start : start + step]).data)
                digests.append(digest.digest())
        return digests

    def _open(self, path: Path) -> IO[str]:
        """Learn what the file holds and open it for appending, without a last line that was cut short."""
        try:
            data = path.read_bytes() if path.exists() else b""
            whole, _, torn = data.rpartition(b"\n")
            for number, line in enumerate(whole.split(b"\n"), start=1):
                if line and not self._learn(line):
                    raise ConfigError(f"{path}:{number} is no line of an audit; remove the file")
            file = path.open("a", encoding="ascii")
            if torn:
                file.truncate(len(data) - len(torn))
        except OSError as error:
            raise ConfigError(
                f"cannot use the audit file {path}: {error}; remove it or choose another --disk"
            ) from error
        return file

    def _learn(self, line: bytes) -> bool:
        try:
            entry = json.loads(line)
            self._known.setdefault(bytes.fromhex(entry["page"]), set()).add(bytes.fromhex(entry["kv"]))
        except (ValueError, KeyError, TypeError):
            return False
        return True
