"""Copies and clears recurrent states. A call needs one launch per tensor, for all layers and states.

A state tensor is `[layers, slots, ...row]`, contiguous; a state is one row of each layer.

    copy    x[l, dst[i]] = x[l, src[i]]
    clear   x[l, slots[i]] = 0             for l in [0, layers), i in [0, states)

Rows are copied in the widest word that divides their size and address, whatever their dtype. A copy does not read all
rows before it writes, so no slot may be in `src` at one index and in `dst` at another index. If `dst` contains a slot
twice (state 0, for padding), this slot then contains one of its rows or a mixture of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

_WORDS_PER_PROGRAM = 2048


@jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["src", "dst"])
def _copy_kernel(x, src, dst, num_blocks, layer_stride, ROW: tl.constexpr, BLOCK: tl.constexpr):
    # Program (i*num_blocks + b, l): words [b*BLOCK, (b+1)*BLOCK) of state i in layer l.
    state = tl.program_id(0) // num_blocks
    word = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    base = x + tl.program_id(1).to(tl.int64) * layer_stride
    source = tl.load(src + state).to(tl.int64)
    target = tl.load(dst + state).to(tl.int64)
    row = tl.load(base + source * ROW + word, mask=word < ROW, other=0)
    tl.store(base + target * ROW + word, row, mask=word < ROW)


@jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["slots"])
def _clear_kernel(x, slots, num_blocks, layer_stride, ROW: tl.constexpr, BLOCK: tl.constexpr):
    state = tl.program_id(0) // num_blocks
    word = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    base = x + tl.program_id(1).to(tl.int64) * layer_stride
    slot = tl.load(slots + state).to(tl.int64)
    tl.store(base + slot * ROW + word, tl.zeros([BLOCK], dtype=x.dtype.element_ty), mask=word < ROW)


def copy_states_naive(tensors: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy states in torch, with the result of the copy kernel."""
    for x in tensors:
        x.index_copy_(1, dst.to(torch.int64), x.index_select(1, src))


def clear_states_naive(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Clear states in torch, with the result of the clear kernel."""
    for x in tensors:
        x.index_fill_(1, slots.to(torch.int64), 0)


def copy_states(tensors: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, kernels: Kernels) -> None:
    """Copy states `src` to `dst`, int32 or int64 `[states]`, in every tensor, by the formula of the module.

    Does not wait for the device. Raises ValueError with the shapes, dtypes or devices that do not match.
    """
    check_kernels(kernels)
    _check(tensors, src, dst)
    if not src.numel():
        return
    if kernels == "torch":
        copy_states_naive(tensors, src, dst)
        return
    src, dst = src.contiguous(), dst.contiguous()
    with torch.cuda.device_of(src):
        for x in tensors:
            words, row_words, block = _as_words(x)
            blocks = cdiv(row_words, block)
            _copy_kernel[(src.numel() * blocks, x.shape[0])](
                words, src, dst, blocks, x.shape[1] * row_words, ROW=row_words, BLOCK=block, num_warps=4
            )


def clear_states(tensors: Sequence[torch.Tensor], slots: torch.Tensor, kernels: Kernels) -> None:
    """Fill states `slots`, int32 or int64 `[states]`, with zeros in every tensor. Does not wait for the device."""
    check_kernels(kernels)
    _check(tensors, slots)
    if not slots.numel():
        return
    if kernels == "torch":
        clear_states_naive(tensors, slots)
        return
    slots = slots.contiguous()
    with torch.cuda.device_of(slots):
        for x in tensors:
            words, row_words, block = _as_words(x)
            blocks = cdiv(row_words, block)
            _clear_kernel[(slots.numel() * blocks, x.shape[0])](
                words, slots, blocks, x.shape[1] * row_words, ROW=row_words, BLOCK=block, num_warps=4
            )


def _as_words(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return `x` viewed as words that divide a row, the number of words in a row, and the number of words that a
    program copies."""
    row_bytes = x[0, 0].numel() * x.element_size()
    width = widest_word(row_bytes, x.data_ptr())
    row_words = row_bytes // width
    words = x.view(-1).view(torch.uint8).view(WORDS[width])
    return words, row_words, min(power_of_two(row_words), _WORDS_PER_PROGRAM)


def _check(tensors: Sequence[torch.Tensor], *indices: torch.Tensor) -> None:
    for x in tensors:
        if x.dim() < 3 or not x.is_contiguous():
            raise ValueError(f"a state tensor {tuple(x.shape)}: need [layers, slots, ...row], contiguous")
    for slots in indices:
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or slots.numel() != indices[0].numel():
            raise ValueError(
                f"state slots {[tuple(i.shape) for i in indices]} of {slots.dtype}: need int32 or int64, one "
                f"dimension, equally many sources and targets"
            )
        if any(x.device != slots.device for x in tensors):
            raise ValueError(f"state slots on {slots.device}, the states on {[str(x.device) for x in tensors]}")
