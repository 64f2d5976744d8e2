"""The fields of requests: the tables of docs/serving.md equal the declarations, and the server reads every field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from hicache.serving.server import protocol
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody

ROOT = Path(__file__).resolve().parents[2]
BODIES: dict[str, tuple[type[GenerationBody], dict[str, Any]]] = {
    "completions": (CompletionBody, {"prompt": "a"}),
    "chats": (ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
}


def rows(heading: str) -> list[tuple[str, str, str]]:
    """The fields of the table under the heading of docs/serving.md: route, name, and the text of the last column."""
    page = (ROOT / "docs/serving.md").read_text()
    table = page.split(f"\n### {heading}\n")[1].split("\n#")[0]
    return [
        (route, name, text)
        for names, of, text in re.findall(r"^\| (`.*?) \| (\w+) \| (.*?) ?\|$", table, re.MULTILINE)
        for route in (BODIES if of == "both" else [of])
        for name in re.findall(r"`(\w+)`", names)
    ]


@pytest.mark.parametrize("route", BODIES)
def test_each_field_is_in_one_table(route: str) -> None:
    kind, _ = BODIES[route]
    tables = [{name for of, name, _ in rows(heading) if of == route} for heading in ("Taken", "Ignored")]
    assert tables == [set(kind.model_fields), protocol.IGNORED]


def test_what_is_not_supported_is_refused_by_name() -> None:
    """A field that is not supported is refused by name, also in a message or in stream options, or if it belongs to the
    other route. Null and an empty list are accepted. A field in the table of ignored fields may have any value."""
    for kind, least in BODIES.values():
        (unknown,) = {"max_completion_tokens", "echo"} - set(kind.model_fields)
        plain = kind.model_validate(least)
        for name in (unknown, "tools", "guided_regex", "colour"):
            for nothing in (None, []):
                assert kind.model_validate({**least, name: nothing}) == plain
            for value in (7, 0.5, "more", [1], {}, True, False, 0):
                with pytest.raises(pydantic.ValidationError) as refused:
                    kind.model_validate({**least, name: value})
                (error,) = refused.value.errors()
                assert error["loc"] == (name,)
                assert error["type"] == "extra_forbidden"
        for name in protocol.IGNORED:
            assert kind.model_validate({**least, name: {"a": 1}}) == plain
        with pytest.raises(pydantic.ValidationError, match="include_obfuscation"):
            kind.model_validate({**least, "stream": True, "stream_options": {"include_obfuscation": False}})
    part = {"type": "text", "text": "a", "annotations": [], "cache_control": None}
    message = {"role": "assistant", "content": [part], "tool_calls": [], "refusal": None}
    assert ChatBody.model_validate({"messages": [message]})
    for wrong in ({**message, "tool_calls": [{}]}, {**message, "content": [{**part, "cache_control": {}}]}):
        with pytest.raises(pydantic.ValidationError, match=r"tool_calls|cache_control"):
            ChatBody.model_validate({"messages": [wrong]})


def test_null_is_a_field_that_was_left_out() -> None:
    for kind, least in BODIES.values():
        nulls = dict.fromkeys(set(kind.model_fields) - set(least))
        assert kind.model_validate({**nulls, **least}) == kind.model_validate(least)
        for name in least:
            with pytest.raises(pydantic.ValidationError):
                kind.model_validate({name: None})
