"""Helpers of the tests of the device pools: they fill pools with random contents, and make the checks that apply to
every pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hicache import device as pools
from hicache.device import KVCache

# By kind: the class of the pool, and the sizes of its rows.
KINDS: dict[str, tuple[type[KVCache], dict[str, object]]] = {
    "mha": (pools.MHATokenToKVPool, {"head_num": 2, "head_dim": 8, "v_head_dim": 5}),
    "lazy mha": (pools.MHATokenToKVPool, {"head_num": 2, "head_dim": 8, "v_head_dim": 5, "lazy": True}),
    "mla": (pools.MLATokenToKVPool, {"kv_lora_rank": 24, "qk_rope_head_dim": 8}),
    "nsa": (pools.NSATokenToKVPool, {"kv_lora_rank": 24, "qk_rope_head_dim": 8}),
    "double sparse": (pools.DoubleSparseTokenToKVPool, {"head_num": 2, "head_dim": 8, "heavy_channel_num": 3}),
    "ascend mha": (pools.AscendTokenToKVPool, {"head_num": 2, "head_dim": 8}),
    "ascend mla": (pools.AscendMLAPagedTokenToKVPool, {"kv_lora_rank": 24, "qk_rope_head_dim": 8}),
    "int8": (pools.QuantizedKVCache, {"head_num": 2, "head_dim": 8, "v_head_dim": 12, "kv_dtype": "int8"}),
    "fp8": (pools.QuantizedKVCache, {"head_num": 2, "head_dim": 8, "v_head_dim": 12, "kv_dtype": "fp8"}),
}


def pool_of(kind: str, device: str = "cpu", **given: object) -> Any:
    """A pool of 3 layers and 32 tokens, in pages of 4 tokens, unless `given` changes these sizes."""
    pool_class, sizes = KINDS[kind]
    common = {"size": 32, "page_size": 4, "dtype": torch.bfloat16, "layer_num": 3, "enable_memory_saver": False}
    return pool_class(**{**common, "device": device, **sizes, **given})


@dataclass
class Layer:
    """The object that a model passes instead of a layer's id."""

    layer_id: int


@dataclass(eq=False)
class Request:
    """The attributes of a request that the request tables use."""

    req_pool_idx: int | None = None
    mamba_pool_idx: torch.Tensor | None = None
    mamba_checkpoint_idx: torch.Tensor | None = None


class Recorder:
    """A counter that records the layers that a caller waits for."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, threshold: int) -> None:
        self.layers.append(threshold)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scatter_pages(pool: KVCache, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of two disjoint sets of pages in random order, `num_tokens` slots each; the last page may be incomplete."""
    page = pool.page_size
    order = torch.randperm(pool.size // page, generator=torch.Generator().manual_seed(1)) + 1
    slots = (order[:, None] * page + torch.arange(page)).reshape(-1).to(device)
    half = -(-num_tokens // page) * page
    return slots[:num_tokens], slots[half : half + num_tokens]


def fill(pool: KVCache) -> None:
    """Fill every buffer with random bits that are small enough that no float is a NaN."""
    generator = torch.Generator().manual_seed(11)
    for layer_id in pool.layer_ids:
        for buffer in pool.layer_buffers(layer_id):
            shape = (*buffer.shape[:-1], buffer.shape[-1] * buffer.element_size())
            bits = torch.randint(0, 0x60, shape, dtype=torch.uint8, generator=generator)
            buffer.copy_(bits.to(buffer.device).view(buffer.dtype))


def snapshot(pool: KVCache) -> list[list[torch.Tensor]]:
    return [[b.clone().view(torch.uint8) for b in pool.layer_buffers(layer_id)] for layer_id in pool.layer_ids]


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for i, j in zip(a, b, strict=True) for x, y in zip(i, j, strict=True))
