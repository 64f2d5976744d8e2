"""Answers in JSON: each answer matches the schema, whatever tokens the model prefers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import openai
import pytest

from hicache.serving.constrained import JsonAnswers
from hicache.serving.models import ByteTokenizer
from server_case import Server, ask

pytest.importorskip("llguidance", reason="no llguidance here, of the extra 'serve'")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "of": {"enum": ["a", "bc"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "counted", "schema": SCHEMA}}


def answers() -> JsonAnswers:
    return JsonAnswers(ByteTokenizer(), ByteTokenizer.num_tokens, frozenset())


def require_counted(text: str | None) -> None:
    found = json.loads(text or "")
    assert found.keys() == {"n", "of"} and 0 <= found["n"] <= 999 and found["of"] in ("a", "bc"), text


def test_what_may_come_follows_what_came() -> None:
    """The constraint allows each beginning of a text that matches the schema, and no other text. The constraint ends
    when the text is complete. A copy continues from its own position."""
    first = answers().constraint(json.dumps(SCHEMA))
    text, other = b'{"n": 42, "of":\n"bc"}', None
    for place, byte in enumerate(text):
        allowed = first.allowed()
        assert len(allowed) >= ByteTokenizer.num_tokens and allowed[byte] and first.outcome is None
        assert not allowed[[*b"]x", ByteTokenizer.bos_id]].any(), text[:place]
        other = first.copy() if place == 7 else other
        first.take(byte)
    assert first.outcome == "stop"
    assert other is not None and other.outcome is None and set(np.flatnonzero(other.allowed())) & {*b"0123456789"}
    other.take(ord("]"))
    assert other.outcome == "error"


def test_every_answer_is_what_the_schema_describes(client: openai.OpenAI) -> None:
    """A model with random weights gives valid answers: several answers of one chat, streamed ones, and equal ones for
    the same seed. A truncated answer has the finish reason "length". The format "any JSON object" works too."""
    messages: Any = [{"role": "user", "content": "count"}]
    create = client.chat.completions.create
    complete = create(model="random", messages=messages, n=3, seed=1, max_tokens=200, response_format=FORMAT)
    for choice in complete.choices:
        require_counted(choice.message.content)
        assert choice.finish_reason == "stop"
    stream = create(model="random", messages=messages, seed=1, max_tokens=200, response_format=FORMAT, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == complete.choices[0].message.content
    cut = client.completions.create(
        model="random", prompt="count", max_tokens=3, temperature=0, extra_body={"response_format": FORMAT}
    )
    assert cut.choices[0].finish_reason == "length" and re.match(r"\s*[{]?", cut.choices[0].text)
    some = create(model="random", messages=messages, seed=2, max_tokens=40, response_format={"type": "json_object"})
    assert (some.choices[0].message.content or "").lstrip(" \n").startswith("{")


def test_what_cannot_be_done_names_the_field(server: Server) -> None:
    """An unknown format, a schema that cannot be applied, and tools are refused with status 400 and the name of the
    field."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 1}
    schemas: Any = ({"type": "all"}, [], {"enum": ["long" * 10] * 2000})
    wrong = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    formats = [("response_format", value) for value in ({"type": "yaml"}, *wrong)]
    for name, value in (*formats, ("tools", [{"type": "x"}])):
        status, answer, _ = ask(server, "POST", "/v1/chat/completions", json.dumps({**body, name: value}).encode())
        assert (status, answer["error"]["param"]) == (400, name)
