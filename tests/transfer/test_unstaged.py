"""Unstaged loads into contiguous slots: which slots are contiguous, and where the bytes land.

A copy of plain memory stands in for the call of the copy engine. On a GPU `test_stress` makes the call itself.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.kernels.page_copy import PageMover
from hicache.transfer import CpuTransfer, copies
from hicache.transfer.copies import UnstagedCopier
from transfer_case import LAYOUTS, Tier


def copied(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, up: bool, stream: int) -> None:
    """Do the work of a strided copy on the CPU."""
    assert up and stream == 7
    for row in range(rows):
        ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)


TIERS = [(name, 0) for name in LAYOUTS] + [("swa", 1), ("hybrid", 1)]


@functools.cache
def tier_of(name: str, space_index: int) -> tuple[Tier, PageMover, UnstagedCopier]:
    """One slot space of a layout with its host pages, the mover that scatters rows, and the unstaged copier."""
    space = LAYOUTS[name].build("cpu")[space_index]
    tier = Tier(space, 1 if space.name == "mamba" else LAYOUTS[name].host_page, 1 << 16)
    assert isinstance(tier.backend, CpuTransfer)
    mover = tier.backend.mover
    copier = UnstagedCopier(mover, tier.host.bytes_of, tier.host.arena.rows_per_chunk, tier.block_tokens)
    return tier, mover, copier


@given(which=st.sampled_from(TIERS), data=st.data())
def test_bytes_land_where_scattering_puts_them(which: tuple[str, int], data: st.DataObject) -> None:
    """Host pages anywhere are copied to slots that are contiguous within each page. Every row of the pool is as after
    staging and scattering, and all other rows are unchanged."""
    tier, mover, copier = tier_of(*which)
    block = tier.page_tokens
    buffers = [rows for layer in tier.rows for rows in layer]
    segments = tier.space.num_slots // block - 1
    count = data.draw(st.integers(1, min(9, segments)))
    pages = np.array(data.draw(st.permutations(range(1, 29)))[:count], dtype=np.int64)
    first = np.array(data.draw(st.permutations(range(1, segments + 1)))[:count], dtype=np.int64) * block
    if data.draw(st.booleans()):
        pages, first = np.sort(pages), np.sort(first)
    slots = (first[:, None] + np.arange(block)).reshape(-1)
    generator = torch.Generator().manual_seed(3)
    tier.host.bytes_of.random_(0, 256, generator=generator)
    for rows in buffers:
        rows.fill_(9)
    runs = copier.runs(pages, slots)
    assert runs is not None and sum(runs.pages.lengths) == count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "copy_strided", copied)
        for layer in range(mover.num_layers):
            copier.load(runs, layer, 7)
    found = [rows.clone() for rows in buffers]
    for rows in buffers:
        rows.fill_(9)
    mover.scatter(tier.host.bytes_of[torch.from_numpy(pages)], torch.from_numpy(slots), 0, mover.num_layers)
    assert all(torch.equal(got, rows) for got, rows in zip(found, buffers, strict=True))


def test_slots_out_of_order_are_no_runs() -> None:
    """Slots are not contiguous if two slots of a page are exchanged, or if a device page does not begin at a row of its
    buffer."""
    copier, paged = tier_of("mha", 0)[2], tier_of("nsa", 0)[2]
    for pair in ([3, 4], [2, 3]):  # slots of two device pages, and of one
        slots = np.arange(16, 48)
        slots[pair] = slots[pair[::-1]]
        assert copier.runs(np.array([1, 2]), slots) is None
    assert paged.runs(np.array([1]), np.arange(18, 34)) is None
    assert paged.runs(np.array([1]), np.arange(16, 32)) is not None
    assert copier.runs(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) is None
