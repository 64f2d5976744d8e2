"""A cache of whole tensors over the engine's three tiers: device, pinned CPU memory, disk.

For callers that hold KV (or anything else) as tensors under names, and need neither slots nor prefixes.

    L1  tensors on the device                                    at most l1_max, and l1_bytes
    L2  blocks of pinned CPU memory, as host pages               at most l2_max, and l2_bytes
    L3  the same blocks in the page store                        at most disk_bytes

`get` brings what it finds up to L1. What no longer fits moves down by recency: L1 to L2, L2 to L3, and out of L3 as the
store evicts. A tensor is in L1 or L2, and beside it may be on disk. One value is a head of 256 bytes and the tensor's
bytes, cut into blocks (see `disk.tensor_head`):

    block 0      [head][bytes ...]
    block i > 0  [bytes ...], the last one filled up with zeros

Nothing is pickled. On disk block 0 has the key of the name, and the others keys of their own from the nonce, which is
drawn anew for each `put`: blocks of two tensors of one name can never be mixed. Block 0 is stored last and deleted
first, so what is found is whole, or a miss.

Stands beside the engine; may import host, disk, storage, layout, config and errors.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from hicache.disk.tensor_head import HEAD_BYTES, TENSOR_FORMAT_VERSION, TensorHead
from hicache.errors import ConfigError, HiCacheError, InvariantError
from hicache.host import HostPagePool
from hicache.layout import BufferSpec, PoolLayout
from hicache.storage import LmdbPageStore, PageBuffer, PageFilter, StoreCorrupt

_BLOCKS_PER_CALL = 64


@dataclass(frozen=True)
class TensorCacheStats:
    """A snapshot: tensors and bytes held, hits by the tier that had it, and tensors that moved down."""

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
class _Held:
    """One name's tensor. `value`: on the device (L1); `blocks`: ids of host pages in order (L2). One of them is set."""

    head: TensorHead
    value: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


class HiCache:
    """`put` and `get` tensors by name. One thread at a time; copies wait, so what they return is complete.

    Owns its device tensors, its pinned memory and the store in `path`. Tensors that `get` returns are the cache's own
    and stay valid for as long as they are kept: clone one before writing to it. `put` takes a copy. `close` writes what
    is in memory to disk, where another cache of the same `block_bytes` and `namespace` finds it.
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
        """`l1_max`, `l2_max`: tensors; `path`: a directory for L3, or None for none. `namespace` should name the model
        and its weights: a store is only opened under the one it was made for. ConfigError, OutOfMemory, StoreError."""
        least = {"l1_max": (l1_max, 1), "l2_max": (l2_max, 0), "block_bytes": (block_bytes, 4096)}
        least["l2_bytes"] = (l2_bytes, 2 * block_bytes)
        for name, (value, limit) in least.items():
            if value < limit:
                raise ConfigError(f"{name}={value} is below {limit}; raise {name}")
        self.l1_max, self.l2_max, self.l1_bytes, self.block_bytes = l1_max, l2_max, l1_bytes, block_bytes
        self.device = torch.device(device)
        spec = BufferSpec("block", torch.uint8, (block_bytes,), "token", (0,))
        self._host = HostPagePool(
            PoolLayout((spec,), 1), 1, l2_bytes, pin=self.device.type == "cuda", device=self.device, knob="l2_bytes"
        )
        try:
            self._store = None if path is None else _open_store(path, namespace, block_bytes, disk_bytes)
        except BaseException:
            self._host.close()
            raise
        # Least recently used first.
        self._l1: OrderedDict[bytes, _Held] = OrderedDict()
        self._l2: OrderedDict[bytes, _Held] = OrderedDict()
        self._l1_used = 0
        self._counts = dict.fromkeys(("l1_hits", "l2_hits", "l3_hits", "misses", "to_l2", "to_l3", "dropped"), 0)
        self._closed = False

    def put(self, key: str | bytes, kv: torch.Tensor) -> None:
        """Keep a copy of `kv` under `key`, in place of what was there, on any tier. ShapeError where it cannot be."""
        self._require_open()
        name, head = _name(key), TensorHead.of(kv)
        value = kv.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        self._forget(name)
        self._into_l1(name, _Held(head, value=value))

    def get(self, key: str | bytes) -> torch.Tensor | None:
        """The tensor on the device, now the most recently used; None where no tier has it."""
        self._require_open()
        name = _name(key)
        held = self._l1.get(name)
        if held is not None:
            self._counts["l1_hits"] += 1
            self._l1.move_to_end(name)
            return held.value
        held = self._l2.pop(name, None)
        if held is not None:
            self._counts["l2_hits"] += 1
            held.value = self._read(held.head, self._memories(held))
            self._free_blocks(held)
        else:
            held = self._from_disk(name)
            self._counts["misses" if held is None else "l3_hits"] += 1
            if held is None:
                return None
        self._into_l1(name, held)
        return held.value

    def stats(self) -> TensorCacheStats:
        disk = None if self._store is None or self._closed else self._store.stats()
        return TensorCacheStats(
            l1_tensors=len(self._l1),
            l1_bytes=self._l1_used,
            l2_tensors=len(self._l2),
            l2_bytes=sum(held.head.num_bytes for held in self._l2.values()),
            disk_blocks=0 if disk is None else disk.entries,
            disk_bytes=0 if disk is None else disk.file_bytes,
            **self._counts,
        )

    def check(self) -> None:
        """Raise InvariantError with all violations: bounds, accounts, blocks with two owners, or a store that fails."""
        found = []
        if len(self._l1) > self.l1_max or len(self._l2) > self.l2_max:
            found.append(f"{len(self._l1)} and {len(self._l2)} tensors, at most {self.l1_max} and {self.l2_max}")
        if self._l1_used != sum(held.head.num_bytes for held in self._l1.values()):
            found.append(f"{self._l1_used} bytes counted on the device, not those of its tensors")
        if set(self._l1) & set(self._l2) or any(held.value is None for held in self._l1.values()):
            found.append("a name is on the device and in host memory, or on the device without a tensor")
        blocks = [held.blocks for held in self._l2.values() if held.blocks is not None]
        owned = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int64)
        if owned.unique().numel() + self._host.available() != self._host.num_pages:
            found.append(f"{owned.numel()} blocks owned, {self._host.available()} free of {self._host.num_pages}")
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
        """Write what is in memory to disk, oldest first, and release everything. The second call does nothing."""
        if self._closed:
            return
        try:
            while self._l2:
                self._out_of_l2()
            while self._l1:
                self._out_of_l1(keep_in_l2=False)
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

    def _into_l1(self, name: bytes, held: _Held) -> None:
        self._l1[name] = held
        self._l1_used += held.head.num_bytes
        limit = self.l1_bytes
        # The newest stays, whatever its size: the caller is about to use it.
        while len(self._l1) > self.l1_max or (limit is not None and self._l1_used > limit and len(self._l1) > 1):
            self._out_of_l1()

    def _out_of_l1(self, keep_in_l2: bool = True) -> None:
        """Move the least recently used tensor down."""
        name, held = self._l1.popitem(last=False)
        self._l1_used -= held.head.num_bytes
        assert held.value is not None
        num_blocks = self._num_blocks(held.head)
        if not keep_in_l2 or not self.l2_max or num_blocks > self._host.num_pages:
            if self._store is not None:
                memory = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8)
                self._write(held.head, held.value, [memory])
                self._to_disk(name, held.head, list(memory.view(num_blocks, -1).numpy()))
            self._count_down()
            return
        while len(self._l2) >= self.l2_max or self._host.available() < num_blocks:
            self._out_of_l2()
        held.blocks = self._host.alloc(num_blocks)
        self._write(held.head, held.value, self._memories(held))
        held.value = None
        self._l2[name] = held
        self._counts["to_l2"] += 1

    def _out_of_l2(self) -> None:
        """Move the least recently used tensor of host memory to disk, or drop it where there is none."""
        name, held = self._l2.popitem(last=False)
        assert held.blocks is not None
        if self._store is not None:
            self._to_disk(name, held.head, self._host.views(held.blocks))
        self._free_blocks(held)
        self._count_down()

    def _count_down(self) -> None:
        self._counts["dropped" if self._store is None else "to_l3"] += 1

    def _free_blocks(self, held: _Held) -> None:
        assert held.blocks is not None
        self._host.free(held.blocks)
        held.blocks = None

    def _num_blocks(self, head: TensorHead) -> int:
        return -(-(HEAD_BYTES + head.num_bytes) // self.block_bytes)

    def _memories(self, held: _Held) -> list[torch.Tensor]:
        """The bytes of a tensor in host memory, in order: one uint8 tensor for each run of adjacent blocks."""
        assert held.blocks is not None
        ids = held.blocks.numpy()
        runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
        return [self._host.bytes_of[int(run[0]) : int(run[-1]) + 1].view(-1) for run in runs]

    def _write(self, head: TensorHead, value: torch.Tensor, memories: list[torch.Tensor]) -> None:
        """Head and bytes of a contiguous tensor into host memory; zeros behind them. Waits for the copy."""
        data = value.reshape(-1).view(torch.uint8)
        memories[0][:HEAD_BYTES] = torch.frombuffer(bytearray(head.pack()), dtype=torch.uint8)
        done = 0
        for memory, room in _payload_of(memories):
            part = data[done : done + room.numel()]
            room[: part.numel()].copy_(part, non_blocking=True)
            memory[memory.numel() - room.numel() + part.numel() :].zero_()
            done += part.numel()
        self._wait()

    def _read(self, head: TensorHead, memories: list[torch.Tensor]) -> torch.Tensor:
        """The tensor on the device from its bytes in host memory. Waits for the copy."""
        data = torch.empty(head.num_bytes, dtype=torch.uint8, device=self.device)
        done = 0
        for _, room in _payload_of(memories):
            part = data[done : done + room.numel()]
            part.copy_(room[: part.numel()], non_blocking=True)
            done += part.numel()
        self._wait()
        return data.view(head.dtype).view(head.shape)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _to_disk(self, name: bytes, head: TensorHead, blocks: list[PageBuffer]) -> None:
        """Store a tensor's blocks, the one that makes it visible last. A store that refuses some keeps none."""
        assert self._store is not None
        items = list(zip(_block_keys(name, head, len(blocks)), blocks, strict=True))
        for start in range(1, len(items), _BLOCKS_PER_CALL):
            if not all(self._store.put(items[start : start + _BLOCKS_PER_CALL])):
                return
        self._store.put(items[:1])

    def _head_on_disk(self, name: bytes) -> tuple[TensorHead, PageBuffer] | None:
        """The head under a name, and its block."""
        block = np.empty(self.block_bytes, dtype=np.uint8)
        if self._store is None or not self._store.get_into([name], [block])[0]:
            return None
        head = TensorHead.unpack(block[:HEAD_BYTES].tobytes())
        return None if head is None else (head, block)

    def _from_disk(self, name: bytes) -> _Held | None:
        """The tensor under a name, brought to the device; what is not whole is deleted and a miss."""
        found = self._head_on_disk(name)
        if found is None or self._store is None:
            return None
        head, block = found
        num_blocks = self._num_blocks(head)
        memory = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8)
        blocks = list(memory.view(num_blocks, -1).numpy())
        blocks[0][:] = block
        keys = _block_keys(name, head, num_blocks)
        for start in range(1, num_blocks, _BLOCKS_PER_CALL):
            part = slice(start, start + _BLOCKS_PER_CALL)
            if not all(self._store.get_into(keys[part], blocks[part])):
                self._store.delete(keys)
                return None
        return _Held(head, value=self._read(head, [memory]))

    def _forget(self, name: bytes) -> None:
        """Remove a name from every tier."""
        held = self._l1.pop(name, None)
        if held is not None:
            self._l1_used -= held.head.num_bytes
        held = self._l2.pop(name, None)
        if held is not None:
            self._free_blocks(held)
        if self._store is not None and self._store.contains([name])[0]:
            found = self._head_on_disk(name)
            keys = [name] if found is None else _block_keys(name, found[0], self._num_blocks(found[0]))
            self._store.delete(keys)

    def _require_open(self) -> None:
        if self._closed:
            raise HiCacheError("this tensor cache is closed; build another one")


def _open_store(path: str | os.PathLike[str], namespace: str, block_bytes: int, disk_bytes: int) -> LmdbPageStore:
    return LmdbPageStore(
        path,
        identity={"kind": "tensor cache", "format": TENSOR_FORMAT_VERSION, "namespace": namespace},
        page_bytes=block_bytes,
        budget_bytes=disk_bytes,
        filter=PageFilter("planes", 2),
    )


def _name(key: str | bytes) -> bytes:
    """The digest that stands for a key on all tiers. Text and bytes are told apart."""
    return hashlib.sha256(b"s" + key.encode() if isinstance(key, str) else b"b" + key).digest()


def _block_keys(name: bytes, head: TensorHead, num_blocks: int) -> list[bytes]:
    return [name, *(head.nonce + index.to_bytes(8, "little") for index in range(1, num_blocks))]


def _payload_of(memories: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of memory with the part of it that is the tensor's: all but the head in the first."""
    for index, memory in enumerate(memories):
        yield memory, memory[HEAD_BYTES:] if index == 0 else memory
