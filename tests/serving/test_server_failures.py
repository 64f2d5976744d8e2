"""What goes wrong inside of the server: a step or a tokenizer that raises, bodies of many faults, logs that must not
tell what clients sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from starlette.types import ASGIApp, Message

from hicache.engine import CacheEngine
from hicache.serving.models import ByteTokenizer, Tokenizer
from hicache.serving.request import Runner
from hicache.serving.runner import Chunk
from hicache.serving.scheduler import Scheduler
from hicache.serving.server.app import AppSettings, create_app
from hicache.serving.server.engine_thread import EngineThread
from hicache.serving.server.frontend import Frontend, Limits
from hicache.serving.server.logs import JsonLines
from hicache.serving.server.prompts import PromptEncoder, ServedModel
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody
from hicache.serving.server.replies import ApiError, Delta
from hicache.serving.text import TextDecoder, TokenDecoder
from serving_case import VOCAB, shared, tiny_engine, tiny_llama, tiny_runner

SECRET = "Xylophon"


class _Mute(ByteTokenizer):
    """A tokenizer that encodes no text."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("the text of a refused request was tokenized")


async def post(app: ASGIApp, path: str, fields: dict[str, Any]) -> list[Message]:
    """What the application sends in answer to a JSON body."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return sent


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


class _Undecodable(ByteTokenizer):
    """A tokenizer that decodes nothing after prompts that end with token 5."""

    def decoder(self, prompt: Sequence[int], skip_special: bool = True) -> TextDecoder:
        return TokenDecoder(self.decode) if prompt[-1] == 5 else super().decoder(prompt, skip_special)

    def decode(self, tokens: Sequence[int]) -> str:
        if tokens:
            raise ValueError(SECRET)
        return ""


@dataclass(frozen=True)
class _Parts:
    thread: EngineThread
    frontend: Frontend
    encoder: PromptEncoder


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer, make_runner: Callable[[Any, CacheEngine], Runner] = tiny_runner
) -> AsyncIterator[_Parts]:
    """A server's parts without HTTP, over a tiny model; at the end the engine has stopped."""
    tiny = shared(tiny_llama, device="cpu")
    engine = tiny_engine(tiny)
    thread = EngineThread(engine, Scheduler(engine, make_runner(tiny, engine)), lambda: None)
    model = ServedModel("tiny", tokenizer, VOCAB, 512)
    parts = _Parts(thread, Frontend(model, Limits(8, 60.0), thread, {}), PromptEncoder(model))
    loop = asyncio.get_running_loop()
    thread.start(lambda events: loop.call_soon_threadsafe(parts.frontend.deliver, events) and None)
    try:
        yield parts
    finally:
        thread.stop()
        await loop.run_in_executor(None, thread.join)
        parts.encoder.close()


async def ends_of(parts: _Parts, *prompts: list[list[int]]) -> list[list[Delta] | BaseException]:
    """How requests of these prompts end that are generated together."""
    generations = []
    for i, ids in enumerate(prompts):
        body = CompletionBody(prompt=ids, max_tokens=9)
        generations.append(parts.frontend.start(body, await parts.encoder.of_completion(body), f"r{i}"))
    ends = await asyncio.gather(*(generation.whole() for generation in generations), return_exceptions=True)
    await parts.frontend.wait_idle()
    return ends


def test_a_failed_step(caplog: pytest.LogCaptureFixture) -> None:
    """A step that raises answers every open request with 500, and all later ones with 503; the thread says so."""

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


def test_a_tokenizer_that_fails_to_decode(caplog: pytest.LogCaptureFixture) -> None:
    """Its request ends with 500; those that run beside it, and later ones, are answered."""

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
    """However many faults a body has, few are collected: a million take gigabytes, and everybody's time."""
    body, fields = FAULTS[case]
    with pytest.raises(ValidationError) as refused:
        body.model_validate(fields)
    assert refused.value.error_count() < 5


def test_refused_before_it_is_tokenized() -> None:
    """A request of more prompts than may ever be open is refused without a look at their texts."""

    async def ask() -> list[Message]:
        async with served(_Mute()) as parts:
            app = create_app(parts.frontend, parts.encoder, AppSettings("tiny", "", 1 << 20))
            return await post(app, "/v1/completions", {"prompt": ["a"] * 9})

    start, body = asyncio.run(ask())
    assert (start["status"], json.loads(body["body"])["error"]["param"]) == (400, "prompt")


def test_logs_do_not_quote() -> None:
    """A line of an exception has its class and where it was raised; of a message only the first line is kept."""
    try:
        raise ValueError(SECRET)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("asyncio", logging.ERROR, __file__, 1, "it failed\n%s", (SECRET,), error)
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["level"], line["error"]) == ("it failed", "error", "ValueError")
    assert line["frames"][0].endswith("test_logs_do_not_quote") and SECRET not in json.dumps(line)
