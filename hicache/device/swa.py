"""The pool of models with full and sliding-window attention: a full pool, and a smaller pool for window layers.

    full slots    [0, size + page_size)        held by requests and trees; full-attention layers store there
    window slots  [0, size_swa + page_size)    window layers store there; a full slot is mapped to one of them, or to 0

The pool owns both inner pools; the allocator owns the mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hicache.device.base import KVCache, SlotSpace
from hicache.device.mapped import MappedKVPool, ascending, with_layer_ids
from hicache.device.mha import MHATokenToKVPool
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.swa import translate_slots
from hicache.layout import PoolLayout
from hicache.tiers import FULL, SWA


@dataclass(frozen=True)
class _Translation:
    """The window slots to which the full slots `loc` of a forward pass are mapped. They are valid while `state` is
    unchanged."""

    loc: torch.Tensor
    state: tuple[int, int, bool]
    slots: torch.Tensor


class SWAKVPool(MappedKVPool):
    """A pool with two inner pools under global layer ids: `full_kv_pool` for layers with full attention, and
    `swa_kv_pool` for layers with a window.

    Callers always pass full slots. For a window layer, the pool translates them to window slots. If a forward pass
    writes its layers in ascending order, the first window layer translates `loc` and the later window layers reuse the
    result. `layers_mapping[layer_id]` is (dense id, whether it is a window layer). Each of the two `slot_spaces` has
    its own layout.
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
        *,
        v_head_dim: int | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
    ) -> None:
        """Allocate both inner pools. `size`, `size_swa`: numbers of full slots and of window slots. `swa_head_num`,
        `swa_head_dim` and `swa_v_head_dim` are sizes of window layers, if they differ from those of full layers.

        Raises ConfigError for layer ids that are missing, duplicate or of both kinds, and for
        `enable_kvcache_transpose`.
        """
        if enable_kvcache_transpose:
            raise ConfigError("enable_kvcache_transpose=True: keys and values are stored by token; set it to False")
        swa_ids = ascending(swa_attention_layer_ids, "swa_attention_layer_ids")
        full_ids = ascending(full_attention_layer_ids, "full_attention_layer_ids")
        if set(swa_ids) & set(full_ids):
            raise ConfigError(f"layers {sorted(set(swa_ids) & set(full_ids))} are given as window and as full layers")
        full_heads = (head_num, head_dim, v_head_dim)
        swa_heads = (swa_head_num or head_num, swa_head_dim or head_dim, swa_v_head_dim or swa_head_dim or v_head_dim)
        self.full_kv_pool, self.swa_kv_pool = (
            token_to_kv_pool_class(
                tokens, page_size, dtype, *heads[:2], len(ids), device, enable_memory_saver, v_head_dim=heads[2]
            )
            for tokens, heads, ids in ((size, full_heads, full_ids), (size_swa, swa_heads, swa_ids))
        )
        self.layers_mapping = {layer_id: (dense, False) for dense, layer_id in enumerate(full_ids)}
        self.layers_mapping.update({layer_id: (dense, True) for dense, layer_id in enumerate(swa_ids)})
        layers = {
            layer_id: (self.swa_kv_pool if is_swa else self.full_kv_pool, dense)
            for layer_id, (dense, is_swa) in self.layers_mapping.items()
        }
        super().__init__(size, page_size, dtype, layers, device, enable_memory_saver)
        self.size_swa = size_swa
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self._full_ids = full_ids
        self._swa_ids = swa_ids
        self._translation: _Translation | None = None

    @property
    def layout(self) -> PoolLayout:
        """Raise ConfigError, because the pool has two layouts."""
        raise ConfigError("SWAKVPool has two slot spaces with a layout each; use slot_spaces")

    @cached_property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """The space of full slots and the space of window slots, which are transferred separately."""
        return tuple(
            SlotSpace(
                name,
                with_layer_ids(pool.layout, layer_ids),
                pool.size + pool.page_size,
                self.device,
                self.layer_buffers,
            )
            for name, pool, layer_ids in (
                (FULL, self.full_kv_pool, self._full_ids),
                (SWA, self.swa_kv_pool, self._swa_ids),
            )
        )

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Use the allocator's mapping, int64 [slots], which the allocator updates in place. Raises ShapeError if the
        mapping is too short."""
        slots = self.size + self.page_size
        if full_to_swa_index_mapping.dim() != 1 or full_to_swa_index_mapping.numel() < slots:
            raise ShapeError(
                f"a mapping of {tuple(full_to_swa_index_mapping.shape)} for a pool of {slots} slots "
                f"(size={self.size} and a page of {self.page_size}); give pool and allocator the same size"
            )
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def compile(self) -> None:
        """Compile the kernel that translates any number of slots."""
        self.translate_loc_from_full_to_swa(torch.zeros(1, dtype=torch.int64, device=self._tensor_device))

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the window slots of full slots, int64 in the shape of `loc`, with 0 for unmapped slots. Needs one
        kernel launch."""
        if self.full_to_swa_index_mapping is None:
            raise ConfigError("no mapping is registered; build SWATokenToKVPoolAllocator with kvcache=this pool")
        return translate_slots(self.full_to_swa_index_mapping, loc, self._kernels)

    def _slots_in(self, pool: KVCache, slots: torch.Tensor) -> torch.Tensor:
        return self.translate_loc_from_full_to_swa(slots) if pool is self.swa_kv_pool else slots

    def _slots_of_layer(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the slots at which a layer stores `loc`. For a window layer, these are window slots, with 0 for
        unmapped slots.

        The first window layer always translates `loc`, so that a CUDA graph captures the translation. A later layer
        translates `loc` again only if `loc` is another tensor than before, or if `loc` or the mapping was written
        since.
        """
        if not self.layers_mapping[layer_id][1]:
            return loc
        mapping = self.full_to_swa_index_mapping
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        state = (_version(loc), 0 if mapping is None else _version(mapping), capturing)
        last = self._translation
        if last is None or layer_id == self._swa_ids[0] or last.loc is not loc or last.state != state:
            last = self._translation = _Translation(loc, state, self.translate_loc_from_full_to_swa(loc))
        return last.slots


def _version(x: torch.Tensor) -> int:
    """Return the number of in-place writes to `x`. Returns 0 for tensors of inference mode, because torch does not
    count writes to them."""
    return 0 if x.is_inference() else x._version
