"""What the tests of the device pools share: random contents, and what every pool owes its base, whatever it stores."""

from __future__ import annotations

import torch

from hicache.device import KVCache


class Recorder:
    """A counter that notes what it was asked to wait for."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, threshold: int) -> None:
        self.layers.append(threshold)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scatter_pages(pool: KVCache, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of two disjoint sets of whole pages in random order, `num_tokens` each, which may end within a page."""
    page = pool.page_size
    order = torch.randperm(pool.size // page, generator=torch.Generator().manual_seed(1)) + 1
    slots = (order[:, None] * page + torch.arange(page)).reshape(-1).to(device)
    half = -(-num_tokens // page) * page
    return slots[:num_tokens], slots[half : half + num_tokens]


def fill(pool: KVCache) -> None:
    """Random bits in every buffer, small enough that no float is a NaN."""
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


def check_copies_and_moves(pool: KVCache, device: str) -> None:
    """CPU copies come back at other slots, and moves read before they write, in every buffer of every layer, of pools
    whose rows all belong to tokens."""
    fill(pool)
    before = snapshot(pool)
    source, target = scatter_pages(pool, 10, device)
    copy = pool.get_cpu_copy(source)
    assert len(copy) == pool.layer_num and all(x.device.type == "cpu" for layer in copy for c in layer for x in c)
    pool.load_cpu_copy(copy, target)
    for layer in before:
        for buffer in layer:
            buffer[target] = buffer[source].clone()
    assert same(snapshot(pool), before)
    tgt, src = torch.cat((source[1:], source[:1])), source
    pool.move_kv_cache(tgt, src)
    for layer in before:
        for buffer in layer:
            buffer[tgt] = buffer[src].clone()
    assert same(snapshot(pool), before)


def check_description(pool: KVCache) -> None:
    """The layout tells names, dtypes, shapes and bytes of the tensors; addresses and bytes a page are theirs."""
    layout = pool.layout
    assert layout.layers == pool.layer_ids and layout.device_page_size == pool.page_size
    total = 0
    for layer_id in pool.layer_ids:
        specs, buffers = layout.specs_of(layer_id), pool.layer_buffers(layer_id)
        assert [(s.dtype, s.shape) for s in specs] == [(b.dtype, tuple(b.shape[1:])) for b in buffers]
        total += sum(b.nbytes for b in buffers)
    assert pool.mem_usage == total / (1 << 30)
    kinds = list(zip(*(pool.layer_buffers(layer_id) for layer_id in pool.layer_ids), strict=True))
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    assert pointers == [b.data_ptr() for kind in kinds for b in kind]
    assert lengths == [b.nbytes for kind in kinds for b in kind]
    assert sum(page_bytes) == layout.page_bytes(pool.page_size)
