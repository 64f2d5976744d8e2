"""Pools of random rows, and the bytes that the device and the host must have after pages have moved."""

from __future__ import annotations

from typing import Protocol

import torch

from hicache.kernels.page_copy import PageMover
from kernel_case import random_bits

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
Buffers = list[list[torch.Tensor]]
# For each layer, the (row shape, dtype, tokens that share a row) of each buffer.
POOLS = {
    "mha": [[((2, 16), BF16, 1), ((2, 16), BF16, 1)]] * 3,
    "odd rows of fp8": [[((1, 7), U8, 1), ((1, 7), U8, 1)]] * 3,
    "k and v differ": [[((2, 12), BF16, 1), ((2, 8), BF16, 1)]] * 3,
    "interleaved sizes": [[((6,), F32, 1), ((3,), F32, 1), ((6,), F32, 1)]] * 2,
    "long rows": [[((9, 128), F32, 1), ((8, 128), BF16, 1)]],
    "latent": [[((1, 72), BF16, 1)]] * 4,
    "layers differ": [[((2, 8), BF16, 1)] * 2, [((1, 5), U8, 1)], [((2, 8), BF16, 1)] * 2],
    "rows of device pages": [[((2, 6), U8, 1), ((52,), U8, 4)]] * 3,
    "spans differ": [[((2, 6), U8, 1), ((39,), U8, 3)]] * 2 + [[((39,), U8, 3), ((2, 6), U8, 1)]],
}
# By name: the range of layers that a call moves, given the number of layers.
LAYERS = {"all": lambda n: (0, n), "upper half": lambda n: (n // 2, n - n // 2), "last": lambda n: (n - 1, 1)}


class Copier(Protocol):
    """An object that moves pages between a pool and host pages: `ZeroCopyMover`, or a `PageMover` through staging."""

    def store(self, slots: torch.Tensor, pages: torch.Tensor, first_layer: int, num_layers: int) -> None: ...

    def load(self, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None: ...


class Pool:
    """Buffers of random bits on a device, with `slots` tokens. `spans`: how many tokens share a row of each buffer."""

    def __init__(self, buffers: Buffers, device: str, spans: list[list[int]] | None = None) -> None:
        self.device, self.spans = device, spans or [[1] * len(layer) for layer in buffers]
        self.buffers = [[b.to(device) for b in layer] for layer in buffers]
        self.num_layers = len(buffers)
        self.page = max(span for layer in self.spans for span in layer)  # tokens of a device page
        self.num_pages = len(buffers[0][0]) * self.spans[0][0] // self.page

    @classmethod
    def named(cls, name: str, device_pages: int, device: str) -> Pool:
        page = max(span for layer in POOLS[name] for *_, span in layer)
        buffers = [
            [
                random_bits(device_pages * page // span, *shape, dtype=dtype, seed=10 * index + b)
                for b, (shape, dtype, span) in enumerate(layer)
            ]
            for index, layer in enumerate(POOLS[name])
        ]
        return cls(buffers, device, [[span for *_, span in layer] for layer in POOLS[name]])

    def mover(self, page_tokens: int, kernels: str) -> PageMover:
        return PageMover(self.buffers, page_tokens, kernels, self.spans)  # type: ignore[arg-type]

    def slots(self, device_pages: torch.Tensor) -> torch.Tensor:
        """The slots of whole device pages, in order."""
        return (device_pages[:, None] * self.page + torch.arange(self.page)).reshape(-1)

    def rows(self) -> list[list[list[bytes]]]:
        """The bytes of each row, as [layer][buffer][row]."""
        return [[[bytes(row.view(U8).flatten().tolist()) for row in b.cpu()] for b in layer] for layer in self.buffers]

    def ids(self, layer: int, buffer: int, slots: list[int]) -> list[int]:
        """The distinct rows of a buffer that hold `slots`."""
        span = self.spans[layer][buffer]
        return [slot // span for slot in slots if slot % span == 0]

    def host_pages(self, slots: list[int], page_tokens: int, first: int, count: int) -> list[bytes]:
        """The part of each host page that these layers fill, in the order [layer][buffer][row]."""
        rows = self.rows()
        return [
            b"".join(
                rows[layer][b][i]
                for layer in range(first, first + count)
                for b in range(len(rows[layer]))
                for i in self.ids(layer, b, slots[start : start + page_tokens])
            )
            for start in range(0, len(slots), page_tokens)
        ]


def page_bytes(host: torch.Tensor) -> list[bytes]:
    """The bytes of each host page, after all devices have finished writing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [bytes(row) for row in host.cpu().tolist()]


def pinned(host: torch.Tensor, device: str) -> torch.Tensor:
    """`host`, pinned if a pool on `device` needs that to access it."""
    return host.pin_memory() if device == "cuda" else host


def check_store_and_load(
    copier: Copier, pool: Pool, mover: PageMover, host: torch.Tensor, num_pages: int, layers: str = "all"
) -> None:
    """Store the rows of `num_pages` pages from random slots to random host pages, and load them to other slots. All
    other rows and bytes must stay unchanged."""
    generator = torch.Generator().manual_seed(num_pages)
    first, count = LAYERS[layers](pool.num_layers)
    begin, size = mover.group_bytes(0, first), mover.group_bytes(first, count)
    order = torch.randperm(pool.num_pages, generator=generator)
    of_pool = num_pages * mover.page_tokens // pool.page
    source, target = pool.slots(order[:of_pool]), pool.slots(order[-of_pool:])
    pages = torch.randperm(len(host), generator=generator)[:num_pages]
    rows, before = pool.rows(), page_bytes(host)

    copier.store(source.to(pool.device), pages.to(pool.device), first, count)
    after = list(before)
    for page, part in zip(
        pages.tolist(), pool.host_pages(source.tolist(), mover.page_tokens, first, count), strict=True
    ):
        after[page] = before[page][:begin] + part + before[page][begin + size :]
    assert page_bytes(host) == after != before
    assert pool.rows() == rows

    copier.load(pages.to(pool.device), target.to(pool.device), first, count)
    for layer in range(first, first + count):
        for b, of_buffer in enumerate(rows[layer]):
            moved = [of_buffer[i] for i in pool.ids(layer, b, source.tolist())]
            for i, row in zip(pool.ids(layer, b, target.tolist()), moved, strict=True):
                of_buffer[i] = row
    assert pool.rows() == rows
    assert page_bytes(host) == after
