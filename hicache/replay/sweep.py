"""Replays of one trace with many settings, in parallel processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch

from hicache.replay.cost import TierCosts
from hicache.replay.simulation import ReplayResult, ReplaySettings, one_tier, optimal, replay
from hicache.replay.trace import Trace

_POLL_S = 0.1

Row = Literal["policy", "one tier", "optimal", "unlimited"]


@dataclass(frozen=True)
class Case:
    """One replay of a sweep. The case `one tier` has one device tier as large as all tiers of `settings` together;
    `optimal` has optimal eviction in a tier of this size; `unlimited` has a device tier without a limit."""

    row: Row
    settings: ReplaySettings

    @property
    def comparisons(self) -> dict[str, Case]:
        """The cases to compare with this case, if it is a policy with several tiers: one tier with the capacity of all
        tiers, and a host of twice the size."""
        settings, found = self.settings, dict[str, Case]()
        if self.row == "policy" and settings.host_blocks != 0:
            found["one_tier"] = Case("one tier", settings)
            if settings.host_blocks is not None:
                found["twice_the_host"] = Case("policy", replace(settings, host_blocks=2 * settings.host_blocks))
        return found


class _Stopped(Exception):
    """The sweep was interrupted."""


@dataclass(frozen=True)
class _SweepState:
    """The arguments of a worker. `num_done`: number of requests that all workers together have served; if negative, the
    workers stop."""

    trace: Trace
    costs: TierCosts | None
    num_done: Synchronized[int]


_worker: list[_SweepState] = []  # one item in a worker process, empty in other processes


def cases_of(settings: Iterable[ReplaySettings], policies: Sequence[str]) -> list[Case]:
    """Return the cases of all policies and the optimum for each of `settings`, and at the end the case of a tier
    without limit."""
    cases: list[Case] = []
    for each in settings:
        cases += [Case("policy", replace(each, policy=policy)) for policy in policies]
        cases.append(Case("optimal", each))
    return [*cases, Case("unlimited", ReplaySettings(None))]


def with_comparisons(cases: Iterable[Case]) -> list[Case]:
    """Return `cases` and the cases that they are compared with, without duplicates."""
    cases = list(cases)
    return list(dict.fromkeys([*cases, *(other for case in cases for other in case.comparisons.values())]))


def run_case(
    trace: Trace, case: Case, costs: TierCosts | None, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """Run one case. `on_progress`: as in `replay`; the case `optimal` calls it only at its end."""
    if case.row == "policy":
        return replay(trace, case.settings, on_progress, costs)
    if case.row == "one tier":
        return one_tier(trace, case.settings, on_progress, costs)
    result = optimal(trace, case.settings, costs, name=case.row)
    if on_progress is not None:
        on_progress(len(trace.requests))
    return result


def sweep(
    trace: Trace,
    cases: Sequence[Case],
    costs: TierCosts | None = None,
    num_processes: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[ReplayResult]:
    """Run `cases` and return their results in order.

    `on_progress` gets the number of served requests of all cases together. All processes have ended when this function
    returns or raises, also after Ctrl-C.
    """
    report = on_progress or _silent
    if min(num_processes, len(cases)) <= 1:
        size = len(trace.requests)
        return [run_case(trace, case, costs, partial(_after, report, at * size)) for at, case in enumerate(cases)]
    _ = trace.prefixes  # computed once before the fork, so that the processes inherit the prefixes
    context = multiprocessing.get_context("fork")  # spawned processes would need seconds to import torch
    num_done: Synchronized[int] = context.Value("q", 0)
    executor = ProcessPoolExecutor(min(num_processes, len(cases)), context, _start, (trace, costs, num_done))
    try:
        with _interrupts_blocked():
            futures = [executor.submit(_run, case) for case in cases]
        pending: set[Future[ReplayResult]] = set(futures)
        while pending:
            pending = wait(pending, _POLL_S).not_done
            report(num_done.value)
        return [future.result() for future in futures]
    finally:
        with num_done.get_lock():
            num_done.value = -1 << 62
        executor.shutdown(cancel_futures=True)


def _silent(count: int) -> None:
    pass


def _after(report: Callable[[int], None], before: int, count: int) -> None:
    report(before + count)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this process and in the processes that it starts meanwhile.

    A terminal sends Ctrl-C to all processes, but only the main process handles it: it sets the
    shared counter `num_done` so that the workers stop.
    A SIGINT that arrives while SIGINT is blocked is delivered when the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Functions that run in a worker process


def _start(trace: Trace, costs: TierCosts | None, num_done: Synchronized[int]) -> None:
    torch.set_num_threads(1)  # a fork has no thread pool, and each processor runs a replay
    gc.freeze()  # garbage collection of the trace and torch would take a tenth of a replay
    _worker.append(_SweepState(trace, costs, num_done))


def _run(case: Case) -> ReplayResult:
    state, reported = _worker[-1], 0

    def report(count: int) -> None:
        nonlocal reported
        with state.num_done.get_lock():
            state.num_done.value += count - reported
            is_stopped = state.num_done.value < 0
        reported = count
        if is_stopped:
            raise _Stopped

    return run_case(state.trace, case, state.costs, report)
