"""How pages come to lie as a cache ages: a trace replayed through an engine on the CPU, and the runs of what it loads.

A request is admitted, committed and released, and all copies land before the next one. Each load and each allocation is
counted in runs of pages with consecutive ids, on either tier. A block of the trace is `--pages-per-block` pages. The
geometry is the smallest there is: no bytes are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hicache import CacheEngine, CacheRequest, EngineConfig, ModelGeometry, build_engine
from hicache.bench.common import BenchUnavailable, Case, Report
from hicache.bench.policy import hide_folder, read_trace, synthetic_trace
from hicache.transfer import CpuTransfer, TransferOp
from hicache.transfer.plan import Ids
from hicache.tree.key import Tokens

NAME = "ageing"
DESCRIPTION = "pages a run, on both tiers, of what an engine loads after thousands of requests"

_PAGE = 4  # tokens
_WINDOWS = 6  # of requests, each with its own cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids (default: a small synthetic trace)")
    parser.add_argument("--requests", type=int, default=9000, help="of the trace (default: %(default)s)")
    parser.add_argument("--pages-per-block", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--device-blocks", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--host-blocks", type=int, default=6000, help="default: %(default)s")


def run(args: argparse.Namespace, report: Report) -> None:
    for name in ("requests", "pages_per_block", "device_blocks", "host_blocks"):
        if getattr(args, name) < 1:
            raise BenchUnavailable(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    requests = (synthetic_trace() if args.trace is None else read_trace(args.trace))[: args.requests]
    if args.trace is not None:
        hide_folder(report, args.trace)
    for window in replay(requests, args.pages_per_block, args.device_blocks, args.host_blocks):
        for case in window.cases():
            report.add(case)


def num_runs(ids: Ids) -> int:
    """Of consecutive ids."""
    return 1 + int(np.count_nonzero(np.diff(ids) != 1)) if len(ids) else 0


@dataclass
class Window:
    """What was loaded while some requests were served, the last of which is number `end`."""

    end: int = 0
    pages: list[int] = field(default_factory=list)
    host_runs: list[int] = field(default_factory=list)
    device_runs: list[int] = field(default_factory=list)

    def add(self, pages: Ids, slots: Ids) -> None:
        self.pages.append(len(pages))
        self.host_runs.append(num_runs(pages))
        self.device_runs.append(num_runs(slots[::_PAGE] // _PAGE))

    def cases(self) -> list[Case]:
        note = f"{len(self.pages)} loads of {np.mean(self.pages):.1f} pages" if self.pages else "no load"
        return [
            Case.of(f"{tier}.{self.end}", [sum(self.pages) / max(1, sum(runs))], "pages a run", note=note)
            for tier, runs in (("host", self.host_runs), ("device", self.device_runs))
        ]


class _Recorder:
    """Stands in for a backend's `load`, which it calls. `window` may be replaced."""

    def __init__(self, transfer: CpuTransfer) -> None:
        self.window = Window()
        self._load = transfer.load

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> TransferOp:
        self.window.add(pages.numpy(), slots.numpy())
        return self._load(pages, slots, load_id)


def replay(requests: Sequence[Tokens], pages_per_block: int, device_blocks: int, host_blocks: int) -> list[Window]:
    """Serve the requests one after the other, but for those that need more than half of the device."""
    held = [ids for ids in requests if len(ids) <= device_blocks // 2]
    if not held:
        raise BenchUnavailable(f"--device-blocks {device_blocks}: twice the shortest request is {2 * len(requests[0])}")
    block, geometry = pages_per_block * _PAGE, ModelGeometry(layer_num=1, head_num=1, head_dim=2)
    config = EngineConfig(
        device_tokens=device_blocks * block, host_bytes=(host_blocks * block + _PAGE) * 8, page_size=_PAGE,
        host_page_size=_PAGE, max_context_len=max(map(len, held)) * block, model_id=NAME, device="cpu",
    )  # fmt: skip
    windows: list[Window] = []
    with build_engine(config, geometry) as engine:
        transfer = engine.inspect.context.full.transfer
        assert isinstance(transfer, CpuTransfer)
        recorder = _Recorder(transfer)
        transfer.load = recorder.load  # type: ignore[method-assign,assignment]
        for part in np.array_split(np.arange(len(held)), min(_WINDOWS, len(held))):
            recorder.window = Window(end=int(part[-1]) + 1)
            for at in part.tolist():
                _serve(engine, str(at), (held[at][:, None] * block + np.arange(block)).reshape(-1))
            windows.append(recorder.window)
        engine.check()
    return windows


def _serve(engine: CacheEngine, request_id: str, tokens: Tokens) -> None:
    with engine.acquire(CacheRequest(request_id, tokens)) as lease:
        engine.begin_forward([lease])
        engine.commit(lease, tokens)
    engine.flush()
