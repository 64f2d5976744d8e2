"""Measures a real server with a model of random weights under a workload. Modes are no cache below the GPU, the
server's own tiers, and hicache.

    hicache bench run servers --modes none,cpu,lazy,hicache --cpu-gib 64 --samples 3 --resume servers.json

Each run has a separate process and folder, and begins with empty caches. The result file has all runs, and is written
after each run. `hicache.bench.servers.cases` computes the cases from all runs. With `--resume` a command makes only the
runs that the file lacks. A run has one mode, because starting a server takes as long as its requests. Runs of different
modes alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import queue
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.servers import sglang, vllm
from hicache.bench.servers.cases import add_cases
from hicache.bench.servers.lmcache import lmcache_server
from hicache.bench.servers.program import file_system, run_program
from hicache.bench.servers.runs import Run, Setting, missing_runs, plan
from hicache.bench.servers.workload import Workload, describe, distinct_tokens

NAME = "servers"
DESCRIPTION = "a real server (vLLM, SGLang): no offloading, its own CPU and disk tiers, and ours"

_SERVERS: dict[str, ModuleType] = {"vllm": vllm, "sglang": sglang}
_WRITE_POLICIES = ("write_back", "write_through")
_START_S = 300.0
_SPARE_TOKENS = 256  # tokens that a request may have in addition to its prompt and answer
_PAGE_TOKENS = 64
_EXCESS = 2.5  # ratio of distinct tokens to the size of SGLang's cache on the device
_SEED = 23


@dataclass(frozen=True)
class _Sizes:
    """Default sizes. `gpu_tokens`: None means a fixed share of the workload's distinct tokens."""

    sessions: int = 40
    turns: int = 8
    growth: int = 6000
    common: int = 4000
    longest: int = 64_000
    requests: int = 120
    longest_conversation: int = 60_000
    block_tokens: int = 512
    clients: int = 16
    cpu_gib: float = 64.0
    gpu_tokens: int | None = 0
    layers: int = 0


_MEMORY = _Sizes()
_DISK = _Sizes(sessions=12, gpu_tokens=180_000, cpu_gib=16.0)
_SGLANG = _Sizes(sessions=12, turns=6, growth=4000, clients=4, cpu_gib=0.0, gpu_tokens=None, layers=8)
_SMALL = _Sizes(4, 3, 300, 64, 1500, 8, 1500, 16, 3, 1 / 64, 2048)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server", choices=tuple(_SERVERS), default="vllm")
    add("--workload", choices=("agents", "conversation"), default="agents", help="docs/benchmarks.md has the formula")
    add("--modes", type=lambda text: text.split(","), metavar="MODES", help="with commas: docs/benchmarks.md")
    add("--samples", type=int, default=1, help="runs of each mode (default: 1)")
    order = "A B B A A B, or A B A B A B (default: balanced)"
    add("--order", choices=("balanced", "rounds"), default="balanced", help=order)
    add("--gpus", type=lambda text: text.split(","), default=["0"], metavar="N,N", help="a server on each (default: 0)")
    add("--clients", type=_integers, metavar="N,N", help="numbers of clients, a run for each (default: 16; SGLang: 4)")
    cpu_gib = "sizes of the CPU tier, a run for each (default: 64; with a disk: 16; SGLang: as on the device)"
    add("--cpu-gib", type=lambda text: [float(part) for part in text.split(",")], metavar="N,N", help=cpu_gib)
    gpu_tokens = "tokens of the GPU's cache; 0: all (default: 0; with a disk: 180000; SGLang: distinct tokens / 2.5)"
    add("--gpu-tokens", type=int, help=gpu_tokens)
    add("--sessions", type=int, help="sessions of agents (default: 40; with a disk, and SGLang: 12)")
    add("--turns", type=int, help="turns of a session (default: 8; SGLang: 6)")
    add("--growth", type=int, help="mean new tokens of a turn (default: 6000; SGLang: 4000)")
    add("--seed", type=int, default=_SEED, help=f"seed of the workload (default: {_SEED})")
    add("--trace", type=Path, metavar="PATH", help="trace for the workload conversation (default: generated prompts)")
    add("--requests", type=int, help="requests of the workload conversation (default: 120)")
    add("--longest", type=int, help="maximum tokens of a prompt (default: 64000, conversation: 60000)")
    add("--answer-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    add("--write-policy", choices=_WRITE_POLICIES, default=_WRITE_POLICIES[0], help="of SGLang (default: write_back)")
    add("--blocks-per-chunk", type=int, default=4, help="GPU blocks in a chunk of the CPU tier (default: 4)")
    add("--model", default="", help="name or folder (default: random weights, 8B geometry)")
    add("--layers", type=int, help="layers of the model of random weights (default: 32; SGLang: 8)")
    add("--folder", type=Path, help="folder on the disk to measure (default: a temporary folder)")
    add("--limit-s", type=float, default=400.0, help="seconds after which a run is stopped and lost (default: 400)")
    add("--small", action="store_true", help="a tiny model and short prompts; always so on CPUs")


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(args: argparse.Namespace, report: Report) -> None:
    server = _SERVERS[args.server]
    if reason := server.missing():
        raise BenchUnavailable(reason)
    modes = args.modes or (list(server.MODES) if args.device.type == "cuda" else ["none", "hicache"])
    if unknown := set(modes) - set(server.MODES):
        raise BenchUnavailable(f"--modes {','.join(sorted(unknown))}: there are {', '.join(server.MODES)}")
    args.model = str(Path(args.model).resolve()) if args.model and Path(args.model).exists() else args.model
    args.small = args.small or args.device.type == "cpu"
    with tempfile.TemporaryDirectory(prefix="hicache-servers-", dir=args.folder) as folder:
        served = _Served(server, args, report, Path(folder).resolve())
        settings = [setting for mode in modes for setting in served.settings(mode)]
        served.serve(missing_runs(plan(settings, args.samples, args.order), served.runs))
    if not served.runs:
        raise BenchUnavailable(f"{args.server} serves none of {', '.join(modes)}: the reasons are above")
    add_cases(report, served.runs, small=args.small)


@dataclass
class _Served:
    """Makes runs, one at a time on each GPU. `folder`: folder for the files of all runs."""

    server: ModuleType
    args: argparse.Namespace
    report: Report
    folder: Path
    runs: list[Run] = field(init=False)
    _workloads: dict[Setting, tuple[Workload, str]] = field(default_factory=dict)
    _described: dict[Workload, tuple[int, str]] = field(default_factory=dict)  # distinct tokens, description
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.runs = [Run.from_json(values) for values in self.report.runs]

    def settings(self, mode: str) -> list[Setting]:
        """Return the settings of a mode, one for each number of clients and, if the mode has a CPU tier, each size of
        it."""
        has_disk, is_sglang = mode in self.server.DISK_MODES, self.args.server == "sglang"
        usual = _SMALL if self.args.small else _SGLANG if is_sglang else _DISK if has_disk else _MEMORY
        self.args.layers = usual.layers if self.args.layers is None else self.args.layers
        workload, by_default = self._workload(usual), self._workload(usual, defaults=True)
        if workload not in self._described:
            prompts = workload.prompts()
            self._described[workload] = distinct_tokens(prompts), describe(prompts)
        distinct, prompts_text = self._described[workload]
        gpu_tokens = int(distinct / _EXCESS) // _PAGE_TOKENS * _PAGE_TOKENS
        usual_tokens = gpu_tokens if usual.gpu_tokens is None else usual.gpu_tokens
        gpu_tokens = usual_tokens if self.args.gpu_tokens is None else self.args.gpu_tokens
        sizes = self.args.cpu_gib or [usual.cpu_gib or _device_gib(gpu_tokens, self.args.layers)]
        files = file_system(self.folder) if has_disk else ""
        found = []
        for clients in self.args.clients or [usual.clients]:
            variant = [] if workload.label == by_default.label else [workload.label]
            variant += [] if clients == usual.clients else [f"c{clients}"]
            variant += [] if gpu_tokens == usual_tokens else [f"gpu{gpu_tokens}"]
            variant += ["tmpfs"] if files == "tmpfs" else []
            variant += [self.args.write_policy] if is_sglang and self.args.write_policy != _WRITE_POLICIES[0] else []
            about = (workload.name, workload.label, clients)
            for cpu_gib in [0.0] if mode == "none" else sizes:
                setting = Setting(self.args.server, mode, *about, cpu_gib, gpu_tokens, files, ".".join(variant))
                self._workloads[setting] = workload, prompts_text
                found.append(setting)
        return found

    def serve(self, settings: list[Setting]) -> None:
        """Make one run for each of `settings`. A GPU that becomes free gets the next run. The result file is written
        after each run."""
        left: queue.SimpleQueue[tuple[int, Setting]] = queue.SimpleQueue()
        for numbered in enumerate(settings):
            left.put(numbered)

        def work(gpu: str) -> None:
            while True:
                try:
                    number, setting = left.get_nowait()
                except queue.Empty:
                    return
                self._serve_next(setting, f"{number}-{setting.mode}", gpu)

        with ThreadPoolExecutor(len(self.args.gpus)) as threads:
            list(threads.map(work, self.args.gpus))

    def _serve_next(self, setting: Setting, name: str, gpu: str) -> None:
        try:
            made = self._serve(setting, name, gpu)
        except BenchUnavailable as error:  # continue with the next run
            print(f"{setting.mode}: {error}", flush=True)
            return
        with self._lock:
            self.runs.append(made)
            self.report.runs.append(dataclasses.asdict(made))
            self.report.software[self.args.server] = made.version
            self.report.write(self.args.resume or self.args.out)  # a killed benchmark keeps its runs
            shown = f"{setting.mode} {setting.cpu_gib:g} GiB {setting.variant}: started in {made.start_s:.0f} s"
            shown += f", {made.makespan_s:.1f} s, {made.cached_text} cached, first token {made.first_text}"
            shown += f", between tokens {made.between_text}"
            print(shown, flush=True)

    def _serve(self, setting: Setting, name: str, gpu: str) -> Run:
        """Make a run. Raises BenchUnavailable if the server does not answer all prompts within `--limit-s`."""
        workload, prompts = self._workloads[setting]
        files = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        environment = {**self.server.ENVIRONMENT, "TRITON_CACHE_DIR": str(self.folder / "triton")}
        environment |= {} if self.args.device.type == "cpu" else {"CUDA_VISIBLE_DEVICES": gpu}
        environment |= {} if self.args.model else {"HF_HUB_OFFLINE": "1"}
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, files, ignore_errors=True)  # saves disk space for the next runs
            stack.callback(self.server.clean_up, files)
            lmcache = {}
            if setting.mode == "lmcache":
                log = self.folder / f"{name}.lmcache.log"
                lmcache = stack.enter_context(lmcache_server(setting.cpu_gib, environment, log))
            max_tokens = workload.longest + self.args.answer_tokens + _SPARE_TOKENS
            task = self.server.task(setting, self.args, max_tokens, files, lmcache)
            environment |= task.pop("environment", {})
            task |= {"workload": dataclasses.asdict(workload), "clients": setting.clients}
            task |= {"answer_tokens": self.args.answer_tokens, "limit_s": self.args.limit_s}
            timeout_s = _START_S + 2 * self.args.limit_s
            served = run_program(self.server.__name__, name, task, environment, self.folder, timeout_s)
        if len(served["answers"]) < served["num_requests"]:
            answered = f"{len(served['answers'])} of {served['num_requests']} prompts"
            raise BenchUnavailable(f"answered {answered} in {served['makespan_s']:.0f} s; raise --limit-s")
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return Run.of(setting, served, prompts=prompts, date=date, num_gpus=len(self.args.gpus))

    def _workload(self, usual: _Sizes, *, defaults: bool = False) -> Workload:
        """Return the workload that the arguments give. `defaults`: return the workload without arguments instead, with
        which names of cases are compared."""

        def size(name: str, of: int) -> int:
            given = getattr(self.args, name)
            return of if given is None or defaults else int(given)

        about: dict[str, Any] = {"name": self.args.workload, "seed": self.args.seed, "is_tiny": self.args.small}
        if self.args.workload == "agents":
            about |= {name: size(name, getattr(usual, name)) for name in ("sessions", "turns", "growth", "longest")}
            return Workload(**about, common=usual.common)
        return Workload(
            **about,
            requests=size("requests", usual.requests),
            longest=size("longest", usual.longest_conversation),
            block_tokens=usual.block_tokens,
            trace=str(self.args.trace or ""),
        )


def _device_gib(gpu_tokens: int, layers: int) -> float:
    """Return the GiB of keys and values of `gpu_tokens` tokens, plus a tenth, for 8 heads of 128 elements."""
    return 1.1 * gpu_tokens * layers * 2 * 8 * 128 * 2 / (1 << 30)
