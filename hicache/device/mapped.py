"""Pools of layers that are not one run of ids: a pool of dense layers behind each global layer id.

Owns the map; the tensors belong to the pools behind it. May import what the base may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hicache.device.base import HasLayerId, KVCache, SlotRows
from hicache.errors import ConfigError, ShapeError
from hicache.layout import PoolLayout


class MappedKVPool(KVCache):
    """What pools over scattered layer ids share: buffers are found by global id, layers are waited for by position.

    A transfer counter is registered here, not with the pools behind: `wait_until` gets the position of the layer among
    `layer_ids`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        places: Mapping[int, tuple[KVCache, int]],
        device: str | torch.device,
        enable_memory_saver: bool,
    ) -> None:
        """`places`: for each global layer id the pool that holds it and the dense id it has there."""
        super().__init__(size, page_size, dtype, len(places), device, enable_memory_saver)
        self._places = dict(sorted(places.items()))
        self._positions = {layer_id: position for position, layer_id in enumerate(self._places)}
        self.start_layer, self.end_layer = min(self._places), max(self._places)
        self.mem_usage = sum(pool.mem_usage for pool in {id(pool): pool for pool, _ in places.values()}.values())

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._places)

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        pool, dense_id = self._place(layer_id)
        return pool.layer_buffers(dense_id)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        pool, dense_id = self._place(layer_id)
        self._wait(layer_id)
        return pool.get_key_buffer(dense_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        pool, dense_id = self._place(layer_id)
        self._wait(layer_id)
        return pool.get_value_buffer(dense_id)

    def _spans_of(self, layer_id: int) -> tuple[int, ...]:
        pool, dense_id = self._place(layer_id)
        return pool.layout.spans_of(dense_id)

    def _slot_rows(self, layer_id: int) -> tuple[SlotRows, ...]:
        pool, dense_id = self._place(layer_id)
        return pool._slot_rows(dense_id)

    def _index(self, layer: HasLayerId | int) -> int:
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        self._place(layer_id)
        return self._positions[layer_id]

    def _place(self, layer_id: int) -> tuple[KVCache, int]:
        if layer_id not in self._places:
            raise self._unknown(layer_id)
        return self._places[layer_id]

    def _unknown(self, layer_id: int) -> ShapeError:
        return ShapeError(f"layer_id={layer_id} is not one of this pool's layers: {list(self._places)}")

    def _wait_all(self) -> None:
        for layer_id in self._places:
            self._wait(layer_id)


def with_layer_ids(layout: PoolLayout, layer_ids: Sequence[int]) -> PoolLayout:
    """`layout` of dense layers 0, 1, ... with `layer_ids[dense]` in their place."""
    buffers = (replace(b, layers=tuple(layer_ids[dense] for dense in b.layers)) for b in layout.buffers)
    return replace(layout, buffers=tuple(buffers))


def ascending(layer_ids: Sequence[int], name: str) -> tuple[int, ...]:
    """The ids in order. ConfigError where there is none, one is negative, or one is named twice."""
    ordered = tuple(sorted(layer_ids))
    if not ordered or ordered[0] < 0 or len(set(ordered)) != len(ordered):
        raise ConfigError(f"{name}={list(layer_ids)}: name at least one layer, each once, from 0 on")
    return ordered
