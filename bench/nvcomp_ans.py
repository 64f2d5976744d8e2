"""nvCOMP's ANS on keys and values, to compare packed pages with, where the package nvidia-nvcomp-cu13 is installed.

Of each buffer, the upper bytes of all values lie before the lower ones, as in the best filter for zstd. A load is a
copy of the encoded bytes, then decoding; scattering to the pool is not counted. A helper of the bench of packed pages.
"""

from __future__ import annotations

from typing import Any

import torch

from hicache.bench.common import Report, gb_per_s, interleave, percentile
from hicache.device import KVCache

_TOKENS = 4096


def ans_note(report: Report, pool: KVCache, slots: torch.Tensor, samples: int) -> str:
    """Report `packed.nvcomp.ans` of the rows at `slots`; returns what a note should say of it."""
    if pool.device.type != "cuda":
        return ""
    try:
        from nvidia import nvcomp
    except ImportError:
        return "; nvCOMP is not installed"
    try:
        return _measure(report, nvcomp, pool, slots[:_TOKENS], samples)
    except (RuntimeError, TypeError, ValueError) as error:  # of a package that other releases change
        return f"; nvCOMP failed: {str(error).splitlines()[0]}"


def _measure(report: Report, nvcomp: Any, pool: KVCache, slots: torch.Tensor, samples: int) -> str:
    buffers = [buffer for layer in pool.layout.layers for buffer in pool.layer_buffers(layer)]
    planes = [
        buffer[slots].flatten().view(torch.uint8).view(-1, 2).flip(1).T.contiguous().flatten() for buffer in buffers
    ]
    torch.cuda.synchronize(pool.device)
    stream = torch.cuda.Stream(pool.device)
    codec = nvcomp.Codec(algorithm="ANS", cuda_stream=stream.cuda_stream)
    with torch.cuda.stream(stream):
        encoded = [torch.as_tensor(found, device=pool.device) for found in codec.encode(nvcomp.as_arrays(planes))]
        stream.synchronize()
        on_host = [found.view(torch.uint8).cpu().pin_memory() for found in encoded]
        staging = [torch.empty_like(found, device=pool.device) for found in on_host]
    decoded: list[Any] = []

    def load() -> None:
        with torch.cuda.stream(stream):
            for target, source in zip(staging, on_host, strict=True):
                target.copy_(source, non_blocking=True)
        decoded[:] = codec.decode(nvcomp.as_arrays(staging))

    seconds = interleave({"ans": load}, samples=samples, sync=lambda: torch.cuda.synchronize(pool.device))["ans"]
    for found, plane in zip(decoded, planes, strict=True):
        if not torch.equal(torch.as_tensor(found, device=pool.device).view(torch.uint8), plane):
            raise AssertionError("nvCOMP did not give the bytes back")
    num_bytes = sum(plane.nbytes for plane in planes)
    ratio = num_bytes / sum(found.nbytes for found in on_host)
    report.rate("packed.nvcomp.ans", num_bytes, seconds, note=f"raw bytes a second; ratio {ratio:.3f}, not scattered")
    return f"; nvCOMP's ANS {percentile(gb_per_s(num_bytes, seconds), 50):.1f} GB/s"
