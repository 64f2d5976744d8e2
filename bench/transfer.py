"""Measures transfers between host and device by the engine's backend, as shares of a plain pinned copy in the same
rounds.

On CUDA the ceiling is a pinned memcpy in the same direction, or for both directions two concurrent ones. On the CPU,
where the device tier is ordinary memory, the ceiling is a memcpy. Before the timing, bytes are stored, overwritten on
the device, loaded and compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hicache import ModelGeometry
from hicache.bench.common import Report, interleave, raw_copies
from hicache.bench.packed_sample import KvSample
from hicache.build.factory import build_transfer
from hicache.build.packing import packer_of, pool_page_bytes
from hicache.config import AdvancedConfig, EngineConfig
from hicache.config.engine import KvPacking
from hicache.device import KVCache, MHATokenToKVPool, MLATokenToKVPool
from hicache.host.pool import HostPagePool
from hicache.tiers import FULL
from hicache.transfer import TransferBackend, TransferOp

NAME = "transfer"
DESCRIPTION = "host <-> device: up, down and both directions, by page size and page order, against a plain copy"


@dataclass(frozen=True)
class Latent:
    """Geometry of multi-head latent attention: one row of `rank` + `rope` values per token and layer."""

    layer_num: int
    rank: int
    rope: int


GEOMETRIES: dict[str, ModelGeometry | Latent] = {
    "gqa8b": ModelGeometry(layer_num=32, head_num=8, head_dim=128),
    "gqa70b_tp4": ModelGeometry(layer_num=80, head_num=2, head_dim=128),
    "mla": Latent(layer_num=61, rank=512, rope=64),
}
# Target shares of a plain copy on CUDA.
TARGETS = {
    "up.page16.contiguous": 0.99,
    "up.page64.contiguous": 0.99,
    "up.page64.random": 0.98,
    "up.page16.random": 0.97,
    "up.page1.random": 0.98,
    "down.page16.contiguous": 0.97,
    "down.page64.contiguous": 0.98,
    "down.page1.random": 0.98,
    "both.total": 0.97,
    "both.up": 0.90,
}
# The names of cases with both directions at once contain the layout, unless it is this one.
BOTH_LAYOUT = "page64.contiguous"


@dataclass(frozen=True)
class Layout:
    """An order of pages. `device_page`: tokens of an allocator page; `host_page`: tokens of a host page.

    `scattered`: whether pages form runs in random order, with `host_run` and `device_run` pages on average; otherwise
    all pages form one run.
    """

    name: str
    host_page: int
    device_page: int
    scattered: bool
    host_run: int = 1
    device_run: int = 1


LAYOUTS = [
    Layout("page16.contiguous", 16, 16, False),
    Layout("page64.contiguous", 64, 64, False),
    Layout("page16.random", 16, 16, True),
    Layout("page64.random", 64, 64, True),
    Layout("page1.random", 64, 1, True),
]


def shuffled_runs(rng: np.random.Generator, count: int, mean_run: int) -> npt.NDArray[np.int64]:
    """Return the ids 0 to `count` - 1, divided into runs of 1 to 2 * `mean_run` - 1 consecutive ids. The runs are in
    random order."""
    ends = np.cumsum(rng.integers(1, 2 * mean_run, count))
    runs = np.split(np.arange(count), ends[ends < count])
    return np.concatenate([runs[at] for at in rng.permutation(len(runs))])


class TransferSetup:
    """The pools and the backend for one geometry and page size. `kv_packing`: the setting of this name. `sample`:
    contents of the pool; None: normal random numbers. `pool`: the pool of another setup, which must not be in use;
    None: a new pool."""

    def __init__(
        self,
        geometry: ModelGeometry | Latent,
        layout: Layout,
        tokens: int,
        device: torch.device,
        *,
        kv_packing: KvPacking = "off",
        sample: KvSample | None = None,
        pool: KVCache | None = None,
    ) -> None:
        self.tokens = tokens
        self._sample = sample
        size = tokens + tokens // 4
        self.pool = _pool(geometry, size, layout.device_page, device) if pool is None else pool
        config = EngineConfig(
            device_tokens=size,
            page_size=layout.device_page,
            host_page_size=layout.host_page,
            device=str(device),
            kv_packing=kv_packing,
            advanced=AdvancedConfig(staging_bytes=1 << 30),
        )
        packer = packer_of(config, FULL, self.pool.slot_spaces[0], layout.host_page)
        page_bytes = self.pool.layout.page_bytes(layout.host_page) if packer is None else pool_page_bytes(packer)
        self.host = HostPagePool(
            self.pool.layout,
            layout.host_page,
            (size // layout.host_page + 1) * page_bytes,
            pin=device.type == "cuda",
            page_bytes=page_bytes,
        )
        backend, self.counter = build_transfer(config, self.pool, self.host, packer)
        assert backend is not None
        self.backend: TransferBackend = backend
        self.backend.start()
        rng = np.random.default_rng(0)
        pages, blocks = tokens // layout.host_page, size // layout.device_page
        ids = shuffled_runs(rng, self.host.num_pages, layout.host_run) if layout.scattered else np.arange(pages)
        self.pages = torch.from_numpy(ids[:pages] + 1)
        block = shuffled_runs(rng, blocks, layout.device_run) if layout.scattered else np.arange(blocks)
        block = block[: tokens // layout.device_page] + 1
        slots = (block[:, None] * layout.device_page + np.arange(layout.device_page)).reshape(-1)
        self.chosen = torch.from_numpy(slots)  # in host memory, as an engine's allocator returns them
        self.slots = self.chosen.to(device)
        half = tokens // 2 // layout.host_page
        self.halves = (self.pages[:half], self.pages[half:])
        self.num_bytes = tokens * self.pool.layout.token_bytes
        self.up_seconds: list[float] = []  # seconds of loads that ran concurrently with equally large stores

    def up(self, pages: torch.Tensor, slots: torch.Tensor) -> TransferOp:
        assert self.counter.can_begin()
        return self.backend.load(pages, slots, self.counter.begin())

    def load_all(self) -> None:
        self.up(self.pages, self.chosen).wait()

    def store_all(self) -> None:
        op = self.backend.store(self.chosen, self.pages)
        op.wait()
        if op.misfits:
            raise AssertionError(f"{len(op.misfits)} of {len(self.pages)} pages do not fit when packed")

    def both(self) -> None:
        """Load half of the tokens while the other half is stored. Poll the backend until both have ended, as a
        scheduler does."""
        middle = len(self.halves[0]) * (len(self.chosen) // len(self.pages))
        down = self.backend.store(self.chosen[middle:], self.halves[1])
        up = self.up(self.halves[0], self.chosen[:middle])
        while not (up.done() and down.done()):
            time.sleep(0)
        self.up_seconds.append(up.seconds())

    def verify(self) -> None:
        """Store the sample or random bytes, overwrite them on the device, load them again and compare."""
        buffers = [buffer for layer in self.pool.layout.layers for buffer in self.pool.layer_buffers(layer)]
        for buffer in buffers:
            buffer.normal_()
        if self._sample is not None:
            self._sample.fill(self.pool, self.slots)
        truth = [buffer[self.slots].clone() for buffer in buffers]
        self.store_all()
        for buffer in buffers:
            buffer.fill_(-7)
        self.load_all()
        for buffer, kept in zip(buffers, truth, strict=True):
            if not torch.equal(buffer[self.slots], kept):
                raise AssertionError("loaded bytes are not the stored bytes")

    def close(self) -> None:
        self.backend.close()
        self.host.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="tokens per run (default: 32768 on CUDA, 1024 else)")
    parser.add_argument("--samples", type=int, help="timed rounds (default: 20 on CUDA, 7 else)")
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "all"], default="all")


def run(args: argparse.Namespace, report: Report) -> None:
    device: torch.device = args.device
    on_cuda = device.type == "cuda"
    tokens = args.tokens or (32768 if on_cuda else 1024)
    samples = args.samples or (20 if on_cuda else 7)
    names = list(GEOMETRIES) if args.geometry == "all" else [args.geometry]
    for name in names:
        for layout in LAYOUTS:
            _measure(report, name, layout, tokens, samples, device)


def _measure(report: Report, geometry: str, layout: Layout, tokens: int, samples: int, device: torch.device) -> None:
    setup = TransferSetup(GEOMETRIES[geometry], layout, tokens, device)
    on_cuda = device.type == "cuda"
    raw = raw_copies(device, 1 << 30 if on_cuda else 128 << 20)
    ceilings = {name: name if on_cuda else "memcpy" for name in ("up", "down", "both")}
    try:
        setup.verify()
        variants: dict[str, Callable[[], object]] = {"up": setup.load_all, "down": setup.store_all, "both": setup.both}
        variants.update({f"raw.{key}": raw[key].run for key in set(ceilings.values())})
        sync = (lambda: torch.cuda.synchronize(device)) if on_cuda else None
        seconds = interleave(variants, samples=samples, sync=sync)
        setup.verify()
    finally:
        setup.close()
    targets = TARGETS if on_cuda and geometry == "gqa8b" else {}
    both = "" if layout.name == BOTH_LAYOUT else f".{layout.name}"
    for direction, plain in ceilings.items():
        case = f"both.total{both}" if direction == "both" else f"{direction}.{layout.name}"
        ceiling_seconds, copied = seconds[f"raw.{plain}"], raw[plain].num_bytes
        target = targets.get(case)
        name = f"{case}.{geometry}"
        report.rate(
            name,
            setup.num_bytes,
            seconds[direction],
            ceiling_seconds=ceiling_seconds,
            ceiling_bytes=copied,
            target=target,
        )
    case, ceiling_seconds = f"both.up{both}", seconds["up"]
    note, target = "loads beside stores of as many bytes; the ceiling is loads alone", targets.get(case)
    half, name, loads = setup.num_bytes // 2, f"{case}.{geometry}", setup.up_seconds[-samples:]
    report.rate(
        name, half, loads, ceiling_seconds=ceiling_seconds, ceiling_bytes=setup.num_bytes, target=target, note=note
    )


def _pool(geometry: ModelGeometry | Latent, size: int, page: int, device: torch.device) -> KVCache:
    if isinstance(geometry, Latent):
        latent = (geometry.rank, geometry.rope, geometry.layer_num)
        return MLATokenToKVPool(size, page, torch.bfloat16, *latent, device, enable_memory_saver=False)
    heads = (geometry.head_num, geometry.head_dim, geometry.layer_num)
    return MHATokenToKVPool(size, page, torch.bfloat16, *heads, device, enable_memory_saver=False)
