"""Measures the prefill speed during serving, reports this speed to the engine, and computes the budget of the next pass
from it.

On CUDA, the runner returns as soon as a pass is launched. CUDA events before and after the pass measure its time.
`report` reads these events in a later step, when the device has reached them, so it never waits. On the CPU, a pass is
complete when the runner returns.

    budget of a pass    [prompt by rank | next prompt | ...], each a chunk that begins where its KV ends

A pass has a limit of prompt tokens. It also has a limit of time, so that a pass does not delay requests that decode:
the same chunk may take milliseconds on one device and minutes on another.
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
from hicache.serving.passes import Chunk
from hicache.serving.request_queue import ScheduledRequest

_ASSUMED_TOKEN_S = 1e-3  # assumed seconds per token before the first pass
_FIRST_TOKENS_ON_CPU = 256  # maximum prompt tokens of the first pass on a CPU
# planned share of the maximum time. With a share of 1, half of all passes would exceed the maximum.
_TARGET_SHARE = 0.8
_DECAY = 0.25  # factor on the weight of all earlier passes at each new full pass
_SOLE_FACTOR = 4  # a pass without decoding requests may take this many times the maximum time
# chunks have multiples of this number of tokens, and the first chunk of a pass is never empty, so that prompts make
# progress
_STEP_TOKENS = 16
_MAX_SCORED_TOKENS = 512  # maximum prompt tokens with log probabilities in a pass: 600 kB of logits each
# maximum growth of a token's cost for each token before it; after 1 / growth tokens, attention costs as much as all
# other operations
_MAX_GROWTH = 1 / 64


@dataclass(frozen=True)
class _Pass:
    """A launched pass: the number of its prompt tokens, and their mean position."""

    num_tokens: int
    mean_position: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


class PassBudget:
    """The budget of one pass. `num_tokens`: maximum prompt tokens. `work`: maximum work, where a token at position p
    counts `1 + growth * p`, because attention costs more at later positions."""

    def __init__(self, num_tokens: int, work: float = math.inf, growth: float = 0.0) -> None:
        self._tokens = num_tokens
        self._scored = _MAX_SCORED_TOKENS
        self._work = work
        self._growth = growth
        self._is_unused = True

    def share_of(self, req: ScheduledRequest) -> int:
        """Return the number of tokens of the prompt of `req` that the pass may compute, which is at least one for the
        first prompt."""
        share = min(self._tokens, self._within_work(req.kv_len))
        return min(share, self._scored) if req.is_scoring else share

    def take(self, req: ScheduledRequest) -> None:
        """Subtract tokens [kv_len, end) of a request, which the pass will compute, from the budget."""
        num_tokens, self._is_unused = req.end - req.kv_len, False
        self._tokens -= num_tokens
        self._work -= num_tokens * (1 + self._growth * (req.kv_len + req.end) / 2)
        self._scored -= req.num_logits if req.is_scoring else 0

    def _within_work(self, start: int) -> int:
        if math.isinf(self._work):
            return self._tokens
        cost, work = 1 + self._growth * start, max(0.0, self._work)
        # Solve num * (cost + growth * num / 2) = work.
        num = 2 * work / (cost + math.sqrt(cost * cost + 2 * self._growth * work))
        return max(int(num) // _STEP_TOKENS, int(self._is_unused)) * _STEP_TOKENS


class PrefillPace:
    """Estimates from recent passes how many prompt tokens this machine computes in `max_pass_s` seconds. A `max_pass_s`
    of 0 means no limit.

    The time of a pass includes its decoding requests. `first_tokens`: prompt tokens of a pass until a pass has been
    measured.
    """

    def __init__(self, max_pass_s: float, first_tokens: float) -> None:
        self._aim_s = _TARGET_SHARE * max_pass_s
        self._first_tokens = first_tokens
        self._cost = PrefillCost()
        self._work = self._seconds = 0.0  # sums over passes; each later full pass multiplies them by `_DECAY`

    def observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        """Record that a pass over `num_tokens` prompt tokens took `seconds`."""
        if not self._aim_s or seconds <= 0:
            return
        self._cost.observe(num_tokens, seconds, mean_position)
        work = num_tokens * (1 + self._growth * mean_position)
        keep = _DECAY ** min(1.0, work / self._within_aim) if self._work else 0.0
        self._work = keep * self._work + work
        self._seconds = keep * self._seconds + seconds

    def budget(self, num_tokens: int, has_streams: bool) -> PassBudget:
        """Return the budget of the next pass, at most `num_tokens` prompt tokens. If no request decodes in the pass, it
        may take four times as long. A pass without decoding requests delays only arriving and aborted requests, and
        longer passes compute more tokens per second."""
        if not self._aim_s:
            return PassBudget(num_tokens)
        return PassBudget(num_tokens, self._within_aim * (1 if has_streams else _SOLE_FACTOR), self._growth)

    @property
    def _within_aim(self) -> float:
        return self._aim_s * self._work / self._seconds if self._work else self._first_tokens

    @property
    def _growth(self) -> float:
        token_s, pair_s = self._cost.terms
        is_clamped = pair_s > _MAX_GROWTH * token_s  # true if token_s is 0, when the ratio does not exist
        return _MAX_GROWTH if is_clamped else pair_s / token_s if token_s else 0.0


class PrefillMeter:
    """Measures the passes of one scheduler, and computes the budget of its next pass. Used by the scheduler's thread.
    `clock`: returns the current time in seconds, for passes on the CPU. `max_pass_s`: the setting of the scheduler.
    `cost`: the prefill cost measured so far."""

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
        """Return whether the device has not finished the last pass over prompts."""
        return self._last is not None and not self._last.query()

    @contextmanager
    def measure(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Time the pass over `chunks` that the caller launches within the `with` block. A pass that raises is not
        counted.

        A pass that waits for a load is not counted either, because the wait would look like computing. If requests
        decode in the same pass, their tokens are not counted but their time is, because prompts usually share passes
        with them.
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
        """Record the launch of a pass that does not count in the measurement."""
        if self._on_cuda and num_tokens:
            self._last = torch.cuda.Event()
            self._last.record()

    def budget(self, num_tokens: int, has_streams: bool) -> PassBudget:
        """Return the budget of the next pass, as `PrefillPace.budget` does."""
        return self._pace.budget(num_tokens, has_streams)

    def saved_s(self, hit: Hit) -> dict[str, float]:
        """Return, for each tier, the seconds of computing that a prompt's hits in this tier saved. A prompt begins with
        its hits on the device, followed by its hits on the host and then in the stores."""
        saved, start = dict[str, float](), 0
        for tier, num_tokens in asdict(hit).items() if self.cost.is_measured else ():
            saved[tier], start = self.cost.seconds(start, start + num_tokens), start + num_tokens
        return saved

    def report(self) -> None:
        """Report the passes that have ended to the engine, which compares waits for the disk with the measured prefill
        speed. The scheduler calls this in every step, even in steps without a pass."""
        while self._pending and self._pending[0].end.query():
            ended = self._pending.popleft()
            seconds = ended.begin.elapsed_time(ended.end) / 1e3
            self._observe(ended.num_tokens, seconds, ended.mean_position)

    def _observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        self._engine.observe_prefill(num_tokens, seconds, mean_position)
        if seconds > 0:
            self.cost.observe(num_tokens, seconds, mean_position)
        self._pace.observe(num_tokens, seconds, mean_position)
