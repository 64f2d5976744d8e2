"""A tier of packed pages for the stress tests of the transfers. Contents that do not fit when packed use two host pages
each."""

from __future__ import annotations

import torch

from hicache.build.packing import packer_of, pool_page_bytes
from hicache.config import EngineConfig
from hicache.device import SlotSpace
from hicache.kernels.pack import PagePacker
from hicache.transfer import TransferOp
from transfer_case import NUM_CONTENTS, POISON, HostPages, Ids, Tier

_SCATTER = PagePacker.scatter  # `at_each_move` patches this method to delay copies
_EVERY = 5  # one of 5 contents does not fit when packed


class TwoCopies:
    """Two copies of one lane, treated as one operation. The second copy runs after the first one."""

    def __init__(self, first: TransferOp, second: TransferOp) -> None:
        self.ops = first, second

    @property
    def error(self) -> BaseException | None:
        return self.ops[0].error or self.ops[1].error

    def done(self) -> bool:
        return all(op.done() for op in self.ops)

    def wait(self) -> None:
        for op in self.ops:
            op.wait()


class PackedTier(Tier):
    """A tier of a pool in bfloat16. `raw`: the bytes of each content as rows. `pages`: for contents that do not fit,
    the first host page, and the second one at index + NUM_CONTENTS. Contents that fit are unpacked by torch and then
    compared, because unused bytes of an escape list are undefined."""

    def __init__(self, space: SlotSpace, page_tokens: int, staging_bytes: int, on_cpu: SlotSpace) -> None:
        """`on_cpu`: a slot space of the same layout on the CPU, in which `host_differs` unpacks pages."""
        self._on_cpu = on_cpu
        packer = self._packer(on_cpu, page_tokens)
        self.packed_bytes, self._unpacker = packer.page_bytes, packer
        super().__init__(space, page_tokens, staging_bytes, self._packer(space, page_tokens))

    @staticmethod
    def _packer(space: SlotSpace, page_tokens: int) -> PagePacker:
        config = EngineConfig(
            device_tokens=space.num_slots, page_size=space.layout.device_page_size, host_page_size=page_tokens,
            device=str(space.device), dtype="bfloat16", kv_packing="4",
        )  # fmt: skip
        packer = packer_of(config, "full", space, page_tokens)
        assert packer is not None
        return packer

    def _make_pages(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(9)
        shape = (NUM_CONTENTS, self.space.layout.page_bytes(self.page_tokens))
        random_bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tame = (torch.rand((shape[0], shape[1] // 2), generator=generator) + 0.25).bfloat16().view(torch.uint8)
        is_random = torch.arange(NUM_CONTENTS) % _EVERY == POISON
        raw = torch.where(is_random[:, None], random_bits, tame)
        # Bytes of a page that no store writes keep the poison.
        self.pages = random_bits[POISON, : pool_page_bytes(self._unpacker)].repeat(2 * NUM_CONTENTS, 1)
        self.pages[:NUM_CONTENTS, : self.packed_bytes] = raw[:, : self.packed_bytes]
        self.pages[NUM_CONTENTS:, : shape[1] - self.packed_bytes] = raw[:, self.packed_bytes :]
        self.raw = raw
        return raw

    def num_pool_pages(self, contents: Ids) -> int:
        return len(contents) + int((contents % _EVERY == 0).sum())

    def divide(self, pool_pages: torch.Tensor, contents: Ids) -> HostPages:
        rest = torch.zeros(len(contents), dtype=torch.int64)
        rest[torch.from_numpy(contents % _EVERY == 0)] = pool_pages[len(contents) :]
        return HostPages(pool_pages[: len(contents)], rest)

    def store(self, slots: torch.Tensor, at: HostPages) -> TransferOp | TwoCopies:
        """Store pages packed, and store the pages that do not fit again as raw pages, as an engine does."""
        packed = self.backend.store(slots, at.pages)
        raw = at.rest.nonzero().flatten()
        if not len(raw):
            return packed
        raw_slots = slots.view(len(at.pages), -1)[raw.to(slots.device)].flatten()
        return TwoCopies(packed, self.backend.store(raw_slots, at.pages[raw], at.rest[raw]))

    def stored(self, op: TransferOp | TwoCopies, at: HostPages, contents: Ids) -> None:
        first = op.ops[0] if isinstance(op, TwoCopies) else op
        assert [*first.misfits] == at.rest.nonzero().flatten().tolist(), "not what was random does not fit"
        super().stored(op, at, contents)
        rest = at.rest.numpy()
        self.on_host[rest[rest > 0]] = NUM_CONTENTS + contents[rest > 0]

    def host_differs(self, pool_pages: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
        is_packed = (contents > 0) & (contents < NUM_CONTENTS) & (contents % _EVERY != 0)
        wrong = super().host_differs(pool_pages, contents)
        found, packed = self.host.bytes_of[pool_pages[is_packed]], self.packed_bytes
        is_other = (found[:, packed:] != self.pages[POISON, packed:]).any(1)
        wrong[is_packed] = is_other | (self._unpacked(found[:, :packed]) != self.raw[contents[is_packed]]).any(1)
        return wrong

    def _unpacked(self, pages: torch.Tensor) -> torch.Tensor:
        """Unpack packed pages `[pages, bytes]` to rows in the order of a raw page."""
        layout = self.space.layout
        buffers = [buffer for layer in layout.layers for buffer in self._on_cpu.layer_buffers(layer)]
        found = torch.empty(len(pages), len(buffers), self.raw.shape[1] // len(buffers), dtype=torch.uint8)
        at_once = self._on_cpu.num_slots // self.page_tokens
        for start in range(0, len(pages), at_once):
            chunk = pages[start : start + at_once].contiguous()
            slots = torch.arange(len(chunk) * self.page_tokens)
            _SCATTER(self._unpacker, chunk, slots, 0, layout.num_layers)
            for at, buffer in enumerate(buffers):
                rows = buffer.flatten(1).view(torch.uint8)[slots]
                found[start : start + len(chunk), at] = rows.view(len(chunk), -1)
        return found.flatten(1)
