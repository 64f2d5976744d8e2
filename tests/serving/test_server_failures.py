"""What goes wrong inside of the server: a step that raises, bodies of many faults, logs that must not tell what clients
sent."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from starlette.types import ASGIApp, Message

from hicache.serving.models import ByteTokenizer
from hicache.serving.runner import Chunk
from hicache.serving.scheduler import Scheduler
from hicache.serving.server.app import AppSettings, create_app
from hicache.serving.server.engine_thread import EngineThread
from hicache.serving.server.frontend import Frontend, Limits
from hicache.serving.server.logs import JsonLines
from hicache.serving.server.prompts import PromptEncoder, ServedModel
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody
from hicache.serving.server.replies import ApiError
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

    def __init__(self) -> None:
        self._model = shared(tiny_llama, device="cpu")
        self.engine = tiny_engine(self._model)
        self._runner = tiny_runner(self._model, self.engine)
        self._num_passes = 0

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self._num_passes += 1
        if self._num_passes == 3:
            raise RuntimeError(SECRET)
        return self._runner.forward(chunks)


def test_a_failed_step(caplog: pytest.LogCaptureFixture) -> None:
    """A step that raises answers every open request with 500, and all later ones with 503; the thread says so."""

    async def serve() -> tuple[list[ApiError], ApiError, EngineThread]:
        failing = _Failing()
        thread = EngineThread(failing.engine, Scheduler(failing.engine, failing), lambda: None)
        model = ServedModel("tiny", ByteTokenizer(), VOCAB, 512)
        frontend, encoder = Frontend(model, Limits(8, 60.0), thread, {}), PromptEncoder(model)
        loop = asyncio.get_running_loop()
        thread.start(lambda events: loop.call_soon_threadsafe(frontend.deliver, events) and None)
        body = CompletionBody(prompt=[[1, 2, 3], [4, 5]], max_tokens=9)
        prompts = await encoder.of_completion(body)
        generations = [frontend.start(body, prompts, f"r{i}") for i in range(2)]
        frontend.require_serving()
        ends = await asyncio.gather(*(generation.whole() for generation in generations), return_exceptions=True)
        await frontend.wait_idle()
        await loop.run_in_executor(None, thread.join)
        with pytest.raises(ApiError) as refused:
            frontend.require_serving()
        encoder.close()
        return [end for end in ends if isinstance(end, ApiError)], refused.value, thread

    ends, refused, thread = asyncio.run(serve())
    assert [end.status for end in ends] == [500, 500]
    assert refused.status == 503 and refused.body["error"]["code"] == "engine_failed"
    assert thread.failed and not thread.alive
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
        failing = _Failing()
        thread = EngineThread(failing.engine, Scheduler(failing.engine, failing), lambda: None)
        model = ServedModel("tiny", _Mute(), VOCAB, 512)
        frontend, encoder = Frontend(model, Limits(8, 60.0), thread, {}), PromptEncoder(model)
        app = create_app(frontend, encoder, AppSettings("tiny", "", 1 << 20))
        thread.start(lambda events: None)
        answer = await post(app, "/v1/completions", {"prompt": ["a"] * 9})
        thread.stop()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        encoder.close()
        return answer

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
