"""Traces of all formats, and invalid traces, which are refused with the line of the fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.errors import ConfigError, TraceError
from hicache.replay.trace import FORMAT, VERSION, read_trace

HEADER: dict[str, Any] = {"format": FORMAT, "version": VERSION, "block_tokens": 4}


def blocks_line(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [3, 9], **changes}


def text_line(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 1_000_000, "input": "a" * 600, "output": "abcde", "session_id": "s", **changes}


def recorded_line(**changes: Any) -> dict[str, Any]:
    return {"time_s": 1.0, "input_tokens": 9, "output_tokens": 5, "blocks": [3, 9], **changes}


def written(tmp_path: Path, *lines: Any, compressed: bool = False) -> Path:
    path = tmp_path / "trace.jsonl"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_a_block_trace_is_read_as_it_was_written(tmp_path: Path, compressed: bool) -> None:
    """Requests are in the order of the file, without blank lines, with seconds since the first request."""
    lines = [blocks_line(), "", blocks_line(timestamp=3500, hash_ids=[], input_length=0)]
    trace = read_trace(written(tmp_path, *lines, compressed=compressed))
    first, second = trace.requests
    assert (trace.name, trace.block_tokens, trace.num_blocks) == ("trace.jsonl", 512, 2)
    assert (first.time_s, first.blocks.tolist(), first.input_tokens, first.output_tokens) == (0.0, [3, 9], 700, 5)
    assert (second.time_s, second.blocks.tolist(), second.blocks.dtype) == (2.5, [], np.int64)


def test_sessions_have_blocks_of_their_own_size(tmp_path: Path) -> None:
    """A line with a session has blocks of 64 tokens. The incomplete last one may have no id."""
    trace = read_trace(written(tmp_path, blocks_line(session=7, input_length=130)))
    assert trace.block_tokens == 64 and trace.requests[0].session == "7"
    assert read_trace(written(tmp_path, blocks_line(input_length=31)), block_tokens=16).block_tokens == 16


@pytest.mark.parametrize("line", [blocks_line, text_line])
def test_a_fraction_asks_for_the_unit_of_times(tmp_path: Path, line: Any) -> None:
    """Formats with whole units refuse a time with a fraction, on any line, until the unit is given. Then the given unit
    is used."""
    path = written(tmp_path, line(timestamp=2), line(timestamp=3.5))
    with pytest.raises(TraceError, match="--time-unit") as caught:
        read_trace(path)
    assert caught.value.line == 2
    for unit, seconds in (("s", 1.5), ("ms", 0.0015), ("us", 1.5e-6), ("ns", 1.5e-9)):
        assert read_trace(path, time_unit=unit).requests[1].time_s == pytest.approx(seconds)
    with pytest.raises(ConfigError, match="time_unit='min'"):
        read_trace(path, time_unit="min")
    with pytest.raises(TraceError, match="recorded in seconds"):
        read_trace(written(tmp_path, HEADER, recorded_line()), time_unit="ms")


def test_a_recorded_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The first line gives the block size. Ids may have up to 63 bits."""
    trace = read_trace(written(tmp_path, HEADER, recorded_line(blocks=[2**63 - 1, 0], session="x"), recorded_line()))
    assert trace.block_tokens == 4 and [request.session for request in trace.requests] == ["x", ""]
    assert trace.requests[0].blocks.tolist() == [2**63 - 1, 0] and trace.requests[0].input_tokens == 9


def test_prompts_as_text_share_the_blocks_of_equal_prefixes(tmp_path: Path) -> None:
    """Texts become complete blocks of 64 tokens of 4 characters. Blocks are equal if the text up to their end is equal,
    and differ after different text."""
    texts = ["a" * 600, "a" * 520 + "b" * 300, "b" * 256 + "a" * 256]
    lines = [
        text_line(input=text, timestamp=at) for text, at in zip(texts, (3_000_000, 5_000_000, 4_000_000), strict=True)
    ]
    first, other, longer = (request.blocks.tolist() for request in read_trace(written(tmp_path, *lines)).requests)
    assert len(first) == 2 and longer[:2] == first and len(longer) == 3
    assert not set(other) & set(longer)
    trace = read_trace(written(tmp_path, *lines))
    assert [request.time_s for request in trace.requests] == [0.0, 1.0, 2.0]
    assert (trace.requests[0].input_tokens, trace.requests[0].output_tokens) == (150, 2)


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([], None, "empty"),
        ([HEADER], None, "no request"),
        (["{"], 1, "JSON"),
        (["[" * 100_000], 1, "JSON"),
        ([blocks_line(), '{"timestamp": 1'], 2, "JSON"),
        ([{"prompt": "x"}], 1, "neither hash_ids nor input"),
        ([{"TIMESTAMP": "2023-11-16 18:15:46.68", "ContextTokens": 374, "GeneratedTokens": 44}], 1, "lengths"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"], 1, "tables of lengths"),
        (["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"], 1, "tables of lengths"),
        ([{**HEADER, "version": 99}, recorded_line()], 1, "version"),
        ([{**HEADER, "block_tokens": 0}, recorded_line()], 1, "blocks of 0"),
        ([HEADER, recorded_line(blocks=[1.5])], 2, "block ids"),
        ([blocks_line(), blocks_line(timestamp=999)], 2, "sort"),
        ([HEADER, recorded_line(), recorded_line(time_s=0.5)], 3, "sort"),
        ([blocks_line(input_length=-1)], 1, "input_length is negative"),
        ([blocks_line(output_length=True)], 1, "not an integer"),
        ([blocks_line(input_length=10_000)], 1, "--block-tokens"),
        ([blocks_line(timestamp=10**400)], 1, "finite"),
        ([blocks_line(timestamp="2023-11-16T18:15:46Z")], 1, "--time-unit"),
        ([blocks_line(hash_ids=[-1, 2])], 1, "block ids"),
        ([blocks_line(hash_ids=[[1], 2])], 1, "block ids"),
        ([blocks_line(hash_ids=[2**63, 2])], 1, "block ids"),
        ([blocks_line(), {"timestamp": 2000}], 2, "missing"),
        ([text_line(), text_line(input=7)], 2, "not text"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, lines: list[Any], line: int | None, words: str) -> None:
    """The message is one line and names the file, the line and the fault."""
    path = written(tmp_path, *lines)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    message = str(caught.value)
    assert caught.value.line == line and "\n" not in message and ";" in message
    assert message.startswith(f"{path}, line {line}:" if line else f"{path}:")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    """If an archive was cut short or has a flipped byte, the error names the file, and no request is returned."""
    complete = written(tmp_path, *([blocks_line()] * 2000), compressed=True).read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    for damaged in (complete[:-20], complete[:40] + bytes([complete[40] ^ 255]) + complete[41:]):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"cut\.jsonl\.gz"):
            read_trace(path)


def test_a_block_size_must_be_that_of_the_trace(tmp_path: Path) -> None:
    """A block size of no tokens, and a size that differs from that of a recorded trace, are refused."""
    with pytest.raises(ConfigError, match="block_tokens=0"):
        read_trace(written(tmp_path, blocks_line()), block_tokens=0)
    with pytest.raises(TraceError, match="blocks of 4 tokens"):
        read_trace(written(tmp_path, HEADER, recorded_line()), block_tokens=8)
