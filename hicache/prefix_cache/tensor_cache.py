"""A cache of named tensors in three tiers: device, pinned CPU memory, disk.

    L1  tensors on the device                                    at most l1_max, and l1_bytes
    L2  blocks of pinned CPU memory, as host pages               at most l2_max, and l2_bytes
    L3  the same blocks in the page store                        at most disk_bytes

`get` loads a tensor into L1. If L1 or L2 is full, its least recently used tensors are moved to the next lower tier. If
L3 is full, the store evicts blocks. A tensor is never in both L1 and L2; a tensor in memory may also be on disk. L2 and
L3 store a header (see `tensor_header`) followed by the tensor's bytes, cut into blocks:

    block 0      [header][bytes ...]
    block i > 0  [bytes ...], the last one padded with zeros

Nothing is pickled. The key of block 0 is the digest of the name. The keys of the later blocks contain the nonce, a
random number that each `put` chooses. So blocks of an old and a new tensor with the same name never mix. Block 0 is
written last and deleted first, so a tensor on disk is found completely or not at all. If the disk does not accept a
tensor that is moved to it, the tensor is dropped.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from hicache.errors import ConfigError, HiCacheError, InvariantError
from hicache.host.pool import HostPagePool
from hicache.layout import BufferSpec, PoolLayout
from hicache.prefix_cache.tensor_header import HEADER_BYTES, TENSOR_FORMAT_VERSION, TensorHeader
from hicache.storage import LmdbPageStore, PageBuffer, PageFilter, PageFormat, StoreCorrupt
from hicache.storage.owner import OwnerProcess
from hicache.storage.process.health import LIMITS, Breaker
from hicache.storage.process.jobs import PageRows

_BLOCKS_PER_CALL = 64


@dataclass(frozen=True)
class TensorCacheStats:
    """A snapshot of numbers: tensors and bytes in each tier, hits by tier, tensors moved to L2 and to L3. `dropped`:
    number of tensors that were removed from memory without a copy on disk."""

    l1_tensors: int
    l1_bytes: int
    l2_tensors: int
    l2_bytes: int
    disk_blocks: int
    disk_bytes: int
    l1_hits: int
    l2_hits: int
    l3_hits: int
    misses: int
    to_l2: int
    to_l3: int
    dropped: int

    @property
    def hit_rate(self) -> float:
        hits = self.l1_hits + self.l2_hits + self.l3_hits
        return hits / max(1, hits + self.misses)


@dataclass
class _Entry:
    """One tensor, either in L1 (`value`, on the device) or in L2 (`blocks`, ids of host pages in order)."""

    header: TensorHeader
    value: torch.Tensor | None = None
    blocks: list[int] | None = None


class HiCache:
    """A cache of tensors by name. Only one thread at a time may call it. When a call returns, its copies are complete.

    Owns its device tensors, its pinned memory and the store in `path`. `put` copies its argument. `get` returns the
    cache's own tensor, which stays valid while the caller has a reference. The caller must clone this tensor before
    writing to it. `close` writes all tensors in memory to disk, where another cache with the same `block_bytes` and
    `namespace` finds them.
    """

    def __init__(
        self,
        l1_max: int,
        l2_max: int,
        path: str | os.PathLike[str] | None,
        *,
        device: str | torch.device = "cpu",
        l1_bytes: int | None = None,
        l2_bytes: int = 256 << 20,
        disk_bytes: int = 8 << 30,
        block_bytes: int = 256 << 10,
        namespace: str = "",
    ) -> None:
        """Allocate the memory of L2, and open the store of L3 in the directory `path` (no L3 if it is None). `l1_max`,
        `l2_max`: maximum numbers of tensors in L1 and L2. `l1_bytes`, `l2_bytes`, `disk_bytes`: maximum bytes of each
        tier. `block_bytes`: size of the blocks into which tensors are cut. `namespace` should name the model and its
        weights; a store is opened only with the same namespace. Raises ConfigError, OutOfMemory or StoreError."""
        minima = {"l1_max": (l1_max, 1), "l2_max": (l2_max, 0), "block_bytes": (block_bytes, 4096)}
        minima["l2_bytes"] = (l2_bytes, 2 * block_bytes)
        for name, (value, minimum) in minima.items():
            if value < minimum:
                raise ConfigError(f"{name}={value} is too small; raise it to at least {minimum}")
        self.l1_max = l1_max
        self.l2_max = l2_max
        self.l1_bytes = l1_bytes
        self.block_bytes = block_bytes
        self.device = torch.device(device)
        spec = BufferSpec("block", torch.uint8, (block_bytes,), "token", (0,))
        self._host = HostPagePool(
            PoolLayout((spec,), 1), 1, l2_bytes, pin=self.device.type == "cuda", device=self.device, setting="l2_bytes"
        )
        try:
            self._store = None if path is None else _open_store(path, namespace, block_bytes, disk_bytes)
        except BaseException:
            self._host.close()
            raise
        # The least recently used tensor is first.
        self._l1 = OrderedDict[bytes, _Entry]()
        self._l2 = OrderedDict[bytes, _Entry]()
        self._l1_used = 0
        self._closed = False
        self._owner = OwnerProcess("the tensor cache")
        self._replaced = set[bytes]()  # names with a new tensor, whose old tensor may still be on disk
        self._breaker = Breaker("writes", LIMITS, time.monotonic)
        self._counts = dict.fromkeys(("l1_hits", "l2_hits", "l3_hits", "misses", "to_l2", "to_l3", "dropped"), 0)

    def put(self, key: str | bytes, kv: torch.Tensor) -> None:
        """Store a copy of `kv` as `key`, and remove the old value from all tiers. Raises ShapeError for unsupported
        tensors."""
        self._require_open()
        name, header = _name(key), TensorHeader.of(kv)
        value = kv.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        self._remove(name)
        self._add_to_l1(name, _Entry(header, value=value))

    def get(self, key: str | bytes) -> torch.Tensor | None:
        """Return the tensor, loaded to the device, and make it the most recently used one. Returns None if no tier has
        it."""
        self._require_open()
        name = _name(key)
        entry = self._l1.get(name)
        if entry is not None:
            self._counts["l1_hits"] += 1
            self._l1.move_to_end(name)
            return entry.value
        entry = self._l2.pop(name, None)
        if entry is not None:
            self._counts["l2_hits"] += 1
            entry.value = self._read(entry.header, self._memories(entry))
            self._free_blocks(entry)
        else:
            entry = self._from_disk(name)
            self._counts["misses" if entry is None else "l3_hits"] += 1
            if entry is None:
                return None
        self._add_to_l1(name, entry)
        return entry.value

    def stats(self) -> TensorCacheStats:
        disk = None if self._store is None or self._closed else self._store.stats()
        return TensorCacheStats(
            l1_tensors=len(self._l1),
            l1_bytes=self._l1_used,
            l2_tensors=len(self._l2),
            l2_bytes=sum(entry.header.num_bytes for entry in self._l2.values()),
            disk_blocks=0 if disk is None else disk.entries,
            disk_bytes=0 if disk is None else disk.file_bytes,
            **self._counts,
        )

    def check(self) -> None:
        """Raise InvariantError with all violations of limits, byte counts, block ownership and the store."""
        found = []
        if len(self._l1) > self.l1_max or len(self._l2) > self.l2_max:
            found.append(f"{len(self._l1)} and {len(self._l2)} tensors, maximum {self.l1_max} and {self.l2_max}")
        if self._l1_used != sum(entry.header.num_bytes for entry in self._l1.values()):
            found.append(f"{self._l1_used} bytes counted on the device, which is not the sum of its tensors")
        if set(self._l1) & set(self._l2) or any(entry.value is None for entry in self._l1.values()):
            found.append("a tensor is in L1 and in L2, or an entry of L1 has no tensor")
        owned = [block for entry in self._l2.values() for block in entry.blocks or ()]
        if len({*owned}) + self._host.available() != self._host.num_pages:
            found.append(f"{len(owned)} blocks owned, {self._host.available()} free of {self._host.num_pages}")
        try:
            self._host.check()
            if self._store is not None and not self._closed:
                self._store.check()
        except InvariantError as error:
            found.extend(error.violations)
        except StoreCorrupt as error:
            found.extend(error.violations or (str(error),))
        if found:
            raise InvariantError("tensor cache", found)

    def close(self) -> None:
        """Write all tensors in memory to disk, least recently used first, and free all memory.

        Idempotent. Does nothing in a forked process."""
        if self._closed or not self._owner.is_here:
            return
        try:
            # A new circuit breaker has no failures, so writes do not wait for the backoff of an earlier failure.
            self._breaker = Breaker("writes", LIMITS, time.monotonic)
            for name in list(self._replaced):
                self._delete_on_disk(name)
            while self._l2:
                self._demote_from_l2()
            while self._l1:
                self._demote_from_l1(keep_in_l2=False)
        finally:
            self._closed = True
            self._l1.clear()
            self._l2.clear()
            self._host.close()
            if self._store is not None:
                self._store.close()

    def __enter__(self) -> HiCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_to_l1(self, name: bytes, entry: _Entry) -> None:
        self._l1[name] = entry
        self._l1_used += entry.header.num_bytes
        limit = self.l1_bytes
        # The newest tensor stays in L1 even if it exceeds `l1_bytes`, because the caller is about to use it.
        while len(self._l1) > self.l1_max or (limit is not None and self._l1_used > limit and len(self._l1) > 1):
            self._demote_from_l1()

    def _demote_from_l1(self, keep_in_l2: bool = True) -> None:
        """Move the least recently used tensor of L1 to L2 or to disk."""
        name, entry = self._l1.popitem(last=False)
        self._l1_used -= entry.header.num_bytes
        assert entry.value is not None
        num_blocks = self._num_blocks(entry.header)
        if not keep_in_l2 or not self.l2_max or num_blocks > self._host.num_pages:
            stored = False
            if self._store is not None:
                memory = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8)
                self._write(entry.header, entry.value, [memory])
                stored = self._to_disk(name, entry.header, list(memory.view(num_blocks, -1).numpy()))
            self._count_demotion(stored)
            return
        while len(self._l2) >= self.l2_max or self._host.available() < num_blocks:
            self._demote_from_l2()
        entry.blocks = self._host.alloc(num_blocks)
        self._write(entry.header, entry.value, self._memories(entry))
        entry.value = None
        self._l2[name] = entry
        self._counts["to_l2"] += 1

    def _demote_from_l2(self) -> None:
        """Move the least recently used tensor of L2 to disk, or drop it if the disk does not accept it."""
        name, entry = self._l2.popitem(last=False)
        assert entry.blocks is not None
        self._count_demotion(self._to_disk(name, entry.header, [*PageRows(self._host.memory, entry.blocks)]))
        self._free_blocks(entry)

    def _count_demotion(self, stored: bool) -> None:
        self._counts["to_l3" if stored else "dropped"] += 1

    def _free_blocks(self, entry: _Entry) -> None:
        assert entry.blocks is not None
        self._host.free(entry.blocks)
        entry.blocks = None

    def _num_blocks(self, header: TensorHeader) -> int:
        return -(-(HEADER_BYTES + header.num_bytes) // self.block_bytes)

    def _memories(self, entry: _Entry) -> list[torch.Tensor]:
        """Return the memory of a tensor in L2, in order: one uint8 tensor for each run of adjacent blocks."""
        assert entry.blocks is not None
        runs = np.split(entry.blocks, np.flatnonzero(np.diff(entry.blocks) != 1) + 1)
        return [self._host.bytes_of[int(run[0]) : int(run[-1]) + 1].view(-1) for run in runs]

    def _write(self, header: TensorHeader, value: torch.Tensor, memories: list[torch.Tensor]) -> None:
        """Write the header and bytes of a contiguous tensor to host memory, padded with zeros. Waits for the copy."""
        data = value.reshape(-1).view(torch.uint8)
        memories[0][:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        done = 0
        for memory, payload in _payload_of(memories):
            part = data[done : done + payload.numel()]
            payload[: part.numel()].copy_(part, non_blocking=True)
            memory[memory.numel() - payload.numel() + part.numel() :].zero_()
            done += part.numel()
        self._wait()

    def _read(self, header: TensorHeader, memories: list[torch.Tensor]) -> torch.Tensor:
        """Copy the tensor from host memory to the device. Waits for the copy."""
        data = torch.empty(header.num_bytes, dtype=torch.uint8, device=self.device)
        done = 0
        for _, payload in _payload_of(memories):
            part = data[done : done + payload.numel()]
            part.copy_(payload[: part.numel()], non_blocking=True)
            done += part.numel()
        self._wait()
        return data.view(header.dtype).view(header.shape)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _to_disk(self, name: bytes, header: TensorHeader, blocks: list[PageBuffer]) -> bool:
        """Write the blocks of a tensor to disk. Returns whether the disk then has all these blocks.

        Writes nothing while the disk has an old tensor with this name, or during the backoff after a disk error."""
        token = None if self._store is None else self._breaker.admit()
        if self._store is None or token is None:
            return False
        stored = False
        if self._store.reopen():
            if name in self._replaced:
                self._delete_on_disk(name)
            stored = name not in self._replaced and self._put_blocks(name, header, blocks)
        if self._store.stats().read_only:
            self._breaker.failed(token, "the store is read-only; free space on its disk", at_once=True)
        else:
            self._breaker.succeeded(token)
        return stored

    def _put_blocks(self, name: bytes, header: TensorHeader, blocks: list[PageBuffer]) -> bool:
        """Write block 0 last, because this block makes the tensor visible. If the store refuses another block, do not
        write block 0."""
        assert self._store is not None
        items = list(zip(_block_keys(name, header, len(blocks)), blocks, strict=True))
        parts = [items[start : start + _BLOCKS_PER_CALL] for start in range(1, len(items), _BLOCKS_PER_CALL)]
        return all(all(self._store.put(part)) for part in (*parts, items[:1]))

    def _header_on_disk(self, name: bytes) -> tuple[TensorHeader, PageBuffer] | None:
        """Return the header and block 0 of the tensor called `name` on disk; None if the disk does not have it."""
        block = np.empty(self.block_bytes, dtype=np.uint8)
        if self._store is None or not self._store.get_into([name], [block])[0]:
            return None
        header = TensorHeader.unpack(block[:HEADER_BYTES].tobytes())
        return None if header is None else (header, block)

    def _from_disk(self, name: bytes) -> _Entry | None:
        """Load a tensor from disk to the device. An incomplete tensor is deleted and counts as a miss."""
        found = None if name in self._replaced else self._header_on_disk(name)
        if found is None or self._store is None:
            return None
        header, block = found
        num_blocks = self._num_blocks(header)
        memory = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8)
        blocks = list(memory.view(num_blocks, -1).numpy())
        blocks[0][:] = block
        keys = _block_keys(name, header, num_blocks)
        for start in range(1, num_blocks, _BLOCKS_PER_CALL):
            part = slice(start, start + _BLOCKS_PER_CALL)
            if not all(self._store.get_into(keys[part], blocks[part])):
                self._store.delete(keys)
                return None
        return _Entry(header, value=self._read(header, [memory]))

    def _remove(self, name: bytes) -> None:
        """Remove a name from all tiers."""
        entry = self._l1.pop(name, None)
        if entry is not None:
            self._l1_used -= entry.header.num_bytes
        entry = self._l2.pop(name, None)
        if entry is not None:
            self._free_blocks(entry)
        if self._may_be_on_disk(name):
            self._delete_on_disk(name)

    def _delete_on_disk(self, name: bytes) -> None:
        """Delete a tensor from disk. If this fails, record that the tensor may still be on disk."""
        assert self._store is not None
        found = self._header_on_disk(name)
        self._store.delete([name] if found is None else _block_keys(name, found[0], self._num_blocks(found[0])))
        (self._replaced.add if self._may_be_on_disk(name) else self._replaced.discard)(name)

    def _may_be_on_disk(self, name: bytes) -> bool:
        """Return whether the disk has a tensor called `name`, or cannot be read."""
        if self._store is None:
            return False
        num_errors = self._store.thread_read_errors()
        return self._store.contains([name])[0] or self._store.thread_read_errors() > num_errors

    def _require_open(self) -> None:
        self._owner.require_here()
        if self._closed:
            raise HiCacheError("the tensor cache is closed; build a new one")


def _open_store(path: str | os.PathLike[str], namespace: str, block_bytes: int, disk_bytes: int) -> LmdbPageStore:
    return LmdbPageStore(
        path,
        identity={"kind": "tensor cache", "format": TENSOR_FORMAT_VERSION, "namespace": namespace},
        formats=[PageFormat(block_bytes, PageFilter("byte_shuffle", 2))],
        budget_bytes=disk_bytes,
    )


def _name(key: str | bytes) -> bytes:
    """Return the digest of a key. A str and its encoded bytes have different digests."""
    return hashlib.sha256(b"s" + key.encode() if isinstance(key, str) else b"b" + key).digest()


def _block_keys(name: bytes, header: TensorHeader, num_blocks: int) -> list[bytes]:
    return [name, *(header.nonce + index.to_bytes(8, "little") for index in range(1, num_blocks))]


def _payload_of(memories: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each piece of memory together with its payload. The payload of the first piece is the part after the
    header; that of any other piece is the complete piece."""
    for index, memory in enumerate(memories):
        yield memory, memory[HEADER_BYTES:] if index == 0 else memory
