"""The fields of requests: the tables of docs/serving.md are what the declarations say, and no field goes unread."""

from __future__ import annotations

import json
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


def is_refused(kind: type[GenerationBody], name: str) -> bool:
    return kind.model_fields[name].annotation in (None, type(None))


@pytest.mark.parametrize("route", BODIES)
def test_each_field_is_in_one_table(route: str) -> None:
    kind, _ = BODIES[route]
    fields = set(kind.model_fields)
    ignored, refused = set(protocol.IgnoredFields.model_fields), {name for name in fields if is_refused(kind, name)}
    tables = [{name for of, name, _ in rows(heading) if of == route} for heading in ("Taken", "Refused", "Ignored")]
    assert tables == [fields - refused - ignored, refused, ignored]


def test_refused_fields_are_taken_at_what_asks_for_nothing() -> None:
    """At the values in the table, and at null, they are as if they were left out; at any other they are refused."""
    for route, name, text in rows("Refused"):
        kind, least = BODIES[route]
        values = [json.loads(value) for value in re.findall(r"`([^`]+)`", text)]
        for value in (*values, None):
            assert kind.model_validate({**least, name: value}) == kind.model_validate(least), (name, value)
        for value in (7, 0.5, "more", [1], {"a": 1}, True, False, 0, 1):
            if (value, type(value) is bool) not in [(item, type(item) is bool) for item in values]:
                with pytest.raises(pydantic.ValidationError, match="does not implement it") as refused:
                    kind.model_validate({**least, name: value})
                assert refused.value.errors()[0]["loc"] == (name,)


def test_null_is_a_field_that_was_left_out() -> None:
    for kind, least in BODIES.values():
        nulls = dict.fromkeys(set(kind.model_fields) - set(least))
        assert kind.model_validate({**nulls, **least}) == kind.model_validate(least)
        for name in least:
            with pytest.raises(pydantic.ValidationError):
                kind.model_validate({name: None})
