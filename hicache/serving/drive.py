"""Runs the demo's workload: through all tiers, again without a cache, and again with transformers' `generate`.

It knows the order of turns; the scheduler does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from hicache.build.factory import build_engine
from hicache.config import EngineConfig
from hicache.engine import CacheEngine
from hicache.serving.audit import AuditCounts, KVAudit
from hicache.serving.interrupt import CalmInterrupt
from hicache.serving.report import Turn
from hicache.serving.request import Auditor, Request, RequestOutput
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from hicache.serving.workload import Workload, zigzag
from hicache.tiers import REMOTE


@dataclasses.dataclass(frozen=True)
class CachedRun:
    """The run through all tiers: its turns in the order of their prompts, the audit's counts and the engine's stats."""

    turns: Sequence[Turn]
    audit: AuditCounts
    stats: Mapping[str, float]


def serve_cached(
    workload: Workload, engine: CacheEngine, dtype: str, sidecar: Path | None, show: Callable[[Turn], object]
) -> CachedRun:
    """Serve every turn of every conversation, in zigzag order, through all tiers.

    `dtype`: the pool's, part of the identity of the page digests in `sidecar`.
    """
    order = zigzag(len(workload.conversations), len(workload.conversations[0].prompts))
    turns: list[Turn] = []

    def on_finished(index: int, request: Request, output: RequestOutput) -> None:
        turns.append(Turn(request.request_id, *order[index], output))
        show(turns[index])
        engine.flush()  # turns of a person come seconds apart: what this one left is on the disk before the next begins

    requests = [workload.request(*each) for each in order]
    is_shared, identity = REMOTE in engine.inspect.context.stores, f"{workload.loaded.model_id} {dtype}"
    with contextlib.closing(KVAudit(engine, identity, sidecar, is_shared=is_shared)) as audit:
        _run(workload, engine, requests, on_finished, audit)
    engine.flush()
    engine.check()
    return CachedRun(turns, audit.counts, dict(engine.stats()))


def serve_without_cache(
    workload: Workload, config: EngineConfig, turns: Sequence[Turn], show: Callable[[Turn], object]
) -> None:
    """Serve the same prompts without any hit: each in a namespace of its own, with a device tier only.

    Sets `recomputed` of each turn.
    """
    page = config.page_size
    device_tokens = -(-workload.max_len // page) * page
    window_tokens = max(config.window_tokens, device_tokens) if workload.geometry.window_layers else 0
    device_only = dataclasses.replace(
        config,
        host_bytes=0,
        host_states=0,
        disk=None,
        remote=None,
        device_tokens=device_tokens,
        window_tokens=window_tokens,
    )

    requests = [
        workload.request(turn.conversation, turn.number, namespace=f"turn {index}") for index, turn in enumerate(turns)
    ]

    def on_finished(index: int, request: Request, output: RequestOutput) -> None:
        turns[index].recomputed = output
        show(turns[index])

    with build_engine(device_only, workload.geometry) as engine:
        _run(workload, engine, requests, on_finished, None)


def serve_with_transformers(workload: Workload, turns: Sequence[Turn]) -> None:
    """Generate from the same prompts with transformers' `generate`. Sets `generated` of each turn."""
    for turn in turns:
        prompt = workload.request(turn.conversation, turn.number).tokens
        turn.generated = generate(workload.loaded.model, prompt, workload.max_new_tokens, workload.loaded.eos_ids)


@torch.inference_mode()
def generate(
    model: Any, tokens: npt.NDArray[np.int64], max_new_tokens: int, eos_ids: Iterable[int] = ()
) -> tuple[int, ...]:
    """The greedy continuation of `tokens`, int64 [len], by transformers' `generate` with its own cache.

    A reference that shares no code with the runner, the pools or the engine. Ends after a token of `eos_ids`, which is
    part of it. The model's own generation settings are ignored and kept.
    """
    ids = torch.from_numpy(tokens).to(model.device)[None]
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(eos_ids) or None,
                pad_token_id=0,
            ),
        )
    finally:
        model.generation_config = settings
    return tuple(output[0, len(tokens) :].tolist())


def _run(
    workload: Workload,
    engine: CacheEngine,
    requests: Sequence[Request],
    on_finished: Callable[[int, Request, RequestOutput], None],
    auditor: Auditor | None,
) -> None:
    """Serve the requests one after the other.

    Raises the error of a request that failed, and KeyboardInterrupt between two steps.
    """
    runner = ModelRunner(workload.loaded.model, engine, workload.geometry)
    scheduler = Scheduler(engine, runner, chunk_tokens=workload.chunk_tokens, max_running=1, auditor=auditor)
    try:
        with CalmInterrupt() as interrupt:
            for index, request in enumerate(requests):
                scheduler.submit(request)
                outputs: list[RequestOutput] = []
                while not outputs:
                    interrupt.check()
                    outputs = scheduler.step()
                (output,) = outputs
                if output.error is not None:
                    raise output.error
                on_finished(index, request, output)
    finally:
        scheduler.abort_all()
