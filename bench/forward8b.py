"""A forward pass to overlap with transfers. It has the matrix products and the attention of an 8B model's geometry,
over a real pool.

Keys and values are stored in the pool and read through the pool's getters, which wait for their layer. So attention
reads the bytes that the transfer wrote. This is no complete model: there are no embeddings, no rotary positions and no
logits, and all layers share one set of random weights. These weights are 436 MB at 8B, much larger than any cache. So
each layer reads them from memory, as if every layer had its own weights.

    attention   over tokens [0, P + S) at `slots`, P of the prefix and S new; query i sees [0, P + i]

If the slots are consecutive, attention reads the pool in place, like a paged kernel. Otherwise rows are gathered first.
May import torch and hicache.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hicache import ModelGeometry
from hicache.device import KVCache


@dataclass(frozen=True)
class ForwardShape:
    """Sizes of a model with grouped heads. `heads`: number of query heads. `kv_heads`: number of heads of keys and
    values."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    @property
    def geometry(self) -> ModelGeometry:
        return ModelGeometry(layer_num=self.layers, head_num=self.kv_heads, head_dim=self.head_dim)


FULL = ForwardShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336)
TINY = ForwardShape(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128)


@dataclass(frozen=True)
class Suffix:
    """A batch of S new tokens after a prefix, with all data that does not depend on the layer.

    `x` [S, hidden]; `loc` int64 [S]: slots of the new tokens; `slots` int64 [P + S]: slots of all tokens, in order;
    `start`: the first slot if all slots are consecutive and are read in place, else None; `mask`: which keys each query
    sees; `gathered`: buffers for gathered keys and values [P + S, kv_heads, head_dim], empty if slots are read in
    place.
    """

    x: torch.Tensor
    loc: torch.Tensor
    slots: torch.Tensor
    start: int | None
    mask: torch.Tensor
    gathered: tuple[torch.Tensor, ...]


class Forward:
    """Computes `layers` layers, each with norm, attention, norm and gated MLP, over one pool. Input and output are [S,
    hidden].

    Work is queued on the current stream. `__call__` does not wait for the device. Equal inputs give bitwise equal
    outputs.
    """

    def __init__(self, shape: ForwardShape, pool: KVCache, prefix_slots: torch.Tensor, new_slots: torch.Tensor) -> None:
        """`prefix_slots` [P] and `new_slots` [at least S], int64 on the pool's device."""
        self.shape = shape
        self._pool = pool
        self._prefix_slots = prefix_slots
        self._new_slots = new_slots
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._widths = [q, kv, kv]
        generator = torch.Generator(pool.device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator, device=pool.device, dtype=pool.dtype)
            return values.mul_(1 / math.sqrt(rows))

        self._qkv = weight(shape.hidden, q + 2 * kv)
        self._out = weight(q, shape.hidden)
        self._gate_up = weight(shape.hidden, 2 * shape.mlp)
        self._down = weight(shape.mlp, shape.hidden)

    def suffix(self, num_tokens: int) -> Suffix:
        """Return a batch of `num_tokens` new tokens. Every call with the same number returns equal tokens.

        Raises ValueError if there are fewer than `num_tokens` new slots. Waits for the device.
        """
        if not 0 < num_tokens <= len(self._new_slots):
            raise ValueError(f"{num_tokens} new tokens for {len(self._new_slots)} slots")
        device, dtype, shape = self._pool.device, self._pool.dtype, self.shape
        loc = self._new_slots[:num_tokens]
        slots = torch.cat([self._prefix_slots, loc])
        in_one_run = bool((slots.diff() == 1).all())
        start = int(slots[0]) if in_one_run else None
        generator = torch.Generator(device).manual_seed(num_tokens)
        x = torch.randn(num_tokens, shape.hidden, generator=generator, device=device, dtype=dtype)
        rows = (len(slots), shape.kv_heads, shape.head_dim)
        gathered = tuple(torch.empty(rows, device=device, dtype=dtype) for _ in range(2 if start is None else 0))
        return Suffix(x, loc, slots, start, self._mask(num_tokens, len(slots)), gathered)

    @torch.inference_mode()
    def __call__(self, suffix: Suffix) -> torch.Tensor:
        """Compute all layers for `suffix.x`, and return a new tensor. The new keys and values are stored in the
        pool."""
        x = suffix.x
        with self._flash():
            for layer in self._pool.layer_ids:
                x = torch.addmm(x, self._attention(layer, suffix, F.rms_norm(x, x.shape[1:])), self._out)
                gate, up = (F.rms_norm(x, x.shape[1:]) @ self._gate_up).chunk(2, dim=1)
                x = torch.addmm(x, F.silu(gate).mul_(up), self._down)
        return x

    def _attention(self, layer: int, suffix: Suffix, x: torch.Tensor) -> torch.Tensor:
        """Compute the attention of one layer, from [S, hidden] to [S, heads * head_dim]. The projection and the store
        are queued before the first wait for the layer."""
        row = (self.shape.kv_heads, self.shape.head_dim)
        q, k, v = (x @ self._qkv).split(self._widths, dim=1)
        self._pool.set_kv_buffer(layer, suffix.loc, k.unflatten(1, row), v.unflatten(1, row))
        keys = self._rows(suffix, self._pool.get_key_buffer(layer), 0)
        values = self._rows(suffix, self._pool.get_value_buffer(layer), 1)
        queries = q.unflatten(1, (self.shape.heads, self.shape.head_dim))
        q, k, v = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=suffix.mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def _rows(self, suffix: Suffix, buffer: torch.Tensor, which: int) -> torch.Tensor:
        """Return the keys or values of all tokens in order, [P + S, kv_heads, head_dim]. The result is a view of the
        pool's rows, or gathered rows."""
        if suffix.start is not None:
            return buffer[suffix.start : suffix.start + len(suffix.slots)]
        words, into = (t.flatten(1).view(torch.int64) for t in (buffer, suffix.gathered[which]))
        torch.index_select(words, 0, suffix.slots, out=into)
        return suffix.gathered[which]

    def _mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Return a causal mask in which the last query sees the last key. On CUDA it is an object for the flash kernel,
        which needs no mask in memory."""
        if self._pool.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right  # this import takes seconds

            return causal_lower_right(num_queries, num_keys)
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)

    def _flash(self) -> AbstractContextManager[None]:
        """On CUDA, allow only the flash kernel: any other kernel would need a mask of S x (P + S) in memory."""
        if self._pool.device.type == "cuda":
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        return nullcontext()
