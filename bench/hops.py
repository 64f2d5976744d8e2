"""`python -m bench.hops`: calls into another file ("hops") that each movement of a page takes, counted on the CPU.

A hop is a Python call whose callee's file differs from the direct caller's file, both files being the project's. A tiny
engine of each kind of model serves prompts of two pages through the engine's public methods alone, so the same program
runs on versions whose insides differ. The scheduler's thread, the disk threads and the copy threads are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from hicache import CacheEngine, CacheRequest, DiskConfig, EngineConfig, Lease, ModelGeometry, build_engine
from hicache.errors import ConfigError
from hicache.layout import StateGeometry

_GROUPS = ("scheduler", "disk", "copy")
_PAGE = 64  # tokens of a host page, the default
_PROMPT = 2 * _PAGE
_DEVICE_TOKENS = 8 * _PAGE
_QUIET_S, _QUIET_TIMES = 0.02, 3  # other threads are idle when they called nothing for so long, so many times in a row
_MAX_TURNS = 400

_STATE = StateGeometry(((5, 3),), (2, 3, 4), torch.float32, torch.float32)
MODELS = {
    "full": ModelGeometry(2, 1, 8),
    "window": ModelGeometry(3, 1, 8, layer_kinds=("full", "window", "window"), window=_PAGE),
    "hybrid": ModelGeometry(3, 1, 8, layer_kinds=("recurrent", "full", "recurrent"), state=_STATE),
}


@dataclass
class Trace:
    """What was called while it was recorded: hops by group of threads, and the files and functions that ran."""

    hops: Counter[str] = field(default_factory=Counter)
    functions: set[tuple[str, str, int]] = field(default_factory=set)

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.functions}

    def __add__(self, other: Trace) -> Trace:
        return Trace(self.hops + other.hops, self.functions | other.functions)


class Tracer:
    """A profile function for all threads. Each thread counts for itself, as no counter is shared without a lock."""

    def __init__(self) -> None:
        self._roots = [(name, _folder(name)) for name in ("hicache.kernels", "hicache.storage", "hicache")]
        self._files: dict[str, str | None] = {}
        self._traces: dict[int, tuple[str, Trace]] = {}
        self._active = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Threads that start within are traced, and the calling thread is."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def record(self, action: Callable[[], Any]) -> Trace:
        """Run `action`, wait until the other threads are idle, and return what all of them called."""
        self._traces = {}
        self._active = True
        action()
        self._wait_until_idle()
        self._active = False
        total = Trace()
        for group, trace in self._traces.values():
            total += Trace(Counter({group: trace.hops[group]}), trace.functions)
        return total

    def _wait_until_idle(self) -> None:
        quiet, before = 0, -1
        while quiet < _QUIET_TIMES:
            time.sleep(_QUIET_S)
            now = sum(len(trace.functions) + trace.hops.total() for _, trace in list(self._traces.values()))
            quiet, before = (quiet + 1 if now == before else 0), now

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not self._active:
            return
        code = frame.f_code
        callee = self._file_of(code)
        if callee is None:
            return
        group, trace = self._trace_of_thread()
        if not code.co_name.startswith("<"):  # a comprehension or lambda belongs to the function around it
            trace.functions.add((callee, code.co_name, code.co_firstlineno))
        caller = self._file_of(frame.f_back.f_code) if frame.f_back is not None else None
        if caller is not None and caller != callee:
            trace.hops[group] += 1

    def _trace_of_thread(self) -> tuple[str, Trace]:
        number = threading.get_ident()
        if number not in self._traces:
            self._traces[number] = (_group(threading.current_thread()), Trace())
        return self._traces[number]

    def _file_of(self, code: CodeType) -> str | None:
        name = code.co_filename
        if name not in self._files:
            self._files[name] = self._short(Path(name))
        return self._files[name]

    def _short(self, path: Path) -> str | None:
        for package, folder in self._roots:
            if path.is_relative_to(folder):
                return f"{package.removeprefix('hicache.')}/{path.relative_to(folder)}"
        return None


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not installed"
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _group(thread: threading.Thread) -> str:
    if thread is threading.main_thread():
        return "scheduler"
    return "disk" if "disk" in thread.name else "copy"


class Run:
    """The cases of one model, in the order of a page's circle. `traces` has what each called."""

    def __init__(self, engine: CacheEngine, tracer: Tracer, *, has_disk: bool) -> None:
        self._engine, self._tracer, self._has_disk = engine, tracer, has_disk
        self._next = 0
        self._idle_hops = 0
        self.traces: dict[str, Trace] = {}
        self._circle = Trace()

    def all(self) -> None:
        """GPU -> host -> disk -> host -> GPU, with two pages."""
        prompt = self._fresh()
        self._serve(self._fresh())  # what is made at first use is made
        self._idle_hops = self._record(self._engine.poll).hops["scheduler"]
        lease = self._admit("admission, cold", prompt)
        self._note("commit", self._record(lambda: self._engine.commit(lease, prompt[:_PROMPT])))
        name = "backup lands, with its write to disk" if self._has_disk else "backup lands"
        self._note(name, self._polls_until_idle())
        self._note("release", self._record(lambda: self._engine.release(lease)))
        self._evict(prompt, "device")
        self._end(self._admit("admission, host hit, full device", prompt))
        if self._has_disk:
            self._evict(prompt, "device")
            self._evict(prompt, "host")
            self._note("prefetch until it landed", self._prefetch(prompt))
            self._end(self._admit("admission after a prefetch", prompt))
        self.traces["the whole circle"] = Trace(functions=self._circle.functions)

    def _fresh(self) -> np.ndarray:
        """A prompt that no other shares a page with: two pages and the token that is always computed."""
        self._next += 1
        return np.random.default_rng(self._next).integers(0, 50_000, _PROMPT + 1)

    def _record(self, action: Callable[[], Any]) -> Trace:
        trace = self._tracer.record(action)
        self._circle += trace
        return trace

    def _note(self, case: str, trace: Trace) -> None:
        self.traces[case] = trace

    def _admit(self, case: str, prompt: np.ndarray) -> Lease:
        leases: list[Lease] = []
        request = CacheRequest(f"r{self._next}", prompt)
        self._note(case, self._record(lambda: leases.append(self._engine.acquire(request))))
        expected = 0 if case == "admission, cold" else _PROMPT
        assert leases[0].cached_len == expected, f"{case}: {leases[0].cached_len} tokens are cached, not {expected}"
        return leases[0]

    def _polls_until_idle(self) -> Trace:
        """Polls until one costs no more than that of an idle engine; the last is not counted."""
        total = Trace()
        for _ in range(_MAX_TURNS):
            turn = self._record(self._engine.poll)
            if turn.hops["scheduler"] <= self._idle_hops:
                return total
            total += turn
        raise AssertionError("the engine does not become idle")

    def _prefetch(self, prompt: np.ndarray) -> Trace:
        total = self._record(lambda: self._engine.prefetch(f"r{self._next}", prompt, mode="wait_complete"))
        return total + self._polls_until_idle()

    def _end(self, lease: Lease) -> None:
        """The rest of a request, traced for the circle alone."""

        def rest() -> None:
            self._engine.begin_forward([lease])
            self._engine.flush()
            self._engine.release(lease)

        self._record(rest)

    def _serve(self, prompt: np.ndarray) -> None:
        """A request from admission to release."""

        def request() -> None:
            with self._engine.acquire(CacheRequest("other", prompt)) as lease:
                self._engine.begin_forward([lease])
                self._engine.commit(lease, prompt[:_PROMPT])
            self._engine.flush()

        self._record(request)

    def _evict(self, prompt: np.ndarray, tier: str) -> None:
        """Serve others until `tier` does not have the prompt any more."""
        for _ in range(_MAX_TURNS):
            held = self._engine.lookup(prompt, disk_wait_s=5.0)
            if not (held.device if tier == "device" else held.device + held.host):
                assert held.host + held.disk == _PROMPT, f"{held.host + held.disk} tokens survived, not {_PROMPT}"
                return
            self._serve(self._fresh())
        raise AssertionError(f"the prompt does not leave the {tier}")


def _engine(model: ModelGeometry, folder: str) -> tuple[CacheEngine, bool]:
    """An engine with a disk where the model's pages can go there, and whether it has one."""
    settings: dict[str, Any] = {
        "device_tokens": _DEVICE_TOKENS,
        "host_bytes": 1 << 20,
        "max_requests": 4,
        "max_context_len": 1024,
        "dtype": "float32",
        "model_id": "hops",
    }
    try:
        disk = DiskConfig(path=folder, budget_bytes=64 << 20)
        return build_engine(EngineConfig(**settings, disk=disk), model), True
    except ConfigError:
        return build_engine(EngineConfig(**settings), model), False


def trace_models(names: Sequence[str]) -> dict[str, dict[str, Trace]]:
    """What each case of each model called."""
    found: dict[str, dict[str, Trace]] = {}
    for name in names:
        tracer = Tracer()
        with tempfile.TemporaryDirectory() as folder, tracer.installed():
            engine, has_disk = _engine(MODELS[name], folder)
            with engine:
                run = Run(engine, tracer, has_disk=has_disk)
                run.all()
            found[name] = run.traces
    return found


def figures(trace: Trace) -> dict[str, int]:
    """The numbers of one case."""
    hops = {f"hops_{group}": trace.hops[group] for group in _GROUPS}
    return {"hops": trace.hops.total(), **hops, "files": len(trace.files), "functions": len(trace.functions)}


def _print(found: dict[str, dict[str, Trace]]) -> None:
    hops_title = " + ".join(f"{group:>9}" for group in _GROUPS)
    print(f"{'model':8}{'case':40}{'hops':>6} = {hops_title}{'files':>8}{'functions':>11}")
    for model, cases in found.items():
        for case, trace in cases.items():
            of_groups = "   ".join(f"{trace.hops[group] if trace.hops else '':>9}" for group in _GROUPS)
            total = trace.hops.total() or ""
            print(f"{model:8}{case:40}{total:>6}   {of_groups}{len(trace.files):8}{len(trace.functions):11}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hops", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--model", choices=list(MODELS), action="append", help="only this one (repeat for more)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and the names of the files there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = trace_models(args.model or list(MODELS))
    _print(found)
    if args.json is not None:
        written = {
            model: {
                case: {
                    **figures(trace),
                    "file_names": sorted(trace.files),
                    "function_names": sorted(f"{file}:{name}" for file, name, _ in trace.functions),
                }
                for case, trace in cases.items()
            }
            for model, cases in found.items()
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
