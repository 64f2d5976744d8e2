"""Device pools for Ascend NPUs, with rows of MHA or MLA in page-major order. An operation of `torch_npu` writes the
rows.

Without an NPU, the kernels of the other device pools write the same bytes. This is the only module that uses
`torch_npu`.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType

import torch

from hicache.device.memory import allocate_zeros, allocation_region
from hicache.device.mla import MLATokenToKVPool
from hicache.device.rows import KVRows, Row, RowPool
from hicache.errors import ConfigError
from hicache.kernels.store_kv import Scale

try:
    import torch_npu
except ImportError:
    torch_npu = None


def npu_operations(device: torch.device) -> ModuleType | None:
    """Return the module `torch_npu` if `device` is an NPU that can run its operations, otherwise None."""
    npu: ModuleType | None = torch_npu if device.type == "npu" else None
    return npu


class _NpuPool(RowPool):
    """A pool whose size is a number of complete pages, so that operations of `torch_npu` can write it."""

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @cached_property
    def _npu(self) -> ModuleType | None:
        return npu_operations(self.device)

    def load_kv(self, layer_id: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_loc(indices)
        k, v = (pages.flatten(0, 1) for pages in self.get_kv_buffer(layer_id))
        return k[indices], v[indices]


class AscendTokenToKVPool(_NpuPool):
    """A pool for multi-head attention. `kv_buffer`: `[2, layers, pages, page_size, head_num, head_dim]`, first keys,
    then values, zero-filled, in `store_dtype`.

    The getters return a layer's pages, `[pages, page_size, head_num, head_dim]`; slot s is token s % page_size of page
    s // page_size.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        """Raise ConfigError if `v_head_dim` differs from `head_dim`, because keys and values share a tensor. Raise
        OutOfMemory, with a message that names `device_tokens`, if the pool does not fit."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self._positive(head_num=head_num, head_dim=head_dim)
        if v_head_dim not in (None, head_dim):
            raise ConfigError(f"v_head_dim={v_head_dim}: keys and values share a tensor, set it to head_dim={head_dim}")
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim
        shape = (2, layer_num, self.num_pages, page_size, head_num, head_dim)
        with allocation_region(enable_memory_saver):
            (self.kv_buffer,) = allocate_zeros([shape], self.store_dtype, self.device)
        self.k_buffer, self.v_buffer = self.kv_buffer
        row = (head_num, head_dim)
        rows = [Row("k", self.store_dtype, row), Row("v", self.store_dtype, row)]
        self._declare(rows, [self.k_buffer.flatten(1, 2), self.v_buffer.flatten(1, 2)])

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer, `[pages, page_size, head_num, head_dim]`, after waiting until the layer is
        loaded."""
        return self._as_read(self.k_buffer[self._wait_for(layer_id)])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer, `[pages, page_size, head_num, head_dim]`, after waiting until the layer is
        loaded."""
        return self._as_read(self.v_buffer[self._wait_for(layer_id)])

    def _store(self, index: int, loc: torch.Tensor, rows: KVRows) -> None:
        if self._npu is None:
            super()._store(index, loc, rows)
            return
        self._npu._npu_reshape_and_cache(
            key=self._converted(rows.k, rows.k_scale).contiguous(),
            value=self._converted(rows.v, rows.v_scale).contiguous(),
            key_cache=self.k_buffer[index],
            value_cache=self.v_buffer[index],
            slot_indices=loc.to(torch.int32),
        )


class AscendMLAPagedTokenToKVPool(_NpuPool, MLATokenToKVPool):
    """A pool for MLA whose `kv_buffer` is `[layers, pages, page_size, rank + rope]`.

    `get_key_buffer` returns a layer's pages, `[pages, page_size, rank + rope]`. `get_value_buffer` returns their first
    `rank` columns.
    """

    def _arrange(self, latent: torch.Tensor) -> torch.Tensor:
        return latent.view(self.layer_num, self.num_pages, self.page_size, self.kv_cache_dim)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the latent rows of a layer, `[pages, page_size, rank + rope]`, after waiting until the layer is
        loaded."""
        return self._as_read(self.kv_buffer[self._wait_for(layer_id)])

    def _store_rows(self, index: int, loc: torch.Tensor, rows: torch.Tensor, scale: Scale) -> None:
        if self._npu is None:
            super()._store_rows(index, loc, rows, scale)
        else:
            self._cache_rows(self._npu, index, loc, self._converted(rows, scale))

    def _store_parts(self, index: int, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        if self._npu is None:
            super()._store_parts(index, loc, nope, rope)
        else:
            self._cache_rows(self._npu, index, loc, torch.cat((nope, rope), dim=-1))

    def _cache_rows(self, npu: ModuleType, index: int, loc: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows `[tokens, 1, rank + rope]` with the operation of `torch_npu` for a single cache tensor."""
        npu._npu_reshape_and_cache_siso(
            key=rows.contiguous(), key_cache=self.kv_buffer[index].unsqueeze(2), slot_indices=loc.to(torch.int32)
        )
