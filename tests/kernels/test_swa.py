"""Translation of slots from the full to the window space: kernel, twin and a Python loop agree."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels.swa import translate_slots


def oracle(mapping: list[int], loc: int) -> int:
    if loc < 0:
        return loc
    return mapping[loc] if loc < len(mapping) else 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 5, 1023, 2500])
def test_every_slot_gives_its_peer(device: str, kernels: str, dtype: torch.dtype, tokens: int) -> None:
    """The mapping gives each window slot. -1 stays -1, and a slot beyond the mapping becomes the sink."""
    generator = torch.Generator().manual_seed(tokens)
    mapping = torch.randint(0, 1 << 40, (700,), generator=generator)
    mapping[torch.rand(700, generator=generator) < 0.3] = 0
    loc = torch.randint(-1, 710, (tokens,), generator=generator).to(dtype)
    got = translate_slots(mapping.to(device), loc.to(device), kernels)
    assert got.dtype == torch.int64 and got.tolist() == [oracle(mapping.tolist(), x) for x in loc.tolist()]


def test_tables_keep_their_shape(device: str, kernels: str) -> None:
    """A page table of two dimensions, also a strided one, is returned in its shape. The input does not change."""
    mapping = torch.arange(100, device=device).flip(0)
    table = torch.randint(0, 100, (7, 12), device=device, dtype=torch.int32)
    before = table.clone()
    for view in (table, table[:, ::3], table.t(), table[:, :0]):
        got = translate_slots(mapping, view, kernels)
        assert got.shape == view.shape and torch.equal(got, 99 - view.to(torch.int64))
    assert torch.equal(table, before)
