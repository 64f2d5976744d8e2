"""Lists of ids from page-locked CPU memory to the device, read over the link by a kernel.

A copy would stand in the copy engine's line, perhaps behind a load that takes it for milliseconds; a kernel's reads
find their place between.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_IDS_PER_PROGRAM = 1024


@jit(do_not_specialize=["num_ids"])
def _upload_kernel(source, target, num_ids, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < num_ids), mask=at < num_ids)


def upload(source: torch.Tensor, target: torch.Tensor, kernels: Kernels) -> None:
    """Copy `source`, int64 `[n]` on the CPU, to `target` `[n]`, on the current stream, which `source` has to outlive.

    `source` is page-locked where the target is on a GPU. ValueError where the two do not match.
    """
    check_kernels(kernels)
    if source.shape != target.shape or {source.dtype, target.dtype} != {torch.int64} or source.device.type != "cpu":
        raise ValueError(
            f"ids {tuple(source.shape)} of {source.dtype} on {source.device} to {tuple(target.shape)} of "
            f"{target.dtype}: need int64 of one shape, from the CPU"
        )
    if kernels == "torch":
        target.copy_(source, non_blocking=True)
    elif len(source):
        _upload_kernel[(cdiv(len(source), _IDS_PER_PROGRAM),)](source, target, len(source), BLOCK=_IDS_PER_PROGRAM)
