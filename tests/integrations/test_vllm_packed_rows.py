"""Copies between vLLM's cache blocks and packed rows of its CPU tier, without vLLM."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import TransferError
from hicache.host.arena import PinnedRows
from hicache.integrations.vllm.block_shapes import HeadLayout, shapes_of
from hicache.integrations.vllm.offloading_copies import chunk_blocks
from hicache.integrations.vllm.packed_rows import Misfits, PackedChunkLink
from hicache.integrations.vllm.row_packing import RowPacking, format_of, part_bytes_of
from hicache.kernels.pack import FOUR_BITS

NUM_BLOCKS, NUM_ROWS = 24, 9
HND, NHD, UNKNOWN = HeadLayout(128), HeadLayout(128, is_token_first=True), HeadLayout()


@dataclass(frozen=True)
class Cache:
    """The shape of a cache. `channels`: elements of a token in each tensor. `gap`: bytes between blocks."""

    per_chunk: int = 2
    tokens: int = 8
    channels: tuple[int, ...] = (256, 256, 256)
    heads: tuple[HeadLayout, ...] = (HND, HND, HND)
    bits: str = "4"
    gap: int = 0

    @property
    def widths(self) -> list[int]:
        return [2 * self.tokens * channels for channels in self.channels]


CACHES = {
    "heads": Cache(),
    "one block a chunk": Cache(per_chunk=1, tokens=16),
    "tokens first": Cache(heads=(NHD,) * 3),
    "unknown": Cache(heads=(UNKNOWN,) * 3, bits="3"),
    "heads of 80": Cache(channels=(320,), heads=(HeadLayout(160),)),
    "heads of 112": Cache(channels=(448,), heads=(HeadLayout(224, is_token_first=True),)),
    "latents": Cache(channels=(576,), heads=(HeadLayout(576),)),
    "small heads": Cache(channels=(64,), heads=(HeadLayout(32),), per_chunk=4),
    "two shapes": Cache(channels=(256, 320, 256), heads=(HND, HeadLayout(160), HND)),
    "blocks apart": Cache(gap=2048),
}


class TransferFixture:
    """The cache of one of two workers, its part of the rows in shared memory, and the expected contents of both."""

    def __init__(self, device: str, cache: Cache) -> None:
        self.cache, self.per_chunk, self.on = cache, cache.per_chunk, torch.device(device)
        format = format_of(cache.bits, is_cuda=False)
        assert format is not None
        tokens = cache.tokens * cache.per_chunk
        part_bytes = part_bytes_of(format, sum(cache.channels), tokens, cache.per_chunk)
        assert part_bytes < cache.per_chunk * sum(cache.widths)
        self.packing = RowPacking(format, part_bytes, 2)
        row_bytes = -(-2 * part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.shared = torch.frombuffer(mmap.mmap(-1, NUM_ROWS * row_bytes), dtype=torch.uint8).view(NUM_ROWS, row_bytes)
        self.pins = PinnedRows(self.shared, setting="cpu_bytes_to_use") if self.on.type == "cuda" else None
        self.host = self.shared[:, part_bytes : 2 * part_bytes]
        self.shared.fill_(7)
        self.tensors = [self._tensor(width) for width in cache.widths]
        self.misfits = Misfits()
        self.link = self.linked()
        self.blocks = np.zeros((NUM_BLOCKS, sum(cache.widths)), np.uint8)
        self.is_random = np.zeros(NUM_BLOCKS, bool)  # by block: whether its chunk does not fit when packed
        # By row: the bytes of the blocks of its chunk, None for a block that was not stored. `is_raw`: whether the
        # chunk of a row does not fit when packed.
        self.rows: list[list[np.ndarray | None]] = [[None] * self.per_chunk for _ in range(NUM_ROWS)]
        self.is_raw = [False] * NUM_ROWS

    def _tensor(self, width: int) -> torch.Tensor:
        complete = torch.zeros(NUM_BLOCKS, width + self.cache.gap, dtype=torch.uint8, device=self.on)
        return complete[:, :width]

    def linked(self) -> PackedChunkLink:
        shapes = [
            shapes_of(tensor.shape[1], tensor.stride(0), self.cache.tokens, heads, self.packing.format, self.per_chunk)
            for tensor, heads in zip(self.tensors, self.cache.heads, strict=True)
        ]
        return PackedChunkLink(
            self.tensors,
            shapes,
            self.host,
            self.per_chunk,
            self.packing,
            self.misfits,
            rows_per_chunk=self.pins.rows_per_chunk if self.pins else NUM_ROWS,
            staging_bytes=1 << 20,
        )

    def fill(self, seed: int, *, random_bits: float = 0.0) -> None:
        """Fill all blocks with new numbers; a share `random_bits` of them with random bits, which do not fit when
        packed."""
        rng = np.random.default_rng(seed)
        numbers = torch.from_numpy(rng.random((NUM_BLOCKS, sum(self.cache.widths) // 2), np.float32)) + 0.01
        self.blocks = numbers.bfloat16().view(torch.uint8).numpy().copy()
        self.is_random = rng.random(NUM_BLOCKS) < random_bits
        for block in self.is_random.nonzero()[0]:
            self.blocks[block] = np.frombuffer(rng.bytes(self.blocks.shape[1]), np.uint8)
        for tensor, part in zip(self.tensors, self._of_tensors(self.blocks), strict=True):
            tensor.copy_(torch.from_numpy(part))

    def _of_tensors(self, blocks: np.ndarray) -> list[np.ndarray]:
        return np.split(blocks, np.cumsum(self.cache.widths)[:-1], axis=1)

    def copies(self, direction: Any, firsts: list[int], sizes: list[int], rows: list[int], blocks: list[int]) -> Any:
        """Submit copies as vLLM does. `firsts`, `sizes`: for each group the number of its first block, and how many
        blocks it has."""
        requested = chunk_blocks(np.array(rows, np.int32), np.array(blocks, np.int32), sizes, firsts, self.per_chunk)
        return [copy for group in requested for copy in self.link.submit(direction, group)]

    def run(self, direction: Any, firsts: list[int], sizes: list[int], rows: list[int], blocks: list[int]) -> None:
        for op, _ in self.copies(direction, firsts, sizes, rows, blocks):
            op.wait()
            assert op.error is None and op.done()

    def store(self, row: int, block: int) -> None:
        """Store a complete chunk, of blocks from `block` on."""
        blocks = list(range(block, block + self.per_chunk))
        self.run("store", [0], [self.per_chunk], [row], blocks)
        self.note_store(row, list(enumerate(blocks)))

    def load(self, row: int, block: int) -> None:
        self.run("load", [0], [self.per_chunk], [row], list(range(block, block + self.per_chunk)))
        self.blocks[block : block + self.per_chunk] = self.rows[row]

    def note_store(self, row: int, of_chunk: list[tuple[int, int]]) -> None:
        self.rows[row] = [None] * self.per_chunk
        for index, block in of_chunk:
            self.rows[row][index] = self.blocks[block].copy()
        self.is_raw[row] = any(self.is_random[block] for _, block in of_chunk)

    def check(self) -> None:
        """Check that the cache has the expected bytes, that only chunks that did not fit have rests, and that no byte
        outside of this worker's part of a row was written."""
        on_device = np.concatenate([tensor.cpu().numpy() for tensor in self.tensors], axis=1)
        assert (on_device == self.blocks).all()
        assert [row in self.link.rests for row in range(NUM_ROWS)] == self.is_raw
        part = self.packing.part_bytes
        assert (self.shared[:, :part] == 7).all() and (self.shared[:, 2 * part :] == 7).all()

    def close(self) -> None:
        self.link.close()
        if self.pins is not None:
            self.pins.close()


@pytest.mark.parametrize("name", CACHES)
def test_blocks_of_random_transfers_arrive_and_nothing_else_changes(device: str, name: str) -> None:
    """After random transfers of complete chunks and parts, which fit or do not fit, of one or two groups, with reused
    rows, all blocks are right and no other byte has changed."""
    rng, fixture = random.Random(name), TransferFixture(device, CACHES[name])
    per_chunk = fixture.per_chunk
    for step in range(30):
        is_store = step < 3 or rng.random() < 0.5
        if is_store:
            fixture.fill(step, random_bits=rng.choice([0, 0, 0.3]))
        free_rows, free_blocks = rng.sample(range(NUM_ROWS), NUM_ROWS), rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        firsts, sizes, rows, blocks = [], [], [], []
        for _ in range(rng.choice([1, 2])):
            first, size = rng.randrange(4 * per_chunk), rng.randrange(3 * per_chunk + 1)
            position = range(first % per_chunk, first % per_chunk + size)
            own = [free_rows.pop() for _ in range(position[-1] // per_chunk + 1 if size else 0)]
            places = [(own[at // per_chunk], at % per_chunk) for at in position]
            if not is_store and any(fixture.rows[row][index] is None for row, index in places):
                continue
            ids = [free_blocks.pop() for _ in places]
            for row in own if is_store else []:
                fixture.note_store(row, [(at, block) for (of, at), block in zip(places, ids, strict=True) if of == row])
            for (row, index), block in [] if is_store else list(zip(places, ids, strict=True)):
                fixture.blocks[block] = fixture.rows[row][index]
            firsts, sizes, rows, blocks = [*firsts, first], [*sizes, size], rows + own, blocks + ids
        fixture.run("store" if is_store else "load", firsts, sizes, rows, blocks)
        fixture.check()
    assert fixture.misfits.misfits and fixture.misfits.misfits < fixture.misfits.stored
    fixture.close()


class Failing:
    """A transfer backend whose copies fail only at their end."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def store(self, *where: Any) -> Any:
        return self._spoiled(self._backend.store(*where))

    def load(self, *where: Any) -> Any:
        return self._spoiled(self._backend.load(*where))

    def close(self) -> None:
        self._backend.close()

    def _spoiled(self, op: Any) -> Any:
        op.wait()
        op.error = RuntimeError("the copy engine is on fire")
        return op


@pytest.mark.parametrize("random_bits", [0, 1])
def test_failed_copies_are_made_again_by_other_means(device: str, random_bits: int) -> None:
    """Each copy in both directions fails at first and succeeds when it is repeated, for chunks that fit when packed and
    for chunks that do not."""
    fixture = TransferFixture(device, CACHES["two shapes"])
    fixture.fill(1, random_bits=random_bits)
    fixture.link.parts = [replace(part, backend=Failing(part.backend)) for part in fixture.link.parts]

    def twice(direction: str, rows: list[int], blocks: list[int]) -> None:
        for op, again in fixture.copies(direction, [0], [len(blocks)], rows, blocks):
            op.wait()
            assert op.done()
            if op.error is not None:
                repeated = again()
                repeated.wait()
                assert repeated.done() and repeated.error is None

    twice("store", [0, 1], [0, 1, 2, 3])
    for row, block in ((0, 0), (1, 2)):
        fixture.note_store(row, [(0, block), (1, block + 1)])
        fixture.is_raw[row] = True  # a repeated store writes raw rows
    fixture.fill(2)
    twice("load", [1, 0], [8, 9, 10, 11])
    fixture.blocks[8:12] = [*fixture.rows[1], *fixture.rows[0]]
    fixture.check()
    fixture.close()


def test_a_row_that_holds_another_chunk_than_its_worker_knows_is_not_served(device: str) -> None:
    """A load fails if its row has a raw chunk of another row, a chunk of a worker with other tile shapes, or bytes that
    were never stored. If the disk wrote a chunk over a raw one, the new chunk is served, and the rest of the raw chunk
    is freed."""
    fixture = TransferFixture(device, CACHES["heads"])
    fixture.fill(1)
    fixture.is_random[:2] = True
    fixture.tensors[0][:2].copy_(torch.randint(256, (2, fixture.cache.widths[0]), dtype=torch.uint8))
    fixture.blocks[:2, : fixture.cache.widths[0]] = fixture.tensors[0][:2].cpu().numpy()
    fixture.store(0, 0)
    fixture.store(1, 2)
    fixture.host[2], fixture.host[4] = fixture.host[0], fixture.host[1]
    fixture.host[4, -10] ^= 1
    for row in (2, 3, 4):
        for complete in (True, False):
            [(op, again)] = fixture.copies("load", [0], [2 if complete else 1], [row], [5, 6] if complete else [5])
            for made in (op, again()):
                made.wait()
                assert isinstance(made.error, TransferError)
    fixture.check()
    fixture.host[0] = fixture.host[1]
    fixture.rows[0], fixture.is_raw[0] = fixture.rows[1], False
    fixture.load(0, 8)
    fixture.check()
    fixture.close()


@pytest.mark.parametrize(("rows", "size"), [(1, 4), (3, 4), (0, 1)])
def test_a_transfer_with_other_rows_than_its_blocks_need_is_refused(rows: int, size: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        chunk_blocks(np.arange(rows, dtype=np.int32), np.arange(size, dtype=np.int32), [size], [0], 2)


@pytest.mark.parametrize(
    ("channels", "widths"),
    [
        (128, [128]),  # heads of 64 elements; below, heads of other sizes
        (144, [128, 16]),
        (160, [128, 32]),
        (176, [128]),  # tiles in storage order: with tiles of one head, a block would have more bytes than a row
        (192, [128, 64]),
        (224, [128, 64, 32]),
        (256, [128]),
        (512, [128]),
        (576, [128, 64]),
        (32, [128]),
        (72, [64]),
    ],
)
def test_tiles_are_of_one_head_where_they_fit_a_row(channels: int, widths: list[int]) -> None:
    """The tiles of 8 heads in blocks of 16 tokens, 4 blocks a chunk, have the expected widths. Each byte of a block is
    in one tile."""
    page_bytes = 2 * 8 * 16 * channels
    shapes = shapes_of(page_bytes, page_bytes, 16, HeadLayout(channels), FOUR_BITS, 4)
    assert [shape.width for shape in shapes] == widths
    covered = np.zeros(page_bytes, int)
    for shape in shapes:
        for first in shape.firsts:
            for token in range(16):
                start = first + token * shape.row_bytes
                covered[start : start + 2 * shape.width] += 1
    assert (covered == 1).all()
    packed_bytes = sum(FOUR_BITS.tile_bytes(0, 64, shape.width) * len(shape.firsts) for shape in shapes)
    assert packed_bytes <= part_bytes_of(FOUR_BITS, 8 * channels, 64, 4)
