"""Copies between vLLM's cache blocks and the rows of its CPU tier, without vLLM."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
import torch

from hicache.host.arena import PinnedRows
from hicache.integrations.vllm.offloading_copies import ChunkLink, chunk_blocks

NUM_BLOCKS, NUM_ROWS = 24, 9


class Rig:
    """The cache of one worker of two, its part of the rows in shared memory, and what both should hold."""

    def __init__(self, device: str, blocks_per_chunk: int, widths: tuple[int, ...]) -> None:
        self.per_chunk, self.on = blocks_per_chunk, torch.device(device)
        chunk_bytes = blocks_per_chunk * sum(widths)
        row_bytes = -(-2 * chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        shared = torch.frombuffer(mmap.mmap(-1, NUM_ROWS * row_bytes), dtype=torch.uint8).view(NUM_ROWS, row_bytes)
        self.pins = PinnedRows(shared, setting="cpu_bytes_to_use") if self.on.type == "cuda" else None
        self.host, self.neighbour = shared[:, chunk_bytes : 2 * chunk_bytes], shared[:, :chunk_bytes]
        self.tensors = [torch.empty(NUM_BLOCKS, width, dtype=torch.uint8, device=device) for width in widths]
        self.link = ChunkLink(
            self.tensors,
            self.host,
            blocks_per_chunk,
            rows_per_chunk=self.pins.rows_per_chunk if self.pins else NUM_ROWS,
            staging_bytes=1 << 20,
        )
        self.refill(random.Random(1))
        self.neighbour.fill_(7)
        self.host.fill_(3)
        # [row][block of the chunk] and [block] as numbers of all tensors' bytes, side by side
        self.rows = np.stack([part.numpy() for part in self._host_blocks()])
        self.blocks = self.device_blocks()

    def refill(self, rng: random.Random) -> None:
        for tensor in self.tensors:
            tensor.copy_(torch.frombuffer(bytearray(rng.randbytes(tensor.numel())), dtype=torch.uint8).view_as(tensor))
        self.blocks = self.device_blocks()

    def device_blocks(self) -> np.ndarray:
        return np.concatenate([tensor.cpu().numpy() for tensor in self.tensors], axis=1)

    def _host_blocks(self) -> list[torch.Tensor]:
        parts = self.host.split([self.per_chunk * t.shape[1] for t in self.tensors], 1)
        return list(torch.cat([part.unflatten(1, (self.per_chunk, -1)) for part in parts], 2))

    def run(self, direction: str, sizes: list[int], firsts: list[int], rows: np.ndarray, blocks: np.ndarray) -> None:
        copies = []
        for wanted in chunk_blocks(rows, blocks, sizes, firsts, self.per_chunk):
            copies += self.link.submit(direction, wanted)
        for op, _ in copies:
            op.wait()
            assert op.error is None and op.done()

    def check(self) -> None:
        assert (np.stack([part.numpy() for part in self._host_blocks()]) == self.rows).all()
        assert (self.device_blocks() == self.blocks).all()
        assert (self.neighbour == 7).all()

    def close(self) -> None:
        self.link.close()
        if self.pins is not None:
            self.pins.close()


@pytest.mark.parametrize(("per_chunk", "widths"), [(1, (65536, 65536)), (2, (4096,) * 3), (3, (512, 96, 32))])
def test_blocks_of_random_transfers_arrive_and_nothing_else_changes(
    device: str, per_chunk: int, widths: tuple[int, ...]
) -> None:
    """Whole chunks and parts of chunks, of one group and of two, both ways; the rows of another worker stay."""
    rng, rig = random.Random(per_chunk), Rig(device, per_chunk, widths)
    for _ in range(12):
        direction = rng.choice(["store", "load"])
        free_rows, free_blocks = rng.sample(range(NUM_ROWS), NUM_ROWS), rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        sizes, firsts, rows, blocks = [], [], [], []
        for _ in range(rng.choice([1, 2])):
            sizes.append(rng.randrange(4 * per_chunk + 1))
            firsts.append(rng.randrange(5))
            position = firsts[-1] % per_chunk + np.arange(sizes[-1])
            own = [free_rows.pop() for _ in range(position[-1] // per_chunk + 1 if sizes[-1] else 0)]
            for at in position:
                block, row, index = free_blocks.pop(), own[at // per_chunk], at % per_chunk
                if direction == "store":
                    rig.rows[row, index] = rig.blocks[block]
                else:
                    rig.blocks[block] = rig.rows[row, index]
                blocks.append(block)
            rows += own
        rig.run(direction, sizes, firsts, np.array(rows, np.int32), np.array(blocks, np.int32))
        rig.check()
        if rng.random() < 0.5:
            rig.refill(rng)
    rig.close()


def test_a_store_reads_what_the_current_stream_writes_before_it_and_a_load_is_behind_it(device: str) -> None:
    """Neither is waited for by the host between the writes and the submission."""
    rig = Rig(device, 1, (1 << 20,))
    rows, blocks = np.arange(4, dtype=np.int32), np.arange(8, 12, dtype=np.int32)
    for round_ in range(1, 6):
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        rig.tensors[0][8:12].fill_(round_)
        rig.run("store", [4], [0], rows, blocks)
        assert (rig.host[:4] == round_).all()
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        rig.tensors[0][8:12].zero_()
        rig.run("load", [4], [0], rows, blocks)
        assert (rig.tensors[0][8:12] == round_).all()
    rig.close()


@pytest.mark.parametrize(("rows", "size"), [(1, 4), (3, 4), (0, 1)])
def test_a_transfer_with_other_rows_than_its_blocks_need_is_refused(rows: int, size: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        chunk_blocks(np.arange(rows, dtype=np.int32), np.arange(size, dtype=np.int32), [size], [0], 2)
