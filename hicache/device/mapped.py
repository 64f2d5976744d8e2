"""Base class of pools whose layers have arbitrary global ids. Each global id is mapped to a layer of an inner pool.

`MappedKVPool` owns this map; the inner pools own the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hicache.device.base import CpuCopy, KVCache, LayerRef
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.store_kv import Scale
from hicache.layout import PoolLayout


class MappedKVPool(KVCache):
    """A pool that gives access to the layers of inner pools under global layer ids.

    A transfer counter is registered with this pool, not with the inner pools. Its `wait_until` gets the index of the
    layer in `layer_ids`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layers: Mapping[int, tuple[KVCache, int]],
        device: str | torch.device,
        enable_memory_saver: bool,
    ) -> None:
        """Build a pool over inner pools. `layers` has, for each global layer id, the inner pool with this layer and the
        layer's dense id in the inner pool."""
        super().__init__(size, page_size, dtype, len(layers), device, enable_memory_saver)
        self._layers = dict(sorted(layers.items()))
        self._positions = {layer_id: position for position, layer_id in enumerate(self._layers)}
        self.start_layer = min(self._layers)
        self.end_layer = max(self._layers)
        self._pools = list(dict.fromkeys(pool for pool, _ in layers.values()))
        self.mem_usage = sum(pool.mem_usage for pool in self._pools)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._layers)

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        pool, dense_id = self._inner(layer_id)
        return pool.layer_buffers(dense_id)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        pool, dense_id = self._inner(layer_id)
        self._wait(layer_id)
        return pool.get_key_buffer(dense_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        pool, dense_id = self._inner(layer_id)
        self._wait(layer_id)
        return pool.get_value_buffer(dense_id)

    def set_kv_buffer(
        self,
        layer: LayerRef,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        pool, dense_id = self._inner(layer_id)
        pool.set_kv_buffer(dense_id, self._slots_of_layer(layer_id, loc), cache_k, cache_v, k_scale, v_scale)

    def load_kv(self, layer_id: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool, dense_id = self._inner(layer_id)
        self._wait(layer_id)
        return pool.load_kv(dense_id, self._slots_of_layer(layer_id, indices))

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        """Copy rows of all layers to the CPU, in the order of layer ids. Each layer is read at the slots of its inner
        pool that correspond to `indices`."""
        self._wait_all()
        copies = {pool: iter(pool.get_cpu_copy(self._slots_in(pool, indices))) for pool in self._pools}
        return [next(copies[pool]) for pool, _ in self._layers.values()]

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        """Write a copy made by `get_cpu_copy` to the same number of slots, possibly other slots."""
        if len(kv_cache_cpu) != self.layer_num:
            raise ShapeError(f"a copy of {len(kv_cache_cpu)} layers for a pool of {self.layer_num}")
        for pool in self._pools:
            owners = zip(self._layers.values(), kv_cache_cpu, strict=True)
            pool.load_cpu_copy([rows for (owner, _), rows in owners if owner is pool], self._slots_in(pool, indices))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` in every layer, after translating them to slots of the layer's inner pool.
        Sources and targets may overlap."""
        self._wait_all()
        for pool in self._pools:
            pool.move_kv_cache(self._slots_in(pool, tgt_loc), self._slots_in(pool, src_loc))

    def _slots_in(self, pool: KVCache, slots: torch.Tensor) -> torch.Tensor:
        """Translate slots of this pool to slots of an inner pool."""
        return slots

    def _slots_of_layer(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Translate slots of this pool to the slots at which rows of a layer are stored in its inner pool."""
        return loc

    def _spans_of(self, layer_id: int) -> tuple[int, ...]:
        pool, dense_id = self._inner(layer_id)
        return pool.layout.spans_of(dense_id)

    def _index(self, layer: LayerRef) -> int:
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        self._inner(layer_id)
        return self._positions[layer_id]

    def _inner(self, layer_id: int) -> tuple[KVCache, int]:
        if layer_id not in self._layers:
            raise self._unknown(layer_id)
        return self._layers[layer_id]

    def _unknown(self, layer_id: int) -> ShapeError:
        return ShapeError(f"layer_id={layer_id} is not one of this pool's layers: {list(self._layers)}")


def with_layer_ids(layout: PoolLayout, layer_ids: Sequence[int]) -> PoolLayout:
    """Replace the dense layer ids 0, 1, ... of `layout` by `layer_ids[dense]`."""
    buffers = (replace(b, layers=tuple(layer_ids[dense] for dense in b.layers)) for b in layout.buffers)
    return replace(layout, buffers=tuple(buffers))


def ascending(layer_ids: Sequence[int], name: str) -> tuple[int, ...]:
    """Sort layer ids. Raises ConfigError if there is no id, or if an id is negative or occurs twice."""
    ordered = tuple(sorted(layer_ids))
    if not ordered or ordered[0] < 0 or len(set(ordered)) != len(ordered):
        raise ConfigError(f"{name}={list(layer_ids)}: name at least one layer, each once, with ids from 0")
    return ordered
