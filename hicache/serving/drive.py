"""Serving the conversations of a demo: once through all tiers, once more without any cache, once by transformers.

Knows the order of turns and what depends on what; the scheduler knows neither. May import everything below serving and
its own package.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.config import EngineConfig
from hicache.engine import CacheEngine
from hicache.factory import build_engine
from hicache.layout import ModelGeometry
from hicache.serving.audit import AuditCounts, KVAudit
from hicache.serving.interrupt import CalmInterrupt
from hicache.serving.models import LoadedModel
from hicache.serving.reference import generate
from hicache.serving.report import Turn
from hicache.serving.request import Request, Result, Sampling
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Auditor, Scheduler
from hicache.serving.workload import Conversation, zigzag


@dataclasses.dataclass(frozen=True)
class Job:
    """What is served and how: the model, the conversations and the limits that the flags set."""

    loaded: LoadedModel
    geometry: ModelGeometry
    talks: Sequence[Conversation]
    max_new_tokens: int
    concurrency: int
    chunk_tokens: int
    sampling: Sampling

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(max(talk.most_tokens(self.max_new_tokens)) for talk in self.talks)

    @property
    def working_set(self) -> int:
        """Tokens whose KV all conversations need."""
        return sum(talk.distinct_tokens(self.max_new_tokens) for talk in self.talks)

    @property
    def num_turns(self) -> int:
        return sum(talk.num_turns for talk in self.talks)

    def request(self, talk: int, turn: int, prompt: npt.NDArray[np.int64], namespace: str = "") -> Request:
        """The request of a turn; its id names both and is unique."""
        return Request(
            request_id=f"{talk + 1}.{turn + 1} {self.talks[talk].name}",
            tokens=prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            namespace=namespace,
            eos_ids=self.loaded.eos_ids,
        )


@dataclasses.dataclass(frozen=True)
class Served:
    """What a run through all tiers left behind: its turns in the order in which they were asked."""

    turns: Sequence[Turn]
    audit: AuditCounts
    stats: Mapping[str, float]


def serve_cached(
    job: Job, engine: CacheEngine, dtype: str, sidecar: Path | None, show: Callable[[Turn], None]
) -> Served:
    """Every turn of every conversation, in zigzag order, through all tiers.

    `dtype`: the pool's, which belongs to the identity of the page digests that `sidecar` keeps.
    """
    done: dict[tuple[int, int], Turn] = {}
    order = zigzag([talk.num_turns for talk in job.talks])

    def make(index: int) -> Request | None:
        talk, turn = order[index]
        before = done.get((talk, turn - 1))
        if turn and before is None:
            return None
        last = before.prompt.tolist() if before else ()
        return job.request(talk, turn, job.talks[talk].prompt(turn, last, before.cached.tokens if before else ()))

    def finished(index: int, request: Request, result: Result) -> None:
        turn = done[order[index]] = Turn(request.request_id, *order[index], request.tokens, result)
        show(turn)

    with contextlib.closing(KVAudit(engine, f"{job.loaded.model_id} {dtype}", sidecar)) as audit:
        _drive(job, engine, len(order), make, finished, audit)
    engine.flush()
    engine.check()
    return Served([done[at] for at in order], audit.counts, dict(engine.stats()))


def serve_without_cache(job: Job, config: EngineConfig, turns: Sequence[Turn], show: Callable[[Turn], None]) -> None:
    """The same prompts, each in a namespace of its own on an engine without lower tiers: nothing is ever found.

    Fills in `recomputed` of each turn.
    """
    page = config.page_size
    device_tokens = -(-job.longest // page) * page * job.concurrency
    window_tokens = max(config.window_tokens, device_tokens) if job.geometry.window_layers else 0
    bare = dataclasses.replace(
        config,
        host_bytes=0,
        host_ratio=0.0,
        host_states=0,
        disk=None,
        device_tokens=device_tokens,
        window_tokens=window_tokens,
    )

    def make(index: int) -> Request | None:
        turn = turns[index]
        return job.request(turn.talk, turn.number, turn.prompt, namespace=f"turn {index}")

    def finished(index: int, request: Request, result: Result) -> None:
        turns[index].recomputed = result
        show(turns[index])

    with build_engine(bare, job.geometry) as engine:
        _drive(job, engine, len(turns), make, finished, None)


def ask_transformers(job: Job, turns: Sequence[Turn]) -> None:
    """The same prompts to the library's own `generate`. Fills in `generated` of each turn."""
    for turn in turns:
        turn.generated = generate(job.loaded.model, turn.prompt, job.max_new_tokens, job.loaded.eos_ids)


def _drive(
    job: Job,
    engine: CacheEngine,
    num_turns: int,
    make: Callable[[int], Request | None],
    finished: Callable[[int, Request, Result], None],
    audit: Auditor | None,
) -> None:
    """Serve turns [0, num_turns), `concurrency` at a time. `make` returns None while a turn's predecessor is
    unfinished.

    Raises the error of a request that failed, and KeyboardInterrupt between two steps.
    """
    runner = ModelRunner(job.loaded.model, engine, job.geometry)
    scheduler = Scheduler(engine, runner, chunk_tokens=job.chunk_tokens, max_running=job.concurrency, auditor=audit)
    pending = deque(range(num_turns))
    under_way: dict[str, tuple[int, Request]] = {}
    try:
        with CalmInterrupt() as interrupt:
            while pending or under_way:
                interrupt.check()
                while pending and len(under_way) < job.concurrency and (request := make(pending[0])) is not None:
                    under_way[request.request_id] = (pending.popleft(), request)
                    scheduler.submit(request)
                for result in scheduler.step():
                    if result.error is not None:
                        raise result.error
                    finished(*under_way.pop(result.request_id), result)
    finally:
        scheduler.abort_all()
