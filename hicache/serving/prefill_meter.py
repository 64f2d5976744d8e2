"""Measures the prefill speed during serving, reports it to the engine, and computes the budget of the next pass from
it.

On CUDA the runner returns after it launched a pass. `report` reads the events around the pass in a later step, when the
device has passed them, so it never waits for them. On the CPU the pass has run when the runner returns.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from hicache.engine import CacheEngine, Hit
from hicache.flow.cost import PrefillCost
from hicache.serving.pass_budget import PassBudget, PrefillPace
from hicache.serving.passes import Chunk

_ASSUMED_TOKEN_S = 1e-3  # seconds per token before the first pass
_FIRST_TOKENS_ON_CPU = 256  # prompt tokens of a pass before one was measured; a GPU has no such limit


@dataclass(frozen=True)
class _Pass:
    """A pass on the device: the number of prompt tokens that it computed, and their mean position."""

    num_tokens: int
    mean_position: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


class PrefillMeter:
    """Owned by the scheduler thread. `clock`: seconds, for passes on the CPU. `max_pass_s`: as in the scheduler.
    `cost`: of prefill, by the passes so far."""

    def __init__(
        self, engine: CacheEngine, clock: Callable[[], float] = time.perf_counter, max_pass_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._clock = clock
        self.cost = PrefillCost()
        self.cost.assume(_ASSUMED_TOKEN_S, 0.0)
        self._on_cuda = engine.pool.device.type == "cuda"
        self._pace = PrefillPace(max_pass_s, math.inf if self._on_cuda else _FIRST_TOKENS_ON_CPU)
        self._pending: deque[_Pass] = deque()
        self._last: torch.cuda.Event | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the device has not finished the last pass over prompts."""
        return self._last is not None and not self._last.query()

    @contextmanager
    def measure(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Inside, the caller launches a pass over `chunks`, which is timed. A pass that raises does not count.

        A pass that waits for a load does not count either, because the wait would count as computing. Decoded tokens of
        the same pass are not counted, but their time is, because prompts in a pass with them take that long.
        """
        prompts = [chunk for chunk in chunks if not chunk.is_decode]
        num_tokens = sum(chunk.end - chunk.start for chunk in prompts)
        if not num_tokens or any(not load.completed for chunk in chunks for load in chunk.lease.loads):
            yield
            self._mark(num_tokens)
            return
        positions = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) / 2 for chunk in prompts)
        if self._on_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._last = end
            self._pending.append(_Pass(num_tokens, positions / num_tokens, begin, end))
        else:
            begin_s = self._clock()
            yield
            self._observe(num_tokens, self._clock() - begin_s, positions / num_tokens)

    def _mark(self, num_tokens: int) -> None:
        """Note that a pass was launched that does not count."""
        if self._on_cuda and num_tokens:
            self._last = torch.cuda.Event()
            self._last.record()

    def budget(self, num_tokens: int, beside_streams: bool) -> PassBudget:
        """The budget of the next pass, see `PrefillPace.budget`."""
        return self._pace.budget(num_tokens, beside_streams)

    def saved_s(self, hit: Hit) -> dict[str, float]:
        """By tier, seconds of computing that its hits of a prompt saved: the device has its beginning, then follow the
        host and the stores."""
        saved, start = dict[str, float](), 0
        for tier, num_tokens in asdict(hit).items() if self.cost.is_measured else ():
            saved[tier], start = self.cost.seconds(start, start + num_tokens), start + num_tokens
        return saved

    def report(self) -> None:
        """Report the passes that have ended to the engine. Call it in every step, also without a pass, because the
        engine compares waits for the disk with the speed."""
        while self._pending and self._pending[0].end.query():
            ended = self._pending.popleft()
            seconds = ended.begin.elapsed_time(ended.end) / 1e3
            self._observe(ended.num_tokens, seconds, ended.mean_position)

    def _observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        self._engine.observe_prefill(num_tokens, seconds, mean_position)
        if seconds > 0:
            self.cost.observe(num_tokens, seconds, mean_position)
        self._pace.observe(num_tokens, seconds, mean_position)
