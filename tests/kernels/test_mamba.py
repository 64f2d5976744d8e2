"""Copies and clears of recurrent states: kernel and twin compared with plain indexing, byte by byte."""

from __future__ import annotations

import pytest
import torch

from hicache.kernels.mamba import clear_states, copy_states
from kernel_case import as_bytes, random_bits

# Rows of 2 to 18 432 bytes, of which only the last is a power of two: words of 1, 2, 4 and 8 bytes, in one block or
# several.
ROWS = [((1,), torch.bfloat16), ((3, 3), torch.uint8), ((5, 3), torch.float32), ((96, 3), torch.bfloat16)]
LARGE = [((48, 3, 16), torch.float64), ((2, 16, 16), torch.float32)]


def states(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return random_bits(3, 9, *shape, dtype=dtype, seed=len(shape)).to(device)


@pytest.mark.parametrize(("shape", "dtype"), [*ROWS, *LARGE])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copies_reach_their_slots_only(
    device: str, kernels: str, shape: tuple[int, ...], dtype: torch.dtype, index: torch.dtype
) -> None:
    """Each target holds the bytes of its source in every layer and tensor. All other slots stay unchanged."""
    tensors = [states(shape, dtype, device), states((7,), torch.float32, device)]
    expected = [x.clone() for x in tensors]
    src, dst = torch.tensor([1, 8, 1, 4]), torch.tensor([3, 2, 6, 4])
    for x in expected:
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            x[:, d] = x[:, s]
    copy_states(tensors, src.to(device, index), dst.to(device, index), kernels)
    for got, want in zip(tensors, expected, strict=True):
        assert torch.equal(as_bytes(got), as_bytes(want))


@pytest.mark.parametrize(("shape", "dtype"), [*ROWS, *LARGE])
def test_cleared_states_are_zero(device: str, kernels: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Cleared slots are zero bytes in every layer and tensor, also if one is named twice. Other slots stay
    unchanged."""
    tensors = [states(shape, dtype, device), states((2, 5), torch.bfloat16, device)]
    expected = [x.clone() for x in tensors]
    for x in expected:
        x[:, [8, 2]] = 0
    clear_states(tensors, torch.tensor([8, 2, 8], device=device), kernels)
    for got, want in zip(tensors, expected, strict=True):
        assert torch.equal(as_bytes(got), as_bytes(want))


def test_slices_of_indices_and_nothing(device: str, kernels: str) -> None:
    """Strided index tensors are read by value. A call without states, or without tensors, changes nothing."""
    x = states((6,), torch.float32, device)
    before = x.clone()
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    copy_states([x], nothing, nothing, kernels)
    clear_states([x], nothing, kernels)
    clear_states([], torch.tensor([1], device=device), kernels)
    assert torch.equal(as_bytes(x), as_bytes(before))
    pairs = torch.tensor([[1, 5], [2, 7]], device=device)
    copy_states([x], pairs[:, 0], pairs[:, 1], kernels)
    assert torch.equal(as_bytes(x[:, [5, 7]]), as_bytes(before[:, [1, 2]]))


@pytest.mark.gpu
def test_offsets_beyond_two_gib() -> None:
    """States at offsets beyond 2^31 words of their tensor are copied and cleared correctly."""
    slots = (1 << 31) // (1 << 20) + 8
    x = torch.zeros(1, slots, 1 << 20, dtype=torch.int64, device="cuda")
    x[0, slots - 1] = 7
    copy_states([x], torch.tensor([slots - 1], device="cuda"), torch.tensor([slots - 3], device="cuda"), "triton")
    assert bool((x[0, slots - 3] == 7).all()) and not x[0, slots - 2].any() and not x[0, 0].any()
    clear_states([x], torch.tensor([slots - 1], device="cuda"), "triton")
    assert not x[0, slots - 1].any() and bool((x[0, slots - 3] == 7).all())
