"""`hicache serve` in its own process, called by the `openai` package and by plain HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from hicache.serving.server.connections import IS_CROWDED
from hicache.serving.server.middleware import Gate
from server_case import FULL, HEADERS, KEY, OLD_KEY, SECRET, Server, ask
from waiting import BOUND_S

if TYPE_CHECKING:
    import openai

LONG = f"{SECRET} " * 40
ENDLESS = 60_000  # tokens, more than any machine generates during a test
MODEL = "random"


def test_completions(client: openai.OpenAI) -> None:
    """A text, its token ids, and lists of either have the same answer. A seed repeats the answer, and usage adds up."""
    text, ids = f"{SECRET} one", [256, *f"{SECRET} one".encode()]
    shared: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    first = client.completions.create(prompt=text, **shared)
    assert first.choices[0].finish_reason == "length" and first.id.startswith("cmpl-")
    assert first.usage is not None
    counts = (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens)
    assert counts == (len(ids), 12, len(ids) + 12)
    for prompt in (ids, [text, text], [ids, ids]):
        again = client.completions.create(prompt=prompt, **shared)  # type: ignore[arg-type]
        assert {choice.text for choice in again.choices} == {first.choices[0].text}
        assert [choice.index for choice in again.choices] == list(range(len(again.choices)))
    sampled = {
        client.completions.create(model=MODEL, prompt=text, max_tokens=12, temperature=1.5, seed=seed).choices[0].text
        for seed in (-7, -7, 8)
    }
    assert len(sampled) == 2


def test_streams_are_what_is_not_streamed(client: openai.OpenAI) -> None:
    """The pieces of a streamed completion or chat make up the complete one. If requested, usage is in the last event,
    or in every event."""
    shared: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "temperature": 0.7, "seed": 3}
    prompts = [f"{SECRET} a", f"{SECRET} bc"]
    complete = client.completions.create(prompt=prompts, **shared)
    texts, reasons = ["", ""], {}
    for event in client.completions.create(prompt=prompts, stream=True, **shared):
        assert event.usage is None
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in complete.choices] and reasons == {0: "length", 1: "length"}

    parts = [{"type": "text", "text": f"{SECRET} "}, {"type": "text", "text": "hi"}]
    messages: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    chat = client.chat.completions.create(messages=messages, **shared)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = client.chat.completions.create(messages=messages, stream=True, stream_options=options, **shared)
    assert events[0].choices[0].delta.role == "assistant" and events[-1].choices[0].finish_reason == "length"
    assert "".join(event.choices[0].delta.content or "" for event in events) == chat.choices[0].message.content
    assert not last.choices and last.usage is not None and chat.usage is not None
    assert last.usage.total_tokens == chat.usage.total_tokens
    counts = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert len(counts) == len(events) and counts == sorted(counts) and counts[-1] == 20
    assert {event.usage and event.usage.prompt_tokens for event in events} == {chat.usage.prompt_tokens}


def test_cached_tokens_and_tenants(client: openai.OpenAI) -> None:
    """The second request hits complete pages. With another cache_salt a request hits none. All get the same text."""

    def create(**more: Any) -> tuple[str, int]:
        done = client.completions.create(
            model=MODEL, prompt=f"tenants {LONG}", max_tokens=8, temperature=0, extra_body=more
        )
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0

    num_tokens = 1 + len(f"tenants {LONG}")
    answers = [create(), create(), create(cache_salt="a"), create(cache_salt="b"), create(cache_salt="a")]
    assert len({text for text, _ in answers}) == 1
    cached = [count for _, count in answers]
    held = (num_tokens - 1) // 64 * 64
    assert cached == [0, held, 0, 0, held]


def test_stop_strings(client: openai.OpenAI) -> None:
    """A stop string ends the answer before its own text, streamed or not, wherever tokens end."""
    shared: dict[str, Any] = {"model": MODEL, "prompt": f"{SECRET} stop", "temperature": 1.0, "seed": 5}
    text = client.completions.create(max_tokens=60, **shared).choices[0].text
    stop = text[20:23]
    expected = text[: text.index(stop)]
    complete = client.completions.create(max_tokens=60, stop=["never there", stop], **shared)
    events = [*client.completions.create(max_tokens=60, stop=stop, stream=True, **shared)]
    assert (complete.choices[0].text, complete.choices[0].finish_reason) == (expected, "stop")
    assert "".join(event.choices[0].text for event in events) == expected
    assert events[-1].choices[0].finish_reason == "stop"
    assert complete.usage is not None and complete.usage.completion_tokens < 60


BAD: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "field of chats": ("completions", {"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens"),
    "no prompt": ("completions", {}, "prompt"),
    "empty prompt": ("completions", {"prompt": []}, "prompt"),
    "id beyond the vocabulary": ("completions", {"prompt": [260]}, "prompt"),
    "id beyond int64": ("completions", {"prompt": [1 << 70]}, "prompt"),
    "lists of both": ("completions", {"prompt": ["a", 1]}, "prompt"),
    "truth value among ids": ("completions", {"prompt": [1, True]}, "prompt"),
    "lone surrogate": ("completions", {"prompt": "\ud800"}, None),
    "too many stops": ("completions", {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    "text for a number": ("completions", {"prompt": "a", "max_tokens": "1"}, "max_tokens"),
    "no tokens asked for": ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "temperature that is no number": ("completions", {"prompt": "a", "temperature": float("nan")}, "temperature"),
    "0 for false": ("completions", {"prompt": "a", "echo": 0}, "echo"),
    "top_logprobs of none": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1},
        "top_logprobs",
    ),
    "penalty beyond OpenAI's": ("completions", {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    "bias beyond the vocabulary": ("completions", {"prompt": "a", "logit_bias": {"260": 1}}, "logit_bias"),
    "stop beyond the vocabulary": ("completions", {"prompt": "a", "stop_token_ids": [260]}, "stop_token_ids"),
    "more tokens than may be": ("completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    "priority beyond its bounds": ("completions", {"prompt": "a", "priority": -11}, "priority"),
    "an end and a next turn": (
        "completions",
        {"prompt": "a", "session_end": True, "next_turn_within_s": 3},
        "next_turn_within_s",
    ),
    "an end and further uses": (
        "completions",
        {"prompt": "a", "session_end": True, "expected_reuse": 2},
        "session_end",
    ),
    "a next turn in two days": ("completions", {"prompt": "a", "next_turn_within_s": 172800}, "next_turn_within_s"),
    "empty salt": ("completions", {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    "more prompts than are ever open": ("completions", {"prompt": ["a"] * (FULL + 1)}, "prompt"),
    "more answers than are ever open": ("completions", {"prompt": "a", "n": FULL + 1}, "n"),
    "no messages": ("chat/completions", {"messages": []}, "messages"),
    "unknown role": ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    "message without content": ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    "image": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "options of no stream": ("completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
    "variables that are none": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 1},
        "chat_template_kwargs",
    ),
    "no object": ("completions", [1], None),  # type: ignore[dict-item]
    "more fields than there are": ("completions", {str(i): i for i in range(1000)}, None),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields(server: Server, case: str) -> None:
    """A bad field is refused with status 400 and OpenAI's error body, which names the field and quotes nothing of the
    prompt."""
    path, body, param = BAD[case]
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        body = {**body, "prompt": f"{SECRET} {body['prompt']}"}
    status, answer, _ = ask(server, "POST", f"/v1/{path}", json.dumps(body).encode())
    error = answer["error"]
    assert status == 400, answer
    assert (error["type"], error["param"]) == ("invalid_request_error", param), answer
    assert set(error) == {"message", "type", "param", "code"} and SECRET not in error["message"]
    assert 0 < len(error["message"]) < 200


def test_errors_of_the_client_library(server: Server, client: openai.OpenAI) -> None:
    """A wrong key, an unknown model, a prompt beyond the context and a refused field raise the library's exceptions."""
    import openai

    assert len(list(server.client(OLD_KEY).models.list())) == 1
    for key in ("wrong", KEY.upper(), KEY[:-1], f"{OLD_KEY},{KEY}", ","):
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client(key).models.list()
        assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt=SECRET)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=SECRET, max_tokens=131072)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as field:
        client.completions.create(model=MODEL, prompt=SECRET, extra_body={"guided_regex": "red"})
    assert field.value.param == "guided_regex"
    assert [model.id for model in client.models.list()] == [client.models.retrieve(MODEL).id] == [MODEL]


def test_errors_of_http(server: Server) -> None:
    """A body that is no JSON, an unknown route, a wrong method and a missing key get the right status and always the
    same form of body. The server continues."""
    deep = b"[" * 100_000
    cases = [
        ("POST", "/v1/completions", b'{"prompt": "' + SECRET.encode(), 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", deep, 400),
        ("POST", "/v1/chat/completions", b"null", 400),
        ("GET", f"/v1/{SECRET}", b"", 404),
        ("POST", "/v1/completions/", b"{}", 404),
        ("GET", f"/{SECRET}?prompt={SECRET}", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
    ]
    for method, path, body, expected in cases:
        status, answer, headers = ask(server, method, path, body)
        assert status == expected, (method, path, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert SECRET not in answer["error"]["message"] and headers["x-request-id"]
    plain = {"Content_Type": "text/plain"}
    assert ask(server, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', **plain)[0] == 400
    assert ask(server, "GET", "/v1/models", Authorization="Basic abc")[0] == 401
    assert json.loads(server.get("/health")) == {"status": "ok"}


def test_large_bodies(server: Server) -> None:
    """A body over the limit gets 413: before it is sent if its length is announced, otherwise as soon as too many bytes
    have arrived."""
    announced = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
    sent = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
    for connection in (announced, sent):
        connection.putrequest("POST", "/v1/completions")
        for header in HEADERS.items():
            connection.putheader(*header)
    announced.putheader("Content-Length", str(1 << 40))
    announced.endheaders()
    sent.putheader("Transfer-Encoding", "chunked")
    sent.endheaders()
    for num_bytes in (1 << 20, 1):
        sent.send(b"%x\r\n" % num_bytes + b" " * num_bytes + b"\r\n")
    for connection in (announced, sent):
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "request_too_large"
        connection.close()


def test_request_ids(server: Server) -> None:
    """A client's x-request-id is in the response, and in the log with the request's figures. An invalid one is
    replaced."""
    body = json.dumps({"prompt": SECRET, "max_tokens": 3}).encode()
    _, _, headers = ask(server, "POST", "/v1/completions", body, x_request_id="mine-1")
    assert headers["x-request-id"] == "mine-1"
    line = server.wait_for_line(request_id="mine-1")
    assert (line["event"], line["status"], line["completion_tokens"], line["outcome"]) == ("request", 200, 3, "length")
    _, _, headers = ask(server, "POST", "/v1/completions", body, x_request_id="no " * 200)
    assert len(headers["x-request-id"]) == 32
    assert server.status("/health") == server.status("/metrics.json") == 200 and server.status("/healthy") == 404
    server.wait_for_line(status=404)
    probed = {"/health", "/metrics", "/metrics.json"}  # probes would fill a log
    assert not [line for line in server.log_lines if line.get("route") in probed]


def test_disconnects_and_a_full_queue(server: Server, client: openai.OpenAI) -> None:
    """A request beyond the limit gets 429 with Retry-After. Clients that disconnect, streaming or not, free their
    places in the queue."""
    import openai

    before = server.metric('hicache_requests_total{outcome="abort"}')
    prompts = [f"{SECRET} {i}" for i in range(FULL - 1)]
    stream = client.completions.create(model=MODEL, prompt=prompts, max_tokens=ENDLESS, stream=True)
    next(iter(stream))
    complete = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
    body = json.dumps({"prompt": SECRET, "max_tokens": ENDLESS}).encode()
    complete.request("POST", "/v1/completions", body, HEADERS)
    complete.send(b"\r\n")  # the server sees a disconnect despite bytes after the request
    server.wait_for("hicache_requests_queued", FULL - 2)
    assert server.metric("hicache_requests_running") == 2
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model=MODEL, prompt=SECRET)
    assert full.value.response.headers["retry-after"] == "1"
    complete.close()
    server.wait_for("hicache_requests_queued", FULL - 3)
    stream.close()
    server.wait_idle()
    server.wait_for('hicache_requests_total{outcome="abort"}', before + FULL)
    assert client.completions.create(model=MODEL, prompt=SECRET, max_tokens=2).usage


def raw(server: Server, sent: bytes) -> tuple[bytes, bytes, bytes]:
    """Send bytes and read until the server closes the connection. Returns the first line, the head and the rest of the
    response."""
    with socket.create_connection((server.host, server.port), timeout=BOUND_S) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], head, rest


def test_what_is_no_request(server: Server) -> None:
    """Bytes that are no valid request get an error's body and an id, and are counted and logged. A request with two
    lengths is refused and its connection closed, because a proxy may take the following bytes for its body. The server
    never answers the bytes after this request."""
    counted = 'hicache_http_responses_total{route="unknown",status="400"}'
    before = server.metric(counted)
    line, head, rest = raw(server, b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
    assert line == b"HTTP/1.1 400 Bad Request" and json.loads(rest)["error"]["type"] == "invalid_request_error"
    request_id = head.lower().split(b"x-request-id: ")[1][:32].decode()
    assert server.wait_for_line(request_id=request_id)["client"] == server.host
    fields = f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    inner = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    lengths = f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{fields}{lengths}".encode() + inner
    line, _, rest = raw(server, sent)
    assert line == b"HTTP/1.1 400 Bad Request" and b"Content-Length" in rest and b"HTTP/1.1" not in rest
    assert server.metric(counted) == before + 2


def test_probes_have_places_of_their_own() -> None:
    """Probes are still answered while other requests get 503 with Retry-After."""
    answered: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answered.append(scope["path"])

    async def ask_all() -> None:
        for path in ("/health", "/metrics", "/v1/models", "/tokenize"):
            sent: list[Message] = []

            async def send(message: Message, sent: list[Message] = sent) -> None:
                sent.append(message)

            scope = {"type": "http", "path": path, "headers": [], IS_CROWDED: True}
            await Gate(app, "", 1)(scope, send, send)  # type: ignore[arg-type]
            if path not in answered:
                assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]

    asyncio.run(ask_all())
    assert answered == ["/health", "/metrics"]
