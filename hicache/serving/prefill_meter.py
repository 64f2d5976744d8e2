"""How fast this machine computes prompts: passes are timed beside serving, and the engine is told. The budget of the
next pass follows from that.

On CUDA a pass is launched, not run, when the runner returns: `report` reads the events around it in a later step, when
the device has passed them, so nothing waits for them. On the CPU it has run by then.
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

_ASSUMED_TOKEN_S = 1e-3  # before the first pass
_FIRST_TOKENS_ON_CPU = 256  # of the pass before any was measured; a GPU computes what a pass may have


@dataclass(frozen=True)
class _Pass:
    """A pass on the device, which computed tokens of prompts: how many, and at which position on average."""

    num_tokens: int
    mean_position: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


class PrefillMeter:
    """Owned by the scheduler thread. `clock`: seconds, for passes on the CPU. `max_pass_s`: as the scheduler's.
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
        """Whether the device has not ended the last pass over prompts."""
        return self._last is not None and not self._last.query()

    @contextmanager
    def measure(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Time the pass over `chunks` that the block launches. A pass that raises does not count.

        Neither does one that waits for a load, whose time would count as computing. The tokens that are decoded in the
        same pass count with their time alone: that is what prompts beside them take.
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
        """A pass that does not count was launched."""
        if self._on_cuda and num_tokens:
            self._last = torch.cuda.Event()
            self._last.record()

    def budget(self, num_tokens: int, beside_streams: bool) -> PassBudget:
        """Of the next pass, as `PrefillPace.budget`."""
        return self._pace.budget(num_tokens, beside_streams)

    def saved_s(self, hit: Hit) -> dict[str, float]:
        """By tier, of computing what it had of a prompt: the device its beginning, then the host, then the stores."""
        saved, start = dict[str, float](), 0
        for tier, num_tokens in asdict(hit).items() if self.cost.is_measured else ():
            saved[tier], start = self.cost.seconds(start, start + num_tokens), start + num_tokens
        return saved

    def report(self) -> None:
        """Tell the engine about the passes that have ended. To be called in every step, also in one without a pass: a
        request that waits for the disk is compared with the speed."""
        while self._pending and self._pending[0].end.query():
            ended = self._pending.popleft()
            seconds = ended.begin.elapsed_time(ended.end) / 1e3
            self._observe(ended.num_tokens, seconds, ended.mean_position)

    def _observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        self._engine.observe_prefill(num_tokens, seconds, mean_position)
        if seconds > 0:
            self.cost.observe(num_tokens, seconds, mean_position)
        self._pace.observe(num_tokens, seconds, mean_position)
