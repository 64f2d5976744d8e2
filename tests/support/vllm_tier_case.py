"""vLLM's own tiering manager over its own CPU tier, with hicache's tier behind it, as in vLLM's scheduler process."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from waiting import eventually

ROW_BYTES = 8192
CHUNK_TOKENS = 512
NUM_CHUNKS = 32
CONFIG = OffloadingConfig(
    groups=(OffloadingGroupConfig(tokens_per_block=CHUNK_TOKENS, layer_names=("a", "b"), group_id=0),),
    worker_kv_bytes_per_block=ROW_BYTES,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="",
    model=OffloadingModelConfig(name="model", dtype="bfloat16"),
    cache=OffloadingCacheConfig(tokens_per_hash=CHUNK_TOKENS, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    kv_cache_layout="LBHNC",
)


def key(number: int, hash_bytes: int = 32, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(hash_bytes, "big"), group)


def content(chunk: OffloadKey, version: int = 0) -> np.ndarray:
    """Bytes that only this chunk has."""
    seed = int.from_bytes(chunk[-12:], "big") + version
    return np.random.default_rng(seed).integers(0, 7, ROW_BYTES, dtype=np.uint8)


def place(chunks: Sequence[OffloadKey], context: ReqContext, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Give the chunks consecutive positions from the beginning of the prompt, as vLLM does before it looks chunks
    up."""
    for end, chunk in enumerate(chunks, 1):
        context.set_offload_key_position(chunk, end * chunk_tokens)


class Scheduler:
    """A caller of the offloading manager in the place of vLLM's scheduler. `num_chunks`: chunks of the CPU tier.
    `before` is called first, with the configuration: in vLLM the workers start and map the CPU tier before the
    scheduler does."""

    def __init__(
        self,
        tier: dict[str, Any],
        num_chunks: int = NUM_CHUNKS,
        before: Callable[[OffloadingConfig], object] = lambda config: None,
        **changed: Any,
    ) -> None:
        extra = {
            "cpu_bytes_to_use": num_chunks * ROW_BYTES,
            "secondary_tiers": [{"type": "HiCacheTier", "module_path": "hicache.integrations.vllm", **tier}],
            **changed.pop("extra", {}),
        }
        self.config = replace(CONFIG, engine_id=uuid.uuid4().hex, extra_config=extra, **changed)
        before(self.config)
        self.manager = TieringOffloadingSpec(self.config).get_manager()
        self.primary = self.manager.primary_tier
        self.tiers = self.manager.secondary_tiers
        self.rows = np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)
        self._num_requests = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[ReqContext]:
        self._num_requests += 1
        context = ReqContext(req_id=f"request {self._num_requests}")
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)

    def step(self, *scheduled: str) -> None:
        """End a step. `scheduled`: requests that this step scheduled for the first time."""
        self.manager.on_schedule_end(ScheduleEndContext(scheduled, ()))

    def until(self, done: Callable[[], object]) -> None:
        """Run steps until `done` is true."""
        eventually(lambda: done() or self.step())

    def store(self, chunks: Sequence[OffloadKey], version: int = 0) -> None:
        """Store the chunks of a new request; returns when no store to a tier is in flight."""
        with self.request() as context:
            self.computed(chunks, context, version)
        self.until(lambda: not self.manager.has_pending_work())

    def computed(self, chunks: Sequence[OffloadKey], context: ReqContext, version: int = 0) -> None:
        """Store the chunks of a request in the CPU tier, from which they are stored in the other tiers."""
        place(chunks, context)
        output = self.manager.prepare_store(chunks, context)
        assert output is not None
        for chunk, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[row] = content(chunk, version)
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)

    def lookup(self, chunks: Sequence[OffloadKey], context: ReqContext) -> list[bool]:
        """Look the chunks up in each step until vLLM's results are final; returns which chunks were found."""
        found: list[bool] = []
        self.until(lambda: found.extend(self.ask(chunks, context) or ()) or found)
        return found

    def ask(self, chunks: Sequence[OffloadKey], context: ReqContext) -> list[bool] | None:
        """Look the chunks up once; returns which chunks were found. None if vLLM must look them up again in the next
        step."""
        place(chunks, context)
        found = [self.manager.lookup(chunk, context) for chunk in chunks]
        if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
            return None
        return [result is LookupResult.HIT for result in found]

    def load(self, chunks: Sequence[OffloadKey], version: int = 0) -> list[bool]:
        """Load the chunks that a new request finds, and compare their bytes with the stored ones; returns which chunks
        were found."""
        with self.request() as context:
            found = self.lookup(chunks, context)
            held = [chunk for chunk, hit in zip(chunks, found, strict=True) if hit]
            spec = self.manager.prepare_load(held, context)
            for chunk, row in zip(held, spec.chunk_ids, strict=True):
                assert np.array_equal(self.rows[row], content(chunk, version))
            self.manager.complete_load(held, context)
        return found

    def reset(self) -> None:
        """Empty the CPU tier."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33
            self.manager.on_reset_flushed()

    def close(self) -> None:
        """Close the manager. vLLM releases the memory of its CPU tier last, and fails if a view of this memory still
        exists."""
        del self.rows
        self.manager.shutdown()


@contextlib.contextmanager
def scheduler(path: Path, **settings: Any) -> Iterator[Scheduler]:
    """Open a `Scheduler` over a tier in `path`. `settings`: arguments of `Scheduler`, fields of `OffloadingConfig`, and
    otherwise settings of the tier. By default the tier declines no load, because tokens are computed here in no time;
    `prefill_tokens_per_s` changes that."""
    settings.setdefault("prefill_tokens_per_s", 0)
    names = {"num_chunks", "before", "extra", *CONFIG.__dataclass_fields__}
    own = {name: settings.pop(name) for name in names & settings.keys()}
    opened = Scheduler({"path": str(path), **settings}, **own)
    yield opened
    opened.close()
