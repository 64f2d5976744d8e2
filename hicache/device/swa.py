"""The pool of models that mix full and sliding-window attention: a small pool for the window beside the full one.

    full slots    [0, size + page_size)        what requests and trees hold; full-attention layers are stored there
    window slots  [0, size_swa + page_size)    window layers; a full slot has one as peer, or 0 where it has none

Owns both pools; borrows the mapping between them from the allocator. May import what the base may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hicache.config import kernel_choice
from hicache.device.base import CpuCopy, HasLayerId, SlotSpace
from hicache.device.mapped import MappedKVPool, ascending, with_layer_ids
from hicache.device.mha import MHATokenToKVPool
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.swa import translate_slots
from hicache.layout import PoolLayout


@dataclass(frozen=True)
class _Translation:
    """The window slots of one forward's `loc`, and what must be as it was for them to hold."""

    loc: torch.Tensor
    state: tuple[int, int, bool]
    slots: torch.Tensor


class SWAKVPool(MappedKVPool):
    """`full_kv_pool` for the layers of full attention, `swa_kv_pool` for those with a window, under global layer ids.

    Callers speak in full slots; window layers translate them. In a forward that writes its layers in ascending order
    the first window layer translates `loc` and the others use the result. `layers_mapping[layer_id]` is
    (dense id, whether it is a window layer). Two layouts over two slot spaces: see `slot_spaces`.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        swa_attention_layer_ids: Sequence[int],
        full_attention_layer_ids: Sequence[int],
        device: str | torch.device,
        enable_kvcache_transpose: bool = False,
        token_to_kv_pool_class: type[MHATokenToKVPool] = MHATokenToKVPool,
        enable_memory_saver: bool = False,
    ) -> None:
        """ConfigError on layer ids that are missing, twice or on both sides, and on transposing."""
        if enable_kvcache_transpose:
            raise ConfigError("enable_kvcache_transpose=True: keys and values are stored by token; set it to False")
        swa_ids = ascending(swa_attention_layer_ids, "swa_attention_layer_ids")
        full_ids = ascending(full_attention_layer_ids, "full_attention_layer_ids")
        if set(swa_ids) & set(full_ids):
            raise ConfigError(f"layers {sorted(set(swa_ids) & set(full_ids))} are given as window and as full layers")
        self.full_kv_pool, self.swa_kv_pool = (
            token_to_kv_pool_class(
                size=tokens,
                page_size=page_size,
                dtype=dtype,
                head_num=head_num,
                head_dim=head_dim,
                layer_num=len(ids),
                device=device,
                enable_memory_saver=enable_memory_saver,
            )
            for tokens, ids in ((size, full_ids), (size_swa, swa_ids))
        )
        self.layers_mapping = {layer_id: (dense, False) for dense, layer_id in enumerate(full_ids)}
        self.layers_mapping.update({layer_id: (dense, True) for dense, layer_id in enumerate(swa_ids)})
        places = {
            layer_id: (self.swa_kv_pool if is_swa else self.full_kv_pool, dense)
            for layer_id, (dense, is_swa) in self.layers_mapping.items()
        }
        super().__init__(size, page_size, dtype, places, device, enable_memory_saver)
        self.size_swa = size_swa
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self._full_ids, self._swa_ids = full_ids, swa_ids
        self._kernels = kernel_choice(self.device)
        self._translation: _Translation | None = None

    @property
    def layout(self) -> PoolLayout:
        """ConfigError: there is no single one."""
        raise ConfigError("SWAKVPool has two slot spaces with a layout each; use slot_spaces")

    @cached_property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """The full space and the window space: tiers below move each with its own slots."""
        return tuple(
            SlotSpace(
                name,
                with_layer_ids(pool.layout, layer_ids),
                pool.size + pool.page_size,
                self.device,
                self.layer_buffers,
            )
            for name, pool, layer_ids in (
                ("full", self.full_kv_pool, self._full_ids),
                ("swa", self.swa_kv_pool, self._swa_ids),
            )
        )

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Take the allocator's mapping, int64 [slots], which the allocator goes on writing in place. ShapeError."""
        slots = self.size + self.page_size
        if full_to_swa_index_mapping.dim() != 1 or full_to_swa_index_mapping.numel() < slots:
            raise ShapeError(
                f"a mapping of {tuple(full_to_swa_index_mapping.shape)} for a pool of {slots} slots "
                f"(size={self.size} and a page of {self.page_size}); give pool and allocator the same size"
            )
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Window slots of full slots, int64 in the shape of `loc`: 0 where there is no peer. One launch."""
        if self.full_to_swa_index_mapping is None:
            raise ConfigError("no mapping is registered; build SWATokenToKVPoolAllocator with kvcache=this pool")
        return translate_slots(self.full_to_swa_index_mapping, loc, self._kernels)

    def set_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """As the base's; `loc` are full slots. What has no window slot goes to the window's sink."""
        layer_id = layer if isinstance(layer, int) else layer.layer_id
        pool, dense_id = self._place(layer_id)
        if pool is self.swa_kv_pool:
            loc = self._window_slots(layer_id, loc)
        pool.set_kv_buffer(dense_id, loc, cache_k, cache_v, k_scale, v_scale)

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        """Rows of all layers in order of their ids: window layers' at the peers of `indices`, the sink's without."""
        self._wait_all()
        full = iter(self.full_kv_pool.get_cpu_copy(indices))
        swa = iter(self.swa_kv_pool.get_cpu_copy(self.translate_loc_from_full_to_swa(indices)))
        return [next(swa if self.layers_mapping[layer_id][1] else full) for layer_id in self.layer_ids]

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to as many full slots and their peers."""
        if len(kv_cache_cpu) != self.layer_num:
            raise ShapeError(f"a copy of {len(kv_cache_cpu)} layers for a pool of {self.layer_num}")
        by_id = dict(zip(self.layer_ids, kv_cache_cpu, strict=True))
        self.full_kv_pool.load_cpu_copy([by_id[layer_id] for layer_id in self._full_ids], indices)
        peers = self.translate_loc_from_full_to_swa(indices)
        self.swa_kv_pool.load_cpu_copy([by_id[layer_id] for layer_id in self._swa_ids], peers)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy full slots and, in window layers, their peers, as if all were read before any is written."""
        self._wait_all()
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)
        self.swa_kv_pool.move_kv_cache(*(self.translate_loc_from_full_to_swa(loc) for loc in (tgt_loc, src_loc)))

    def _window_slots(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """The translation of `loc`, made by the first window layer of a forward.

        The first window layer always translates, so that a CUDA graph captures a translation of its own. A later one
        does where `loc` is another tensor, or it or the mapping was written since.
        """
        mapping = self.full_to_swa_index_mapping
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        state = (_version(loc), 0 if mapping is None else _version(mapping), capturing)
        last = self._translation
        if last is None or layer_id == self._swa_ids[0] or last.loc is not loc or last.state != state:
            last = self._translation = _Translation(loc, state, self.translate_loc_from_full_to_swa(loc))
        return last.slots


def _version(x: torch.Tensor) -> int:
    """How often `x` was written in place; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version
