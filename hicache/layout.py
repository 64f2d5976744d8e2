"""Layouts of pools and geometry of models: the bytes that a token, a device page or a request stores, as pure data.

A device pool declares a `PoolLayout`. The host pool, the transfer engine, the page codec and the capacity computation
read this layout. A page of `page_tokens` tokens on host and disk is one block, `[layer][buffer][row]`:

    layer l of a page   [layer_offset(l), layer_offset(l) + layer_bytes(l))         contiguous, for the copy engine
    buffer b of layer l the rows of `specs_of(l)[b]`, one per token or device page, after the rows of buffer b - 1
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from hicache.errors import ConfigError

Per = Literal["token", "page", "request"]
# A hybrid layer has full attention and a recurrent state. A stateless layer stores nothing.
LayerKind = Literal["full", "window", "chunked", "recurrent", "hybrid", "stateless"]


@dataclass(frozen=True)
class BufferSpec:
    """A kind of row that layers store.

    `shape`: the shape of one row. `per`: whether a row is stored for each token, device page or request. `layers`:
    global ids of the layers that have this buffer.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per: Per
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.per not in ("token", "page", "request"):
            raise ConfigError(f"buffer {self.name}: per={self.per!r} must be 'token', 'page' or 'request'")
        if not self.layers or min(self.shape, default=0) < 1:
            raise ConfigError(f"buffer {self.name}: needs at least one layer and a positive shape, got {self.shape}")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, page_tokens: int, device_page_size: int) -> int:
        """Return the number of rows of one layer in a page of `page_tokens` tokens. Raises ConfigError unless the page
        consists of complete device pages."""
        if self.per == "token":
            return page_tokens
        if self.per == "page":
            if page_tokens % device_page_size:
                raise ConfigError(
                    f"buffer {self.name} has a row for each device page of page_size={device_page_size} tokens, and "
                    f"{page_tokens} tokens are not a multiple of that; set host_page_size to a multiple of page_size"
                )
            return page_tokens // device_page_size
        return 1


@dataclass(frozen=True)
class PoolLayout:
    """All buffers of a pool. `device_page_size`: the number of tokens of a device page."""

    buffers: tuple[BufferSpec, ...]
    device_page_size: int

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Global ids of the layers of all buffers, ascending."""
        return tuple(sorted({layer for spec in self.buffers for layer in spec.layers}))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def specs_of(self, layer: int) -> tuple[BufferSpec, ...]:
        return tuple(spec for spec in self.buffers if layer in spec.layers)

    def spans_of(self, layer: int) -> tuple[int, ...]:
        """Return the number of slots that share a row, for each buffer of a layer (a global id)."""
        return tuple(self.device_page_size if spec.per == "page" else 1 for spec in self.specs_of(layer))

    def layer_bytes(self, layer: int, page_tokens: int) -> int:
        """Return the bytes of one layer (a global id) of one page."""
        return sum(s.rows(page_tokens, self.device_page_size) * s.row_bytes for s in self.specs_of(layer))

    def layer_offset(self, index: int, page_tokens: int) -> int:
        """Return the byte offset of the `index`-th layer within a page; the end of the page if `index` is
        `num_layers`."""
        return sum(self.layer_bytes(layer, page_tokens) for layer in self.layers[:index])

    def page_bytes(self, page_tokens: int) -> int:
        return self.layer_offset(self.num_layers, page_tokens)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token over all layers: a row per page counts in proportion, a row per request does not count."""
        rate = {"token": 1.0, "page": 1.0 / self.device_page_size, "request": 0.0}
        return math.ceil(sum(s.row_bytes * len(s.layers) * rate[s.per] for s in self.buffers))

    def digest(self) -> bytes:
        """Return SHA-256 over everything that determines the meaning of a page's bytes."""
        fields = [[s.name, str(s.dtype), list(s.shape), s.per, list(s.layers)] for s in self.buffers]
        paged = any(spec.per == "page" for spec in self.buffers)
        text = json.dumps({"buffers": fields, "device_page_size": self.device_page_size if paged else None})
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class StateGeometry:
    """Shapes and dtypes of the recurrent state of one layer for one request: convolution windows and a temporal
    state."""

    conv: tuple[tuple[int, ...], ...]
    temporal: tuple[int, ...]
    conv_dtype: torch.dtype
    temporal_dtype: torch.dtype

    def __post_init__(self) -> None:
        if min((size for shape in (*self.conv, self.temporal) for size in shape), default=0) < 1 or not self.temporal:
            raise ConfigError(f"a state of conv={self.conv}, temporal={self.temporal}: every size must be at least 1")


@dataclass(frozen=True)
class LatentGeometry:
    """The row of a token in a layer of multi-head latent attention: `rank` elements, from which the keys and values of
    all heads are expanded, and `rope` elements, the rotary part of the keys, shared by all heads."""

    rank: int
    rope: int

    def __post_init__(self) -> None:
        if min(self.rank, self.rope) < 1:
            raise ConfigError(f"a latent row of rank={self.rank}, rope={self.rope}: both must be at least 1")

    @property
    def row_dim(self) -> int:
        return self.rank + self.rope


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer's keys and values, and the elements of a key and of a value in each head."""

    head_num: int
    head_dim: int
    v_head_dim: int

    @property
    def row_dims(self) -> int:
        """Elements that a token stores in a layer."""
        return self.head_num * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class ModelGeometry:
    """The layers of a model, from which the factory builds its pools.

    layer_kinds      one for each layer; () means full attention in every layer
    window           tokens that a window layer attends to, including the current one
    dtype            dtype of the stored rows; None: unknown
    latent           the latent row that replaces keys and values, in `head_dim` elements; `head_num` is 1
    chunk            in chunked layers, tokens of [i * chunk, (i + 1) * chunk) attend only to each other; all are kept
    max_context_len  longest sequence; in a longer sequence, the keys of all tokens would change; 0: no limit
    swa_...          heads of window layers, if they differ from `head_num`, `head_dim`, `v_head_dim`
    kv_sources       for each layer, the layer whose keys and values it reads: the layer itself if it stores keys and
                     values; () means that every layer stores its own keys and values

    Raises ConfigError if the fields contradict each other.
    """

    layer_num: int
    head_num: int
    head_dim: int
    v_head_dim: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    window: int = 0
    state: StateGeometry | None = None
    dtype: torch.dtype | None = None
    latent: LatentGeometry | None = None
    chunk: int = 0
    max_context_len: int = 0
    swa_head_num: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    kv_sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = sorted({str(kind) for kind in self.layer_kinds} - {*get_args(LayerKind)})
        if wrong:
            raise ConfigError(f"layer_kinds contains {wrong}; use one of {get_args(LayerKind)}")
        if len(self.layer_kinds) not in (0, self.layer_num):
            raise ConfigError(f"layer_kinds has {len(self.layer_kinds)} entries for layer_num={self.layer_num} layers")
        if len(self.kv_sources) not in (0, self.layer_num):
            raise ConfigError(f"kv_sources has {len(self.kv_sources)} entries for layer_num={self.layer_num} layers")
        if self.window < 0 or (self.window > 0) != bool(self.window_layers):
            raise ConfigError(f"window={self.window} with window layers {list(self.window_layers)}: give both or none")
        if self.chunk < 0 or (self.chunk > 0) != ("chunked" in self.kinds):
            raise ConfigError(f"chunk={self.chunk} with layers of kinds {sorted({*self.kinds})}: give both or none")
        if (self.state is not None) != bool(self.recurrent_layers):
            raise ConfigError(f"state={self.state} with recurrent layers {list(self.recurrent_layers)}: both or none")
        row = (self.head_num, self.head_dim, self.v_head_dim)
        if self.latent is not None and (row != (1, self.latent.row_dim, None) or self.window_layers):
            raise ConfigError(
                f"{self.latent} with head_num, head_dim, v_head_dim = {row} and window layers "
                f"{list(self.window_layers)}: latent rows need 1, {self.latent.row_dim}, None and no windows"
            )

        for layer, source in enumerate(self.sources):
            if not 0 <= source <= layer or self.sources[source] != source or self.kinds[source] != self.kinds[layer]:
                raise ConfigError(
                    f"kv_sources={self.kv_sources}: layer {layer} must read its own keys and values or those of an "
                    "earlier layer of its kind that stores them"
                )

    @property
    def full_heads(self) -> HeadShape:
        """Heads of the layers with full attention that store keys and values."""
        return HeadShape(self.head_num, self.head_dim, self.v_head_dim or self.head_dim)

    @property
    def window_heads(self) -> HeadShape:
        """Heads of the window layers."""
        full, head_dim = self.full_heads, self.swa_head_dim
        return HeadShape(
            self.swa_head_num or full.head_num,
            head_dim or full.head_dim,
            self.swa_v_head_dim or head_dim or full.v_head_dim,
        )

    @property
    def sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads, by global id."""
        return self.kv_sources or tuple(range(self.layer_num))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, by global id."""
        full: LayerKind = "full"
        return self.layer_kinds or (full,) * self.layer_num

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Global ids of the layers that store their own keys and values of all tokens."""
        return self._of_kind("full", "chunked", "hybrid")

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Global ids of the window layers that store their own keys and values."""
        return self._of_kind("window")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Global ids of the layers with a recurrent state."""
        return self._of_kind("recurrent", "hybrid")

    def _of_kind(self, *kinds: LayerKind) -> tuple[int, ...]:
        found = (layer for layer, kind in enumerate(self.kinds) if kind in kinds)
        return tuple(layer for layer in found if not self.kv_sources or self.kv_sources[layer] == layer)
