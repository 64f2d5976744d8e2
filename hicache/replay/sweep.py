"""Many replays of one trace, in processes beside each other."""

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
    """One replay of a sweep. `one tier`: all blocks of `settings` on the device; `optimal`: the most that any order
    could hit in them; `unlimited`: a device tier that holds everything."""

    row: Row
    settings: ReplaySettings

    @property
    def beside(self) -> dict[str, Case]:
        """What a row of a policy with several tiers is compared with: one tier as large, and twice the host."""
        settings, found = self.settings, dict[str, Case]()
        if self.row == "policy" and settings.host_blocks != 0:
            found["one_tier"] = Case("one tier", settings)
            if settings.host_blocks is not None:
                found["twice_the_host"] = Case("policy", replace(settings, host_blocks=2 * settings.host_blocks))
        return found


class _Stopped(Exception):
    """The sweep was interrupted."""


@dataclass(frozen=True)
class _Shared:
    """What a worker has of its sweep. `num_done`: requests of all workers; below 0, the workers are to stop."""

    trace: Trace
    costs: TierCosts | None
    num_done: Synchronized[int]


_worker: list[_Shared] = []  # of a worker process, from its start on


def cases_of(settings: Iterable[ReplaySettings], policies: Sequence[str]) -> list[Case]:
    """For every size the policies and the optimum; at the end, no limit."""
    cases: list[Case] = []
    for each in settings:
        cases += [Case("policy", replace(each, policy=policy)) for policy in policies]
        cases.append(Case("optimal", each))
    return [*cases, Case("unlimited", ReplaySettings(None))]


def with_beside(cases: Iterable[Case]) -> list[Case]:
    """These, and all that stands beside them, each once."""
    cases = list(cases)
    return list(dict.fromkeys([*cases, *(other for case in cases for other in case.beside.values())]))


def run_case(
    trace: Trace, case: Case, costs: TierCosts | None, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """The result of one row. `on_progress` as in `replay`; an optimum reports its end alone."""
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
    """The results of `cases`, in their order. `on_progress` gets the requests done, of all cases together, up to their
    number times that of the cases.

    Whatever ends it, Ctrl-C included, the processes have ended when it returns or raises.
    """
    report = on_progress or _silent
    if min(num_processes, len(cases)) <= 1:
        size = len(trace.requests)
        return [run_case(trace, case, costs, partial(_after, report, at * size)) for at, case in enumerate(cases)]
    _ = trace.prefixes  # made once: the processes inherit them
    context = multiprocessing.get_context("fork")  # spawned ones take seconds to import torch
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
    """Processes that start meanwhile never see Ctrl-C, which a terminal sends to them too: the sweep tells them. One
    that comes meanwhile is seen here at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker process


def _start(trace: Trace, costs: TierCosts | None, num_done: Synchronized[int]) -> None:
    torch.set_num_threads(1)  # of a pool of threads the fork has none; the other processors have replays of their own
    gc.freeze()  # what was there before, the trace and torch, is no garbage: looking at it takes a tenth of a replay
    _worker.append(_Shared(trace, costs, num_done))


def _run(case: Case) -> ReplayResult:
    shared, told = _worker[-1], 0

    def tell(count: int) -> None:
        nonlocal told
        with shared.num_done.get_lock():
            shared.num_done.value += count - told
            is_stopped = shared.num_done.value < 0
        told = count
        if is_stopped:
            raise _Stopped

    return run_case(shared.trace, case, shared.costs, tell)
