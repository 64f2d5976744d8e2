"""The contract of device pools, and the methods that pools of per-token rows share.

A pool owns its tensors and declares their `PoolLayout`; the allocator tracks which slots are free. Writes of padding go
to slots [0, page_size), which are never allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from hicache.config.environment import debug_checks, kernel_choice
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.store_kv import Scale
from hicache.layout import PoolLayout
from hicache.tiers import FULL

CpuCopy = list[list[tuple[torch.Tensor, ...]]]

COPY_CHUNK_TOKENS = 8192
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class LayerWaiter(Protocol):
    """The part of a transfer counter that a pool's getters call: wait until a layer, given by dense index, has been
    loaded."""

    def wait_until(self, threshold: int) -> None: ...


class HasLayerId(Protocol):
    @property
    def layer_id(self) -> int: ...


LayerRef: TypeAlias = HasLayerId | int


class SlotRows(Protocol):
    """Rows indexed by slot: a buffer `[slots, ...row]`, or a view that maps slots to parts of page rows."""

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, slots: torch.Tensor, /) -> torch.Tensor: ...

    def __setitem__(self, slots: torch.Tensor, rows: torch.Tensor, /) -> None: ...


@dataclass(frozen=True)
class SlotSpace:
    """The rows of a pool that one set of slots addresses. Host pool, transfer engine and codec access a pool through
    its slot spaces.

    `name`: the component that the slots belong to. `layer_buffers(layer_id)` returns `[num_slots, ...row]` tensors in
    the order of `layout.specs_of(layer_id)`, without waiting. Most pools have one slot space. If a pool has several
    slot spaces, each one is transferred separately, with its own slots.
    """

    name: str
    layout: PoolLayout
    num_slots: int
    device: torch.device
    layer_buffers: Callable[[int], tuple[torch.Tensor, ...]]


def rows_to_cpu(layers: Sequence[tuple[SlotRows, ...]], indices: torch.Tensor) -> CpuCopy:
    """Copy rows `indices` of every buffer to the CPU as `[layer][chunk of 8192](buffers)`, in pinned memory on CUDA.
    Waits for the device."""
    device = layers[0][0].device
    pinned = device.type == "cuda"
    copy: CpuCopy = []
    for buffers in layers:
        chunks = []
        for chunk in indices.split(COPY_CHUNK_TOKENS):
            rows = [buffer[chunk] for buffer in buffers]
            host = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned) for x in rows]
            for target, source in zip(host, rows, strict=True):
                target.copy_(source, non_blocking=pinned)
            chunks.append(tuple(host))
        copy.append(chunks)
    if pinned:
        torch.cuda.current_stream(device).synchronize()
    return copy


def rows_from_cpu(copy: CpuCopy, layers: Sequence[tuple[SlotRows, ...]], indices: torch.Tensor) -> None:
    """Write the rows of a copy that `rows_to_cpu` returned to the rows `indices`. Raises ShapeError if the copy has
    another number of rows than `indices`. Waits for the device."""
    parts = indices.split(COPY_CHUNK_TOKENS)
    if len(copy) != len(layers):
        raise ShapeError(f"a copy of {len(copy)} layers for a pool of {len(layers)}")
    for buffers, chunks in zip(layers, copy, strict=True):
        if [len(chunk[0]) for chunk in chunks] != [len(part) for part in parts]:
            raise ShapeError(f"a copy of {sum(len(c[0]) for c in chunks)} tokens for {len(indices)} slots")
        for part, chunk in zip(parts, chunks, strict=True):
            for buffer, rows in zip(buffers, chunk, strict=True):
                buffer[part] = rows.to(buffer.device, non_blocking=True)
    device = layers[0][0].device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class KVCache(ABC):
    """A pool of the device tier: `layer_num` layers of `size + page_size` slots.

    The scheduler thread and the model's forward call the methods of a pool; the transfer engine uses `layer_buffers`.
    Layer ids are global, from `start_layer` to `end_layer`, both included. fp8 is stored as uint8 (`store_dtype`), and
    getters return it viewed as fp8. Stores never modify their arguments. `mem_usage` is in GiB. Only callers with
    SGLang's interface use `get_kv_buffer`, `store_kv`, `load_kv`, `load_cpu_copy`, `move_kv_cache` and
    `get_contiguous_buf_infos`.
    """

    mem_usage: float

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        if size < 1 or page_size < 1 or layer_num < 1:
            raise ConfigError(f"size={size}, page_size={page_size}, layer_num={layer_num} must all be at least 1")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.layer_num = layer_num
        self.store_dtype = torch.uint8 if dtype in _FP8 else dtype
        self.device = torch.device(device)
        # The device with its index, such as cuda:0, as tensors report it, even if `device` is "cuda".
        self._tensor_device = torch.empty(0, device=self.device).device
        self._kernels = kernel_choice(self.device)
        self.enable_memory_saver = enable_memory_saver
        self.start_layer = start_layer or 0
        self.end_layer = self.start_layer + layer_num - 1
        # `end_layer` may be the id of the last layer, or the id after the last layer.
        if end_layer not in (None, self.end_layer, self.end_layer + 1):
            raise ConfigError(f"start_layer={start_layer}, end_layer={end_layer} are not layer_num={layer_num} layers")
        self.layer_transfer_counter: LayerWaiter | None = None
        self._debug = debug_checks()

    @property
    @abstractmethod
    def layout(self) -> PoolLayout:
        """The layout of this pool's buffers, by global layer id."""

    @abstractmethod
    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Return the stored tensors of a layer, `[slots, ...row]`, in the order of `layout.specs_of(layer_id)`, without
        waiting until the layer is loaded."""

    @abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys `[slots, heads, dim]` of a layer as a view, after waiting until the layer is loaded."""

    @abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values `[slots, heads, dim]` of a layer, after waiting until the layer is loaded."""

    @abstractmethod
    def set_kv_buffer(
        self,
        layer: LayerRef,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Store keys and values `[tokens, heads, dim]` at slots `loc [tokens]`, divided by the scales. Raises
        ShapeError with the given and the expected shape."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of this pool's layers, ascending."""
        return tuple(range(self.start_layer, self.end_layer + 1))

    @property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """The slot spaces of the pool, each with the rows that one set of slots addresses."""
        return (SlotSpace(FULL, self.layout, self.size + self.page_size, self.device, self.layer_buffers),)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def store_kv(self, layer_id: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Call `set_kv_buffer` with a layer id."""
        self.set_kv_buffer(layer_id, indices, k, v)

    def load_kv(self, layer_id: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values at slots `indices [tokens]` as new tensors `[tokens, heads, dim]`, after waiting until
        the layer is loaded."""
        self._check_loc(indices)
        k, v = self.get_kv_buffer(layer_id)
        return k[indices], v[indices]

    def register_layer_transfer_counter(self, counter: LayerWaiter) -> None:
        """Make the getters wait, with this transfer counter, until the requested layer is loaded."""
        self.layer_transfer_counter = counter

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        """Copy rows at slots `indices` to the CPU as `[layer][chunk of 8192](buffers)`, in pinned memory on CUDA. Waits
        for the device."""
        self._wait_all()
        return rows_to_cpu([self._slot_rows(layer_id) for layer_id in self.layer_ids], indices)

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        """Write a copy made by `get_cpu_copy` to the same number of slots, possibly other slots. Waits for the
        device."""
        rows_from_cpu(kv_cache_cpu, [self._slot_rows(layer_id) for layer_id in self.layer_ids], indices)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` in every layer; sources and targets may overlap."""
        if tgt_loc.shape != src_loc.shape:
            raise ShapeError(f"{tuple(tgt_loc.shape)} target slots for {tuple(src_loc.shape)} source slots")
        self._wait_all()
        for layer_id in self.layer_ids:
            for rows in self._slot_rows(layer_id):
                rows[tgt_loc] = rows[src_loc]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return the addresses, the bytes, and the bytes per page of all buffers. The order is the first buffer of each
        layer, then the second buffer of each layer, and so on."""
        layers = [self.layer_buffers(layer_id) for layer_id in self.layer_ids]
        buffers = [buffer for kind in zip(*layers, strict=True) for buffer in kind]
        spans = [s for kind in zip(*map(self._spans_of, self.layer_ids), strict=True) for s in kind]
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.numel() * buffer.element_size() for buffer in buffers],
            [b[0].numel() * b.element_size() * self.page_size // span for b, span in zip(buffers, spans, strict=True)],
        )

    def _spans_of(self, layer_id: int) -> tuple[int, ...]:
        """Return, for each buffer of a layer, the number of slots that share one row of this buffer."""
        return self.layout.spans_of(layer_id)

    def _slot_rows(self, layer_id: int) -> tuple[SlotRows, ...]:
        """Return the rows of a layer, indexed by slot, without waiting until the layer is loaded."""
        return self.layer_buffers(layer_id)

    def _index(self, layer: LayerRef) -> int:
        """Return the dense index of a layer, given its global id or an object with a `layer_id`."""
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        if not self.start_layer <= layer_id <= self.end_layer:
            raise ShapeError(f"layer_id={layer_id} is not one of this pool's {self.start_layer}..{self.end_layer}")
        return layer_id - self.start_layer

    def _wait(self, layer_id: int) -> None:
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(self._index(layer_id))

    def _wait_all(self) -> None:
        for layer_id in self.layer_ids:
            self._wait(layer_id)

    def _as_read(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.store_dtype == self.dtype else buffer.view(self.dtype)

    def _check_loc(self, loc: torch.Tensor) -> None:
        if loc.dim() != 1 or loc.dtype not in (torch.int64, torch.int32) or loc.device != self._tensor_device:
            raise ShapeError(
                f"loc {tuple(loc.shape)} of {loc.dtype} on {loc.device}: need int64 or int32 slots in one dimension "
                f"on {self._tensor_device}"
            )
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._debug and loc.numel() and not capturing:
            low, high, end = int(loc.min()), int(loc.max()), self.size + self.page_size
            if low < 0 or high >= end:
                raise ShapeError(f"slots {low}..{high} are outside the pool's 0..{end - 1}")
