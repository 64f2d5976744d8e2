"""Measures requests that compute and load concurrently, compared with the faster of computing alone and loading alone.
Uses the reference scheduler, and the geometry of an 8B model on CUDA.

    equal, slow3, ...  time to first token of a prompt in a store as fast as computing, or 3 or 10 times slower or
                       faster; `freezes`: the store hangs after a quarter of the prompt;
    neighbours         time per output token of streams while such a request computes and loads, over that while a
                       request only waits for its load;
    eight              time until eight such requests, submitted at once, all have their first token;
    restart            time to first token after a restart, from a real disk, over the time when computing;
    sessions           mean time to first token of agent sessions with a store as fast as the machine's disk, over that
                       with the rule that chooses either computing or loading.

The store is in memory and sleeps (`throttled.py`), so each case can set the store's rate, and no prompt is computed to
fill the store. One process measures all variants. Loading alone is measured in turns with both at once. Computing alone
is measured before, and in cases where one per cent matters also in turns with them. On a CPU nothing is computed:
passes sleep for a fifth of a GPU's time (`SleepingRunner`), and there are no targets.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hicache.bench.common import Report, add_parts, chosen_parts, free_memory, percentile
from hicache.bench.raw_io import drop_caches
from hicache.bench.serving_case import Served, ServedModel, Tokens, prompts, random_llama, serving, sync
from hicache.bench.serving_sessions import SessionRun, SessionSizes, serve_turns
from hicache.bench.sessions import Scale, Turn, describe_turns, generated_turns
from hicache.bench.throttled import ThrottledStore
from hicache.engine import CacheEngine
from hicache.serving import Chunk, Request, Scheduler
from hicache.serving.warm_up import warm_up

NAME = "both"
DESCRIPTION = "computing and loading at once over the better of the two: throttled stores, a real disk, sessions"

Variant = Literal["compute", "load", "both"]
PARTS = ("rates", "neighbours", "eight", "restart", "sessions")


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts. `short`, `long`: tokens of prompts. `chunk`: tokens of a pass. `least_s`: minimum total
    seconds of the samples of a rate. `samples`: number of samples in other parts. `num_at_once`: number of concurrent
    requests. `stream`, `steps`: tokens of a stream's prompt and of its answer."""

    short: int
    long: int
    chunk: int
    least_s: float
    samples: int
    num_at_once: int
    stream: int
    steps: int
    sessions: SessionSizes


_SESSIONS = SessionSizes(Scale(requests=56, block_tokens=8, longest=32_000), 43_008, 34_816, 8192, 8, (1, 8, 32))
REAL = Sizes(32768, 98304, 8192, 4.0, 2, 8, 1024, 512, _SESSIONS)
# On a CPU passes sleep for a fifth of a GPU's time.
ASLEEP, _SPEED = Sizes(32768, 98304, 8192, 0.0, 1, 4, 1024, 512, _SESSIONS), 5.0
# Seconds of an 8B model on an H100: per pass, per token, and per token and position. A prompt of 98 304 tokens takes
# 7.3 s.
_PASS_S, _TOKEN_S, _PAIR_S = 0.012, 54e-6, 4.1e-10
# Time to read a token of 128 KiB from a disk of 1.43 GB/s. Computing a prompt of 98 304 tokens takes 76e-6 s per token.
_DISK_TOKEN_S = 92e-6


@dataclass(frozen=True)
class Rate:
    """A case. `slowdown`: time to load the prompt divided by the time to compute it. `variants`: the alternatives with
    which the case is compared. `target`: if it is above 1, computing is also measured in turns with the case.
    `freezes`: whether the store hangs after a quarter of the prompt."""

    name: str
    slowdown: float
    is_long: bool
    variants: tuple[Variant, ...]
    target: float
    freezes: bool = False

    @property
    def overlaps(self) -> tuple[Variant, ...]:
        """Return the variants that are measured in turns with "both"."""
        return tuple(variant for variant in self.variants if variant == "load" or self.target > 1)


RATES = (
    Rate("equal.32k", 1, False, ("compute", "load"), 0.6),
    Rate("equal.98k", 1, True, ("compute", "load"), 0.6),
    Rate("slow3", 3, True, ("compute",), 0.85),
    Rate("fast3", 1 / 3, True, ("load",), 0.85),
    Rate("slow10", 10, True, ("compute",), 1.02),
    Rate("fast10", 1 / 10, True, ("load",), 1.02),
    Rate("freezes", 1, True, ("compute",), 1.03, freezes=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    parser.add_argument("--folder", default="", help="where stores lie; default: a temporary folder")


def run(args: argparse.Namespace, report: Report) -> None:
    sizes = REAL if args.device.type == "cuda" else ASLEEP
    bench = _Both(report, random_llama(args.device), sizes, args.folder)
    for part in chosen_parts(args, report, PARTS):
        getattr(bench, part)()
        free_memory(args.device)


class SleepingRunner:
    """Implements the scheduler's `Runner` by sleeping. `speed`: speed of the simulated passes, as a multiple of the
    GPU's speed."""

    def __init__(self, engine: CacheEngine, vocab: int, speed: float) -> None:
        self._engine = engine
        self._vocab = vocab
        self._speed = speed

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Wait for the loads of the leases, as a model does, and then sleep. Returns logits that are all zero."""
        self._engine.begin_forward([chunk.lease for chunk in chunks])
        for layer in self._engine.pool.layer_ids:
            self._engine.pool.get_key_buffer(layer)
        time.sleep((_PASS_S + sum(map(_seconds, chunks))) / self._speed)
        return torch.zeros(sum(chunk.num_logits for chunk in chunks), self._vocab)


def _seconds(chunk: Chunk) -> float:
    num_tokens, position = chunk.end - chunk.start, (chunk.start + chunk.end) / 2
    return 0.0 if chunk.is_decode else num_tokens * (_TOKEN_S + _PAIR_S * position)


class _Asleep(Served):
    """A `Served` whose model sleeps instead of computing."""

    def scheduler(self, max_running: int = 32, **settings: Any) -> Scheduler:
        runner = SleepingRunner(self.engine, self.served.vocab, _SPEED)
        return Scheduler(self.engine, runner, chunk_tokens=self.chunk_tokens, max_running=max_running, **settings)


class _Case:
    """A served model with a throttled store that has the pages of prompts."""

    def __init__(self, served: Served, store: ThrottledStore, known: Sequence[Tokens]) -> None:
        self.served = served
        self.store = store
        self.known = known
        self._number = 0
        served.engine.flush()
        assert store.page_bytes, "what was computed to warm up is in the store"
        tree = served.engine.inspect.context.tree
        store.fill(key for tokens in known for key in tree.prompt_keys(tree.match(tokens, ""), tokens))
        self.token_bytes = store.page_bytes / tree.page_size

    def name(self, variant: Variant) -> str:
        self._number += 1
        return f"{variant} {self._number}"

    def forget(self) -> None:
        """Remove the prompts from all tiers except the store."""
        self.served.engine.flush()
        self.served.engine.reset(["device", "host"])
        sync(self.served.engine.pool.device)

    def request(self, tokens: Tokens, variant: Variant, num_new: int = 1) -> Request:
        """Return a request to submit immediately. If `variant` is "load", the request waits for its complete prefix. If
        it is "compute", the request finds no cached prefix."""
        name = self.name(variant)
        if variant == "load":
            self.served.engine.prefetch(name, tokens, mode="wait_complete")
        return Request(name, tokens, num_new, namespace=name if variant == "compute" else "")

    def seconds(self, prompts: Sequence[Tokens], variant: Variant) -> float:
        """Submit a request for each prompt. Return the seconds until all requests have ended."""
        self.forget()
        scheduler, begin_s = self.served.scheduler(), time.perf_counter()
        for tokens in prompts:
            scheduler.submit(self.request(tokens, variant))
        while scheduler.num_unfinished:
            for output in scheduler.step():
                if output.error is not None:
                    raise output.error
        return time.perf_counter() - begin_s

    def set_rate(self, known: Sequence[Tokens], seconds: float) -> None:
        """Set the store's rate so that reading all prompts `known` takes `seconds`. Then read a part of one prompt, so
        that the engine measures the new rate."""
        self.store.bytes_per_s = sum(len(tokens) for tokens in known) * self.token_bytes / seconds
        self.forget()
        engine, name = self.served.engine, self.name("load")
        handle = engine.prefetch(name, known[0][: len(known[0]) // 32], mode="wait_complete")
        while not handle.ready:
            engine.poll()
            time.sleep(0.001)
        engine.cancel(name)


class _Both:
    """Runs the parts of this benchmark."""

    def __init__(self, report: Report, served: ServedModel, sizes: Sizes, folder: str) -> None:
        self._report = report
        self._served = served
        self._sizes = sizes
        self._folder = folder
        self._on_cuda = served.model.device.type == "cuda"

    def rates(self) -> None:
        sizes = self._sizes
        with self._case([sizes.short, sizes.long]) as case:
            computed = [[case.seconds([tokens], "compute")] for tokens in case.known]
            for rate in RATES:
                self._rate(case, rate, case.known[rate.is_long], computed[rate.is_long])

    def neighbours(self) -> None:
        sizes = self._sizes
        with self._case([sizes.short]) as case:
            (tokens,) = case.known
            case.set_rate([tokens], case.seconds([tokens], "compute"))
            overlaps = {
                variant: [self._token_s(case, tokens, variant) for _ in range(sizes.samples)]
                for variant in ("load", "both")
            }
        self._report_case("neighbours", overlaps["both"], percentile(overlaps["load"], 50), 1.05, "4 streams")

    def eight(self) -> None:
        sizes = self._sizes
        with self._case([sizes.short] * sizes.num_at_once) as case:
            computed_s = case.seconds(case.known, "compute")
            case.set_rate(case.known, computed_s)
            loaded_s, both_s = (case.seconds(case.known, variant) for variant in ("load", "both"))
            note = f"computed {computed_s:.2f} s, loaded {loaded_s:.2f} s; {_met(case.served)}"
        self._report_case("eight", [both_s], min(computed_s, loaded_s), 0.75, note)

    def restart(self) -> None:
        """Measure after a restart: build a new engine over the same store, after its files were dropped from the
        kernel's page cache."""
        sizes, store = self._sizes, Path(tempfile.mkdtemp(prefix="hicache-both-", dir=self._folder or None))
        (tokens,) = prompts(1, sizes.long, self._served.vocab, seed=3)
        budget = 2 * len(tokens) * self._served.token_bytes
        disk = {"path": str(store / "store"), "budget_bytes": budget, "level": 0}
        measured = []
        try:
            with self._serving([sizes.long], disk=disk) as served:
                computed_s, _ = served.first_token_s("fill", tokens)
                served.engine.flush()
            for turn in range(sizes.samples):
                for part in store.glob("store/**/*"):
                    if part.is_file():
                        drop_caches(part)
                with self._serving([sizes.long], disk=disk) as served:
                    seconds, output = served.first_token_s(f"disk {turn}", tokens)
                    measured.append(seconds)
                    note = f"{output.hit.disk} of {len(tokens)} tokens from disk; computed {computed_s:.2f} s"
        finally:
            shutil.rmtree(store, ignore_errors=True)
        self._report_case("restart", measured, computed_s, 0.7, note)

    def sessions(self) -> None:
        """Run all sessions in one engine, and empty its tiers and store before each run. The store keeps written pages,
        and is as fast as the machine's disk."""
        sizes, token_bytes = self._sizes.sessions, self._served.token_bytes
        turns = generated_turns(sizes.scale)
        settings: dict[str, Any] = {
            "device_tokens": sizes.device_tokens,
            "host_bytes": sizes.host_tokens * token_bytes,
            "max_context_len": sizes.scale.longest + sizes.answer,
            "prefetch_host_share": 0.5,
        }
        with self._case([sizes.chunk], **settings) as case:
            case.set_rate(case.known, sizes.chunk * _DISK_TOKEN_S / (1 if self._on_cuda else _SPEED))
            case.store.keeps = True
            for clients, target in zip(sizes.clients, (0.95, 1.0, 1.0), strict=True):
                rule, overlapped = (self._session_run(case, turns, clients, overlaps) for overlaps in (False, True))
                note = f"{clients} clients; both {overlapped}; the rule {rule}; {describe_turns(turns, 8)}"
                self._report_case(f"sessions.{clients}", [overlapped.mean_s], rule.mean_s, target, note)

    # Inside

    def _rate(self, case: _Case, rate: Rate, tokens: Tokens, computed: list[float]) -> None:
        """Measure a case. `computed`: seconds to compute the prompt so far; this method may append samples."""
        case.set_rate([tokens], percentile(computed, 50) * rate.slowdown)
        taken: dict[Variant, list[float]] = {variant: [] for variant in (*rate.overlaps, "both")}
        taken["compute"] = computed
        begin_s = time.perf_counter()
        while not taken["both"] or time.perf_counter() - begin_s < self._sizes.least_s:
            for variant in (*rate.overlaps, "both"):
                if variant == "both" and rate.freezes:
                    case.store.stop_after(len(tokens) * case.token_bytes / 4)
                taken[variant].append(case.seconds([tokens], variant))
                case.store.go_on()
        best_s = min(percentile(taken[variant], 50) for variant in rate.variants)
        note = "; ".join(f"{variant} {percentile(seconds, 50):.2f} s" for variant, seconds in taken.items())
        note += f"; store {case.store.bytes_per_s / 1e9:.2f} GB/s; {_met(case.served)}"
        self._report_case(rate.name, taken["both"], best_s, rate.target, note)

    def _session_run(self, case: _Case, turns: Sequence[Turn], clients: int, overlaps: bool) -> SessionRun:
        """Serve the turns, beginning with empty tiers. `overlaps`: whether requests compute and load concurrently;
        otherwise the rule chooses either computing or loading."""
        prefetcher = case.served.engine.inspect.prefetcher
        assert prefetcher is not None
        prefetcher.is_overlap_enabled = overlaps
        case.forget()
        case.store.fill(())
        scheduler = case.served.scheduler(max_pass_s=0.5, max_overtake_s=15.0)
        return serve_turns(scheduler, turns, self._sizes.sessions, clients)

    def _token_s(self, case: _Case, tokens: Tokens, variant: Variant) -> float:
        """Return the seconds per output token of four streams while another request waits for its first token."""
        case.forget()
        sizes, times = self._sizes, list[float]()
        scheduler = case.served.scheduler()
        for n, stream in enumerate(prompts(4, sizes.stream, self._served.vocab, seed=11)):
            name = case.name(variant)
            request = Request(name, stream, sizes.steps, namespace=name)
            scheduler.submit(request, None if n else lambda _: times.append(time.perf_counter()))
        while len(times) < 16:
            scheduler.step()
        request, begin = case.request(tokens, variant), len(times)
        scheduler.submit(request)
        while request.request_id not in {output.request_id for output in scheduler.step()}:
            pass
        end = len(times)
        scheduler.abort_all()
        return (times[end - 1] - times[begin - 1]) / max(1, end - begin)

    @contextmanager
    def _case(self, lengths: Sequence[int], **settings: Any) -> Iterator[_Case]:
        store = ThrottledStore()
        with self._serving(lengths, store=store, **settings) as served:
            case = _Case(served, store, [*_prompts(lengths, self._served.vocab)])
            try:
                yield case
            finally:
                store.go_on()
                store.bytes_per_s = math.inf

    @contextmanager
    def _serving(self, lengths: Sequence[int], **settings: Any) -> Iterator[Served]:
        sizes, longest = self._sizes, max(lengths) + 4 * (self._sizes.stream + self._sizes.steps) + 1024
        values: dict[str, Any] = {
            "device_tokens": max(longest, min(sum(lengths), sizes.long)),
            "host_bytes": (longest + sum(lengths) - max(lengths)) * self._served.token_bytes,
            "max_context_len": longest,
            "prefetch_host_share": 1.0,
        }
        with serving(self._served, chunk_tokens=sizes.chunk, **{**values, **settings}) as served:
            if self._on_cuda:
                warm_up(served.engine, served.runner, sizes.chunk, 32)
            kind = Served if self._on_cuda else _Asleep
            made = kind(served.served, served.engine, served.runner, sizes.chunk)
            (first,) = prompts(1, sizes.chunk, self._served.vocab, seed=99)
            made.first_token_s("warm", first, namespace="warm")
            yield made

    def _report_case(self, name: str, seconds: list[float], best_s: float, target: float, note: str) -> None:
        aim = target if self._on_cuda else None
        self._report.case(f"both.{name}", seconds, "s", better="lower", ceiling=best_s, target=aim, note=note)


def _prompts(lengths: Sequence[int], vocab: int) -> Iterator[Tokens]:
    for seed, length in enumerate(lengths):
        yield from prompts(1, length, vocab, seed=100 + seed)


def _met(served: Served) -> str:
    stats = served.engine.stats()
    computed, loaded = stats["prefetch.overlap_computed_tokens"], stats["prefetch.overlap_loaded_tokens"]
    return f"so far {computed:.0f} tokens computed beside and {loaded:.0f} loaded"
