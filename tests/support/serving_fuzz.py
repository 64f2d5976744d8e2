"""Random histories of a scheduler. Requests have shared prefixes, priorities and deadlines, on tiers too small for
them, and are aborted at any moment. Callers abort, submit and raise; passes raise; copies are late or fail; the disk
and the remote store fail, stall and lose pages.

Hit rates count each admitted prompt once, with its first admission, and no other prompt. The streamed tokens of a
request are its output. The output equals that of the request alone, without a cache, up to its end. At the end of a
history no request holds anything.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from component_case import config
from disk_case import TroubledStore
from engine_fuzz import KINDS, MODELS, POLICIES
from faults import Faults
from hash_runner import VOCAB, HashRunner, answer
from hicache import AdvancedConfig, DiskConfig, EngineConfig, build_engine
from hicache.config import PrefetchMode
from hicache.errors import CallbackFailed, OutOfSlots, OutOfStates, TransferError
from hicache.serving import Chunk, ModelRunner, Request, RequestOutput, SamplingParams, Scheduler
from hicache.serving.request import Runner
from hicache.serving.sampling import choose_tokens
from memory_store import MemoryPageStore
from serving_case import geometry_of, plain_logits, tiny_llama
from toy_model import flush_error

GEOMETRIES = {**KINDS, "model": MODELS["full"]}
_ERRORS = (CallbackFailed, OutOfSlots, OutOfStates, TransferError)
DEVICE_TOKENS = 128


class _FuzzedRunner:
    """A runner that executes the loads of a pass before the pass, because no other thread does so while a pass waits.
    The runner interrupts some passes after some of their chunks."""

    def __init__(self, runner: Runner, rng: np.random.Generator) -> None:
        self._runner, self._rng = runner, rng

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        for chunk in chunks:
            for load in chunk.lease.loads:
                load.wait()
        if self._rng.random() < 0.01:
            self._runner.forward(chunks[: self._rng.integers(1, len(chunks) + 1)])
            raise KeyboardInterrupt
        return self._runner.forward(chunks)


def _answer_of(model: Any, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a model generates without a cache. One pass verifies the longest correct prefix of `draft`."""
    sequence, draft = request.tokens.tolist(), list(draft)
    while True:
        done = len(sequence) - len(request.tokens)
        logits = plain_logits(model, [*sequence, *draft[done:]])[len(sequence) - 1 :]
        steps = range(done, done + len(logits))
        for token, guess in zip_longest(
            choose_tokens(logits, [request.sampling_params] * len(logits), steps), draft[done:]
        ):
            sequence.append(token)
            if len(sequence) == len(request.tokens) + request.max_new_tokens or token in request.eos_ids:
                return tuple(sequence[len(request.tokens) :])
            if token != guess:
                break


class ServingFuzz:
    """One scheduler under one history. With a `folder` the engine has stores, and the disk store is in this folder."""

    def __init__(self, kind: str, seed: int, folder: Path | None) -> None:
        self.kind, self.rng = kind, np.random.default_rng([seed, len(kind)])
        self.model = tiny_llama(layers=3, heads=2, head_dim=4, vocab=VOCAB, device="cpu") if kind == "model" else None
        self.stems = [self.rng.integers(0, 4, 64) for _ in range(8)]
        self.stems += [np.concatenate([stem[:32], self.rng.integers(0, 4, 32)]) for stem in self.stems[:4]]
        self.faults = Faults(self.rng)
        with self.faults.patched():
            remote = TroubledStore(MemoryPageStore(1 << 20)) if folder and seed % 3 else None
            self.faults.stores += [remote] if remote else []
            self.engine = build_engine(self._settings(folder), GEOMETRIES[kind], remote=remote)
        self.faults.attach(self.engine)
        if (prefetcher := self.engine.inspect.prefetcher) is not None:
            prefetcher.least_overlap_pages = int(self.rng.choice([1, 4]))
        self.engine.start()
        self.scheduler = Scheduler(
            self.engine,
            _FuzzedRunner(
                ModelRunner(self.model, self.engine, geometry_of(self.model))
                if self.model is not None
                else HashRunner(self.engine, GEOMETRIES[kind]),
                self.rng,
            ),
            chunk_tokens=int(self.rng.choice([8, 16, 40])),
            max_running=int(self.rng.choice([2, 4, 8])),
            stall_timeout_s=30.0,
            clock=self.faults.clock,
        )
        self.names = (f"r{number}" for number in itertools.count())
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()  # number of prompts, of their tokens, and of tokens found in tiers

    def run(self, num_requests: int) -> Counter[str]:
        """Serve `num_requests` requests, and some more that callbacks submit."""
        try:
            while len(self.requests) < num_requests:
                if self.scheduler.num_unfinished < 12:
                    for _ in range(int(self.rng.integers(0, 4))):
                        self._submit()
                self._disturb()
                self._step()
            self._drain()
            self._settle()
        finally:
            self.faults.heal()
            self.engine.close()
        return self.counts

    def _drain(self) -> None:
        self.faults.heal()
        while self.scheduler.num_unfinished:
            self.faults.clock.now_s += 0.01
            self._step()

    def _read_beside(self) -> None:
        """Serve one request for pages that only the disk has, and compute it while they are read."""
        self._drain()
        self.faults.move_all()
        flush_error(self.engine)
        self.engine.reset(["device", "host"])
        self.engine.observe_prefill(10**7, 1e6)
        self._submit(self.requests[str(self.rng.choice(list(self.requests)))].tokens)
        for _ in range(int(self.rng.integers(0, 30))):
            self._step()
            time.sleep(0.0005)  # let the threads of the store run

    def _step(self) -> None:
        for _ in range(int(self.rng.integers(0, 6))):
            self.faults.move_one()
        if self.faults.stores and self.rng.random() < 0.3:
            time.sleep(0.0005)  # let the threads of the store run
        try:
            for output in self.scheduler.step():
                self._verify(output)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        self.engine.check()

    def _disturb(self) -> None:
        draw = self.rng.random()
        if draw < 0.04:
            self._abort_any()
        elif draw < 0.1:
            self.faults.break_link(down=self.rng.random() < 0.2)
        elif draw < 0.12:
            self.faults.trouble_disk()
        elif draw < 0.2:
            self.faults.clock.now_s += float(self.rng.choice([0.1, 1.0, 5.0]))
        elif draw < 0.22:
            self.faults.heal()  # an hour passes
        elif draw < 0.26 and self.faults.stores and self.requests:
            self._read_beside()
        elif draw < 0.3:  # computing is faster, or slower, than every copy and read
            self.engine.observe_prefill(10**7, float(self.rng.choice([1e-9, 1e-9, 1e6])))

    def _submit(self, begin: np.ndarray | None = None) -> None:
        rng, name = self.rng, next(self.names)
        stem = self.stems[rng.integers(len(self.stems))][: rng.integers(1, 97)] if begin is None else begin[:97]
        request = Request(
            name,
            np.concatenate([stem, rng.integers(0, 4, rng.integers(0, 20))]),
            int(rng.integers(1, 30)),
            SamplingParams(1.0, seed=int(rng.integers(100))) if rng.random() < 0.3 else SamplingParams(),
            namespace=str(rng.choice(["", "", "tenant"])),
            eos_ids=frozenset(rng.integers(0, VOCAB, 1).tolist()) if rng.random() < 0.3 else frozenset(),
            priority=int(rng.integers(-1, 3)),
            deadline_s=float(rng.choice([0.5, 5.0, 40.0])) if rng.random() < 0.2 else None,
        )
        self.requests[name], self.streams[name] = request, []
        self.scheduler.submit(request, lambda token: self._on_token(name, token))

    def _on_token(self, name: str, token: int) -> None:
        self.streams[name].append(token)
        draw = self.rng.random()
        if draw < 0.002:
            raise KeyError("the client is gone")
        if draw < 0.004:
            self.scheduler.abort(name)
        elif draw < 0.006:
            self._abort_any()
        elif draw < 0.01:
            self._submit()

    def _abort_any(self) -> None:
        if self.requests:
            self.scheduler.abort(str(self.rng.choice(list(self.requests)[-12:])))

    def _verify(self, output: RequestOutput) -> None:
        name = output.request_id
        request, stream = self.requests[name], tuple(self.streams.pop(name))
        assert output.tokens == stream
        expected = answer(request) if self.model is None else _answer_of(self.model, request, stream)
        assert stream == expected[: len(stream)], f"{name}: {stream} instead of {expected}"
        assert stream == expected or output.finish_reason not in ("length", "stop")
        assert output.error is None or isinstance(output.error, _ERRORS), output.error
        self.counts[output.finish_reason] += 1
        self.counts["preemptions"] += output.preemptions
        if output.is_counted:
            self.admitted += Counter(requests=1, prompt_tokens=len(request.tokens))
        for tier in ("device", "host", "disk", "remote"):
            self.counts[tier] += getattr(output.hit, tier)
            self.admitted[f"{tier}_hit_tokens"] += getattr(output.hit, tier)

    def _settle(self) -> None:
        """Check that the engine and the scheduler hold nothing, as at their start."""
        assert not self.streams, "a request has not ended"
        self.faults.move_all()
        flush_error(self.engine)
        self.faults.clock.now_s += 3600
        flush_error(self.engine)
        self.engine.check()
        for name in ("restore.failures", "backup.failures", "prefetch.overlap_loaded_tokens", "persist.failed_pages"):
            self.counts[name] += int(self.engine.stats().get(name, 0))
        stats, table = self.engine.stats(), self.engine.req_to_token
        assert stats["device.protected_tokens"] == stats["engine.leases"] == stats["admit.expected_requests"] == 0
        assert {name: stats[f"admit.{name}"] for name in self.admitted} == self.admitted
        self.counts["admitted again"] += int(stats["admit.uncounted_requests"])
        assert table.available_size() == table.size
        if self.kind != "window":  # with windows, the free tokens are the smaller number of full and window slots
            assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == DEVICE_TOKENS

    def _settings(self, folder: Path | None) -> EngineConfig:
        rng = self.rng
        return config(
            device_tokens=DEVICE_TOKENS,
            disk=folder and DiskConfig(path=str(folder / "store"), budget_bytes=1 << 20),
            prefetch_mode=str(rng.choice(["auto", "auto", "auto", *get_args(PrefetchMode)])),
            prefetch_timeout_s=0.01,
            advanced=AdvancedConfig(transfer_chunk_tokens=16, disk_reader_threads=2),
            write_policy=str(rng.choice(POLICIES)),
            page_size=int(rng.choice([1, 4, 8])),
            host_bytes=int(rng.choice([10, 16, 30])) * 8 * 256,
            host_states=int(rng.choice([4, 8])),
            mamba_size=int(rng.choice([14, 20])),
            window_tokens=int(rng.choice([72, 112])),
            eviction_policy=str(rng.choice(["lru", "lfu", "fifo", "slru", "priority"])),
        )


def run(kind: str, seed: int, num_requests: int) -> Counter[str]:
    """Run one history. Odd seeds have a disk, and two of three odd seeds also have a remote store."""
    with tempfile.TemporaryDirectory() as folder:
        return ServingFuzz(kind, seed, Path(folder) if seed % 2 else None).run(num_requests)
