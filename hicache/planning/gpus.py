"""Memory and rates of known GPUs, from the vendors' data sheets that `docs/plan.md` names."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.console import parse_bytes
from hicache.errors import ConfigError

_GIB = 1 << 30
_ECC = 15 / 16  # usable share of GDDR6 with error correction; HBM stores check bits in extra memory
_PCIE_SHARE = 0.88  # share of the raw rate that pinned copies reach: 55.5 of 63 GB/s on an H200
# raw rate of 16 lanes in one direction by PCIe generation, without the overhead of the line code of 128 in 130 bits
_PCIE_BYTES_PER_S = {4: 31.5e9, 5: 63.0e9}


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory and its rates; a rate of 0 is unknown. `flops_per_s`: dense bfloat16 operations per second.
    `link_bytes_per_s`: rate of pinned copies from the host."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    link_bytes_per_s: float = 0.0


def _gpu(name: str, memory_gib: float, memory_tb_per_s: float, tera_flops: float, pcie: int) -> Gpu:
    link = _PCIE_SHARE * _PCIE_BYTES_PER_S[pcie]
    return Gpu(name, int(memory_gib * _GIB), memory_tb_per_s * 1e12, tera_flops * 1e12, link)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 180, 8.0, 2250, 5),
        _gpu("h200", 141, 4.8, 989, 5),
        _gpu("h200-nvl", 141, 4.8, 835, 5),
        _gpu("h100", 80, 3.35, 989, 5),
        _gpu("h100-nvl", 94, 3.9, 835, 5),
        _gpu("h100-pcie", 80, 2.0, 756, 5),
        _gpu("a100", 80, 2.039, 312, 4),
        _gpu("a100-pcie", 80, 1.935, 312, 4),
        _gpu("a100-40gb", 40, 1.555, 312, 4),
        _gpu("l40s", 48 * _ECC, 0.864, 362, 4),
        _gpu("l4", 24 * _ECC, 0.3, 121, 4),
        _gpu("a10", 24 * _ECC, 0.6, 125, 4),
        _gpu("rtx-5090", 32, 1.792, 209.5, 5),
        _gpu("rtx-4090", 24, 1.008, 165, 4),
        _gpu("mi300x", 192, 5.3, 1307, 5),
        _gpu("mi325x", 256, 6.0, 1307, 5),
    )
}


def gpu_of(text: str) -> Gpu:
    """Return the GPU named in `GPUS`, ignoring case; or, for a size such as `80GiB`, a GPU with that memory and unknown
    rates."""
    found = GPUS.get("-".join(text.lower().split()))
    if found is not None:
        return found
    try:
        memory_bytes = parse_bytes(text)
    except ConfigError:
        raise ConfigError(
            f"--gpu {text}: no such GPU; known are {', '.join(GPUS)}; or give its memory, like 80GiB"
        ) from None
    if memory_bytes < 1:
        raise ConfigError(f"--gpu {text}: a GPU has at least one byte; give its memory, like 80GiB")
    return Gpu(f"GPU of {text}", memory_bytes)
