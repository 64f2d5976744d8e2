"""Failures inside the server: a step or a tokenizer that raises, and bodies with many faults. Logs must not quote
clients."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from app_case import ServedApp, served
from disk_case import TroubledStore, failing
from hicache.engine import CacheEngine
from hicache.process.logs import JsonLines
from hicache.serving.models import ByteTokenizer
from hicache.serving.request import Request
from hicache.serving.runner import Chunk
from hicache.serving.scheduler import Scheduler
from hicache.serving.server.engine_thread import EngineThread, RequestEnded
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody
from hicache.serving.server.replies import ApiError, Delta
from hicache.serving.text import TextDecoder
from memory_store import MemoryPageStore
from serving_case import shared, tiny_engine, tiny_llama, tiny_runner
from waiting import BOUND_S, eventually

SECRET = "Xylophon"


class _Failing:
    """A runner whose third pass raises."""

    def __init__(self, model: Any, engine: CacheEngine) -> None:
        self._runner = tiny_runner(model, engine)
        self._num_passes = 0

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self._num_passes += 1
        if self._num_passes == 3:
            raise RuntimeError(SECRET)
        return self._runner.forward(chunks)


class _Raising:
    """A decoder that raises."""

    def push(self, token: int) -> str:
        raise ValueError(SECRET)

    def finish(self) -> str:
        return ""


class _Undecodable(ByteTokenizer):
    """A tokenizer whose decoder raises for prompts that end with token 5."""

    def decoder(self, prompt: Sequence[int], skip_special: bool = True) -> TextDecoder:
        return _Raising() if prompt[-1] == 5 else super().decoder(prompt, skip_special)


async def ends_of(parts: ServedApp, *prompts: list[list[int]]) -> list[list[Delta] | BaseException]:
    """Generate for these prompts together. Returns the outcome of each request."""
    bodies = [json.dumps({"prompt": ids, "max_tokens": 9}).encode() for ids in prompts]
    prepared = [await parts.workers.prepare("completion", body) for body in bodies]  # first, before any may fail
    generations = [
        parts.frontend.start(each.body, each.prompts, f"r{i}", time.perf_counter()) for i, each in enumerate(prepared)
    ]
    ends = await asyncio.gather(*(generation.collect() for generation in generations), return_exceptions=True)
    await parts.frontend.wait_idle()
    return ends


def test_a_failed_step(caplog: pytest.LogCaptureFixture) -> None:
    """If a step raises, every open request gets 500, and all later requests get 503. The thread logs the error."""

    async def serve() -> None:
        async with served(ByteTokenizer(), _Failing) as parts:
            ends = await ends_of(parts, [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]])
            assert [end.status for end in ends if isinstance(end, ApiError)] == [500, 500]
            with pytest.raises(ApiError) as refused:
                parts.frontend.require_serving()
        assert refused.value.status == 503 and refused.value.body["error"]["code"] == "engine_failed"
        assert parts.thread.failed and not parts.thread.alive

    asyncio.run(serve())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert SECRET not in JsonLines().format(record)


def test_a_disk_that_refuses_pages(caplog: pytest.LogCaptureFixture) -> None:
    """If the disk refuses pages, the memory tiers are still emptied, and the server stops in order. The reset and the
    stop each log how many pages are not stored."""
    store, ended, tiny = TroubledStore(MemoryPageStore(1 << 20)), threading.Event(), shared(tiny_llama, device="cpu")
    store.trouble = failing(OSError(errno.EIO, "a bad sector"), "put", "reopen")
    engine = tiny_engine(tiny, store=store, host_bytes=1 << 20, write_policy="write_through")
    thread = EngineThread(engine, Scheduler(engine, tiny_runner(tiny, engine)), lambda: None)
    thread.start(lambda events: any(isinstance(event, RequestEnded) for event in events) and ended.set())
    for number in range(2):
        thread.submit(Request(f"r{number}", np.arange(40) + number, 2))
        eventually(ended.is_set)
        ended.clear()
        if not number:
            assert thread.reset(("device", "host")).result(BOUND_S)
    thread.stop()
    thread.join()
    assert not thread.failed
    assert sum("a bad sector" in line and "are not stored" in line for line in caplog.messages) == 2


def test_a_tokenizer_that_fails_to_decode(caplog: pytest.LogCaptureFixture) -> None:
    """A request whose tokens cannot be decoded ends with 500. Concurrent and later requests are answered."""

    async def serve() -> None:
        async with served(_Undecodable()) as parts:
            bad, good = await ends_of(parts, [[4], [4, 5]], [[6]])
            assert isinstance(bad, ApiError) and bad.status == 500
            assert isinstance(good, list) and good[0].finish_reason == "length"
            assert await ends_of(parts, [[6], [7]])
            assert parts.frontend.metrics.requests.labels("error")._value.get() == 1
        assert not parts.thread.failed

    asyncio.run(serve())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert SECRET not in JsonLines().format(record)


MANY = 100_000
FAULTS: dict[str, tuple[type[GenerationBody], dict[str, Any]]] = {
    "empty prompts": (CompletionBody, {"prompt": [[]] * MANY}),
    "ids that are none": (CompletionBody, {"prompt": [[None] * MANY]}),
    "texts that are none": (CompletionBody, {"prompt": ["a", *[1] * MANY]}),
    "unknown fields": (CompletionBody, {"prompt": "a", **{str(i): i for i in range(MANY)}}),
    "stops that are none": (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
    "messages that are none": (ChatBody, {"messages": [{}] * MANY}),
    "parts that are none": (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
}


@pytest.mark.parametrize("case", FAULTS)
def test_the_first_faults_are_enough(case: str) -> None:
    """However many faults a body has, only a few are collected. A million of them would take gigabytes, and delay every
    request."""
    body, fields = FAULTS[case]
    with pytest.raises(ValidationError) as refused:
        body.model_validate(fields)
    assert refused.value.error_count() < 5


def test_logs_do_not_quote() -> None:
    """The log of an exception has its class and where it was raised. The log only has the first line of a message."""
    try:
        raise ValueError(SECRET)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("asyncio", logging.ERROR, __file__, 1, "it failed\n%s", (SECRET,), error)
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["level"], line["error"]) == ("it failed", "error", "ValueError")
    assert line["frames"][0].endswith("test_logs_do_not_quote") and SECRET not in json.dumps(line)
