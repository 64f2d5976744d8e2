"""Large bodies and texts: the server limits them before it does work for them, and this work ends if the client
disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from app_case import CONTEXT, MAX_OPEN, Client, served
from hicache.serving.models import ByteTokenizer
from hicache.serving.request import Request
from hicache.serving.server.frontend import Frontend, Limits, ServedModel
from hicache.serving.server.prompts import PromptEncoder, PromptLimits
from hicache.serving.server.protocol import GenerationBody
from hicache.serving.server.replies import ApiError
from programs import output
from server_case import KEY, SECRET, Server
from waiting import BOUND_S

COMPLETIONS = "/v1/completions"


class _Counting(ByteTokenizer):
    """A tokenizer whose longest tokens have 1000 characters. `lengths`: the lengths of the texts that it encoded."""

    max_token_chars = 1000

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)


class _Blocked(ByteTokenizer):
    """A tokenizer that blocks until it is `free`."""

    def __init__(self) -> None:
        self.num_begun, self.free = 0, threading.Event()

    def encode(self, text: str) -> list[int]:
        self.num_begun += 1
        self.free.wait()
        return super().encode(text)


def test_refused_before_they_are_tokenized() -> None:
    """Too many prompts are refused without tokenizing, and so is a text that cannot fit the context even with the
    longest tokens. Of other long texts only a piece is tokenized."""
    tokenizer, piece = _Counting(), 1 << 16
    encoder = PromptEncoder(tokenizer, PromptLimits(CONTEXT, MAX_OPEN, ByteTokenizer.num_tokens))
    cases: list[tuple[str, dict[str, Any], list[int]]] = [
        ("completion", {"prompt": ["a"] * (MAX_OPEN + 1)}, []),
        ("completion", {"prompt": "a" * (1000 * CONTEXT + 1)}, []),
        ("completion", {"prompt": ["a" * (900 * CONTEXT)]}, [piece]),
        ("chat", {"messages": [{"role": "user", "content": "a" * 300 * CONTEXT}] * 3}, [piece]),
        ("chat", {"messages": [{"role": "user", "content": "a" * 400 * CONTEXT}] * 3}, []),
    ]
    for kind, fields, lengths in cases:
        tokenizer.lengths.clear()
        with pytest.raises(ApiError) as refused:
            encoder.prepare(kind, json.dumps(fields).encode())
        assert (refused.value.status, refused.value.body["error"]["param"]) == (400, next(iter(fields)))
        assert tokenizer.lengths == lengths


def test_a_client_that_leaves_before_its_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client disconnects before its text is tokenized, the text is never tokenized; until the disconnect the
    client counts as an open request. A client that waits too long for its tokens, or never ends its body, gets 408. The
    time counts from the arrival."""
    tokenizer, body = _Blocked(), json.dumps({"prompt": "a"}).encode()

    async def ask() -> None:
        async with served(tokenizer) as parts:
            clients = [Client(parts.app, COMPLETIONS, body, sends_all=i < 3) for i in range(4)]
            answers = [asyncio.create_task(clients[i].answer()) for i in range(2)]
            while tokenizer.num_begun < 2:  # on all threads of the tokenizer
                await asyncio.sleep(0.001)
            answers += [asyncio.create_task(client.answer()) for client in clients[2:]]
            for client in clients[1:]:
                client.removed.set()
            assert [(await answer)[0] for answer in answers[1:]] == [499, 499, 499]
            tokenizer.free.set()
            assert (await answers[0])[0] == 400  # the prompt has an id beyond the model's vocabulary
            assert tokenizer.num_begun == 2
            tokenizer.free.clear()
            waiting = [Client(parts.app, COMPLETIONS, body) for _ in range(MAX_OPEN)]
            answers = [asyncio.create_task(client.answer()) for client in waiting]
            while tokenizer.num_begun < 4:
                await asyncio.sleep(0.001)
            assert (await Client(parts.app, COMPLETIONS, body).answer())[0] == 429
            for client in waiting:
                client.removed.set()
            assert {(await answer)[0] for answer in answers} == {499}
            tokenizer.free.set()
        tokenizer.free.clear()
        async with served(tokenizer) as parts:
            for sends_all in (True, False):
                left_s, arrivals = iter([BOUND_S, 0.05] if sends_all else [0.05]), list[float]()
                monkeypatch.setattr(
                    parts.frontend, "left_s", lambda at_s, n=left_s, a=arrivals: a.append(at_s) or next(n)
                )
                status, error = await Client(parts.app, COMPLETIONS, body, sends_all=sends_all).answer()
                assert (status, error["code"], "body" in error["message"]) == (408, "request_timeout", not sends_all)
                assert len(arrivals) == 1 + sends_all and len({*arrivals}) == 1
            tokenizer.free.set()

    asyncio.run(ask())


class _Submitted:
    """A stand-in for the engine's thread, which keeps the submitted requests."""

    alive, num_running = True, 0

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)


@pytest.mark.parametrize(
    ("kind", "fields", "branch_points"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a"}]}, (9,)),  # bos, start, "user", "\n", "a" and end
        ("chat", {"messages": [{"role": "user", "content": "a"}], "session_end": True}, ()),
        ("completion", {"prompt": "a" * 40}, (33,)),
        ("completion", {"prompt": "a"}, (0,)),
    ],
)
def test_a_request_names_where_the_next_turn_may_leave_its_prompt(
    kind: str, fields: dict[str, Any], branch_points: tuple[int, ...]
) -> None:
    """A chat names the position where its generation prompt begins; any other prompt names a position a few tokens
    before its end. A session that ends has no next turn."""
    tokenizer, thread = ByteTokenizer(), _Submitted()
    prepared = PromptEncoder(tokenizer, PromptLimits(CONTEXT, MAX_OPEN, 260)).prepare(kind, json.dumps(fields).encode())
    assert isinstance(prepared.body, GenerationBody)
    frontend = Frontend(ServedModel(("m",), tokenizer, 260, CONTEXT), Limits(MAX_OPEN, 60.0), thread, {})  # type: ignore[arg-type]
    frontend.start(prepared.body, prepared.prompts, "r", 0.0)
    assert [request.branch_points for request in thread.requests] == [branch_points]


# Processes tokenize large bodies. The tokenizer of this process encodes nothing.
PROGRAM = """
import asyncio, json, os, signal
from pathlib import Path
from hicache.serving.server.prompts import PromptEncoder, PromptLimits
from hicache.serving.server.replies import ApiError
from hicache.serving.server.workers import PromptWorkers
from slow_tokenizer import SlowTokenizer
from waiting import eventually

def body(prompt):
    return json.dumps({"prompt": prompt, "seed": 3, "stop": ["x"]}).encode() + b" " * (1 << 18)

async def begun():
    while not Path("pid").exists():
        await asyncio.sleep(0.001)
    pid = int(Path("pid").read_text())
    Path("pid").unlink()
    return pid

async def outcome(task):
    try:
        done = await task
    except ApiError as error:
        return error.status, error.body["error"]["param"]
    prompts = [(prompt.tokens.tolist(), prompt.shared_len) for prompt in done.prompts]
    return prompts, done.body.seed, done.body.stops

async def main():
    workers = PromptWorkers(PromptEncoder(None, PromptLimits(64, 8, 260)), SlowTokenizer, max_cpu_s=2.0)
    ask = lambda prompt: asyncio.create_task(workers.prepare("completion", body(prompt)))
    print(await outcome(ask(["ab", "c" * 9])), await outcome(ask("a" * 65)), await outcome(ask("fail")))
    hung = ask("hang")
    os.kill(await begun(), signal.SIGKILL)
    print(await outcome(hung), await outcome(ask([1])))
    print(await outcome(ask("spin")), await outcome(ask([1])))
    hung = ask("hang")
    pid = await begun()
    hung.cancel()
    print(await outcome(ask([2])))
    workers.close()
    eventually(lambda: not Path(f"/proc/{pid}").exists())

asyncio.run(main())
"""


def test_processes_of_large_bodies(tmp_path: Path) -> None:
    """The processes answer as a thread would, and pass errors on. A defect, a process that is killed, and one that
    computes for too long give status 500, and the next body is answered. Closing the workers ends all processes, also
    one that works for a client that has left. A package named hicache in the working directory is not imported."""
    (tmp_path / "hicache").mkdir()
    (tmp_path / "hicache" / "__init__.py").write_text("raise SystemExit")
    first, second, third, fourth = output(PROGRAM, cwd=tmp_path, server="serving").splitlines()
    assert first == f"([([256, 97, 98], 0), ([256{', 99' * 9}], 2)], 3, ['x']) (400, 'prompt') (500, None)"
    assert second == third == "(500, None) ([([1], 0)], 3, ['x'])"
    assert fourth == "([([2], 0)], 3, ['x'])"


def test_a_large_body_is_answered_as_a_small_one(server: Server) -> None:
    client = server.client(KEY)
    fields: dict[str, Any] = {"model": "random", "prompt": f"{SECRET} large", "max_tokens": 5, "temperature": 0}
    small = client.completions.create(**fields).choices[0].text
    large = client.completions.create(**fields, extra_body={"metadata": {"of": "a" * (1 << 18)}}).choices[0].text
    assert large == small


def test_uploads_together_are_bounded(server: Server) -> None:
    """If more large bodies arrive together than the limit allows, some are refused. When the clients of large bodies
    have left, new bodies are accepted."""
    size = (1 << 20) - 1000
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((server.host, server.port))) for _ in range(10)]
        for client in clients:
            with contextlib.suppress(ConnectionError):  # the server refused the body while it was sent
                client.sendall(head + b" " * (size - 1))
        refused, _, _ = select.select(clients, [], [], BOUND_S)
        assert refused[0].recv(64).startswith(b"HTTP/1.1 429 ")
    test_a_large_body_is_answered_as_a_small_one(server)
