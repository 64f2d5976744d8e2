"""Pools of random rows, and host pages of theirs as plain bytes."""

from __future__ import annotations

import torch

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
# For each layer, the (row shape, dtype) of each buffer.
POOLS = {
    "mha": [[((2, 16), BF16), ((2, 16), BF16)]] * 3,
    "odd rows of fp8": [[((1, 7), U8), ((1, 7), U8)]] * 3,
    "k and v differ": [[((2, 12), BF16), ((2, 8), BF16)]] * 3,
    "interleaved sizes": [[((6,), F32), ((3,), F32), ((6,), F32)]] * 2,
    "long rows": [[((9, 128), F32), ((8, 128), BF16)]],
    "latent": [[((1, 72), BF16)]] * 4,
    "layers differ": [[((2, 8), BF16), ((2, 8), BF16)], [((1, 5), U8)], [((2, 8), BF16), ((2, 8), BF16)]],
}


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=U8, generator=torch.Generator().manual_seed(seed))


def build(name: str, slots: int, device: str) -> list[list[torch.Tensor]]:
    """Buffers of random bits, `[slots, ...row]`."""
    pool = []
    for index, layer in enumerate(POOLS[name]):
        buffers = []
        for b, (shape, dtype) in enumerate(layer):
            width = shape[-1] * dtype.itemsize
            buffers.append(random_bytes(slots, *shape[:-1], width, seed=10 * index + b).view(dtype).to(device))
        pool.append(buffers)
    return pool


def rows_of(pool: list[list[torch.Tensor]]) -> list[list[list[bytes]]]:
    """[layer][buffer][slot] -> the bytes of a row."""
    return [[[bytes(row.view(U8).flatten().tolist()) for row in b.cpu()] for b in layer] for layer in pool]


def host_pages(
    rows: list[list[list[bytes]]], slots: list[int], page_tokens: int, first: int, count: int
) -> list[bytes]:
    """The group's part of each page: [layer][buffer][token][row]."""
    pages = []
    for p in range(len(slots) // page_tokens):
        tokens = slots[p * page_tokens : (p + 1) * page_tokens]
        pages.append(b"".join(b[s] for layer in rows[first : first + count] for b in layer for s in tokens))
    return pages


def page_bytes(staging: torch.Tensor) -> list[bytes]:
    return [bytes(row) for row in staging.cpu().tolist()]
