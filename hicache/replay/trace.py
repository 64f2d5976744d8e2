"""Traces of requests: the arrival time, the lengths and the blocks of each prompt.

There are three formats, recognised by the first line. A file of each format may be gzipped. Times are relative to the
first request.

    blocks    Mooncake's: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one for each block of 512
              tokens, or of 64 if the first line has `session`
    text      LMCache's: `timestamp` (us), `input`, `output`, `session_id`: prompts as text, sorted by time here
    recorded  of `hicache serve --record`: a first line {"format": "hicache-trace", "version": 1,
              "block_tokens": N}, then `time_s`, `input_tokens`, `output_tokens`, `blocks` and, if known, `session`

The formats with milliseconds and microseconds have integers as times. If a time has a fraction, the trace uses another
unit, and the user must give this unit as `--time-unit`.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.console import path_text
from hicache.errors import ConfigError, TraceError

FORMAT, VERSION = "hicache-trace", 1
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds per unit
_MOONCAKE_BLOCK_TOKENS, _SESSION_BLOCK_TOKENS = 512, 64
_TEXT_CHARACTERS = 4  # assumed characters per token, since no tokenizer is used
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class TraceRequest:
    """One request. `time_s`: seconds since the first request. `blocks`: int64 `[blocks]`, the ids of the prompt's
    blocks; the last block may be partial. Two blocks have equal content if their ids are equal and the ids of all
    blocks before them are equal."""

    time_s: float
    blocks: npt.NDArray[np.int64]
    input_tokens: int
    output_tokens: int
    session: str = ""


@dataclass(frozen=True)
class Trace:
    """Requests in order of time. `block_tokens`: tokens of a full block. `num_warm_up`: number of requests at the start
    that only fill the tiers and are not counted."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    num_warm_up: int = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all prompts. A block that several prompts share counts once for each of them."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def prefixes(self) -> list[npt.NDArray[np.int64]]:
        """The ids of prefixes of each request, as `prefix_ids` returns them."""
        return prefix_ids([request.blocks for request in self.requests])


def prefix_ids(prompts: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """Return for each prompt the ids of its prefixes, int64 `[blocks]`: id i names block i and all blocks before it.

    Ids are 0, 1, 2, ... Prompts are processed in sorted order. In sorted order, a prompt shares at least as long a
    prefix with the prompt directly before it as with any other earlier prompt.
    """
    found = [np.empty(0, np.int64)] * len(prompts)
    before = ids = np.empty(0, np.int64)
    num_ids = 0
    for at in sorted(range(len(prompts)), key=lambda at: prompts[at].astype(">i8").tobytes()):
        prompt = prompts[at]
        length = min(len(prompt), len(before))
        differ = np.flatnonzero(prompt[:length] != before[:length])
        shared = int(differ[0]) if len(differ) else length
        ids = np.concatenate((ids[:shared], np.arange(num_ids, num_ids + len(prompt) - shared)))
        num_ids += len(prompt) - shared
        found[at] = ids
        before = prompt
    return found


def read_trace(path: str | Path, block_tokens: int | None = None, time_unit: str | None = None) -> Trace:
    """Read a trace of any format.

    `block_tokens`: tokens of a block. `time_unit`: unit of the times, one of `TIME_UNITS`. For None, the block size or
    time unit of the format is used; a recorded trace names its own block size. Raises TraceError, with file and line,
    if the trace is invalid. Raises OSError if the file cannot be opened.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_tokens={block_tokens}: give at least 1")
    if time_unit is not None and time_unit not in TIME_UNITS:
        raise ConfigError(f"time_unit={time_unit!r}: give one of {', '.join(TIME_UNITS)}")
    path = Path(path_text(path))
    lines = _lines(path)
    number, first = next(lines, (0, {}))
    if not number:
        raise TraceError(path, None, "the trace is empty; give one with at least one request")
    form = _format(_Line(path, number, first), block_tokens, time_unit)
    parsed = [] if "format" in first else [(number, form.parsed(_Line(path, number, first)))]
    parsed += [(number, form.parsed(_Line(path, number, fields))) for number, fields in lines]
    return Trace(path.name, form.block_tokens, _in_order(path, parsed, is_text="input" in first))


def _format(line: _Line, block_tokens: int | None, time_unit: str | None) -> _Format:
    """Return the format that the first line shows. A block size or time unit that is not None replaces that of the
    format."""
    fields = line.fields
    if "format" in fields:
        return _Format(_header(line, block_tokens, time_unit), "s", _recorded)
    if "hash_ids" in fields:
        block_tokens = block_tokens or (_SESSION_BLOCK_TOKENS if "session" in fields else _MOONCAKE_BLOCK_TOKENS)
        return _Format(block_tokens, time_unit or "ms", partial(_of_blocks, block_tokens), is_integral=not time_unit)
    if isinstance(fields.get("input"), str):
        block_tokens = block_tokens or _SESSION_BLOCK_TOKENS
        return _Format(block_tokens, time_unit or "us", partial(_of_text, block_tokens, {}), is_integral=not time_unit)
    raise line.error(
        "the request has neither hash_ids nor input, and lengths alone do not show which prompts share a prefix; give "
        "a trace in a format of docs/replay.md"
    )


@dataclass(frozen=True)
class _Line:
    """The fields of one line, its file and its number."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.number, reason)

    def tokens(self, name: str) -> int:
        value = self._field(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} is not an integer; give the number of tokens")
        if value < 0:
            raise self.error(f"{name} is negative; give at least 0")
        return value

    def number_of(self, name: str) -> float:
        value = self._field(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < math.inf or abs(value) > 1e300:
            raise self.error(
                f"{name} is not a finite number; give the time of the request as one, in the unit of --time-unit"
            )
        return float(value)

    def text(self, name: str) -> str:
        value = self._field(name)
        if not isinstance(value, str):
            raise self.error(f"{name} is not text; give the text of the request")
        return value

    def ids(self, name: str) -> npt.NDArray[np.int64]:
        value = self._field(name)
        try:
            ids = np.array(value) if isinstance(value, list) else np.array(0)
        except (ValueError, OverflowError):
            ids = np.array(0)
        if ids.shape == (0,):
            return np.empty(0, np.int64)
        if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0:
            raise self.error(f"{name} is not a list of block ids; give integers from 0 to 2^63 - 1")
        return ids.astype(np.int64)

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"{name} is missing; every request of this format has it")
        return self.fields[name]


@dataclass(frozen=True)
class _Format:
    """A format of traces. `parse`: builds a request from a line, with the time in `unit`. `is_integral`: whether all
    times must be integers."""

    block_tokens: int
    unit: str
    parse: Callable[[_Line], TraceRequest]
    is_integral: bool = False

    def parsed(self, line: _Line) -> TraceRequest:
        request = self.parse(line)
        if self.is_integral and not request.time_s.is_integer():
            raise line.error(
                f"timestamp has a fraction, but this format has integers in {self.unit}; give the unit of the times "
                f"with --time-unit {' or '.join(TIME_UNITS)}"
            )
        return replace(request, time_s=request.time_s * TIME_UNITS[self.unit])


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank."""
    with path.open("rb") as raw:
        is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    number = 0
    try:
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = f"the compressed file is damaged ({error}); download or record it again"
        raise TraceError(path, number + 1, reason) from error


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "the line is not JSON; give one object per line, and remove an incomplete last line"
        if number == 1 and line[:1].isalpha() and b"," in line:
            reason = (
                "the file is a table, not JSON, and tables of lengths (Azure, BurstGPT) do not show which prompts "
                "share a prefix; give a trace with hash_ids or input"
            )
        raise TraceError(path, number, reason) from error
    if not isinstance(fields, dict):
        raise TraceError(path, number, "the line is not a JSON object; give one object per line")
    return fields


def _header(line: _Line, block_tokens: int | None, time_unit: str | None) -> int:
    """Return the block size of a recorded trace, from its first line."""
    if line.fields["format"] != FORMAT or line.fields.get("version") != VERSION:
        raise line.error(f'this version reads format "{FORMAT}", version {VERSION}; record the trace again')
    recorded = line.tokens("block_tokens")
    if recorded < 1 or block_tokens not in (None, recorded):
        raise line.error(f"the trace was recorded in blocks of {recorded} tokens; leave --block-tokens out")
    if time_unit not in (None, "s"):
        raise line.error("the trace was recorded in seconds; leave --time-unit out")
    return recorded


def _recorded(line: _Line) -> TraceRequest:
    session = line.text("session") if "session" in line.fields else ""
    return TraceRequest(
        line.number_of("time_s"), line.ids("blocks"), line.tokens("input_tokens"), line.tokens("output_tokens"), session
    )


def _of_blocks(block_tokens: int, line: _Line) -> TraceRequest:
    blocks, input_tokens = line.ids("hash_ids"), line.tokens("input_length")
    # If the last block is partial, some traces have an id for this block, and some do not.
    if not (len(blocks) - 1) * block_tokens < input_tokens < (len(blocks) + 1) * block_tokens:
        raise line.error(
            f"{len(blocks)} hash_ids do not fit {input_tokens} tokens in blocks of {block_tokens}; give the block size "
            f"of the trace with --block-tokens"
        )
    session = line.fields.get("session", line.fields.get("session_id", ""))
    time, output_tokens = line.number_of("timestamp"), line.tokens("output_length")
    return TraceRequest(time, blocks, input_tokens, output_tokens, str(session))


def _of_text(block_tokens: int, known: dict[tuple[int, str], int], line: _Line) -> TraceRequest:
    """Cut text into full blocks, at 4 characters per token. `known`: ids of the blocks so far, by id of the previous
    block and text."""
    prompt, step, above = line.text("input"), block_tokens * _TEXT_CHARACTERS, -1
    blocks: list[int] = []
    for start in range(0, len(prompt) - step + 1, step):
        above = known.setdefault((above, prompt[start : start + step]), len(known))
        blocks.append(above)
    input_tokens, output_tokens = (-(-len(text) // _TEXT_CHARACTERS) for text in (prompt, line.text("output")))
    session = str(line.fields.get("session_id", ""))
    return TraceRequest(line.number_of("timestamp"), np.array(blocks, np.int64), input_tokens, output_tokens, session)


def _in_order(path: Path, parsed: list[tuple[int, TraceRequest]], *, is_text: bool) -> tuple[TraceRequest, ...]:
    """Return the requests with times relative to the first one.

    Traces with text list requests in the order in which they ended, so this function sorts the requests by time."""
    if is_text:
        parsed = sorted(parsed, key=lambda numbered: numbered[1].time_s)
    if not any(len(request.blocks) for _, request in parsed):
        raise TraceError(path, None, "no request has a block; give a trace with prompts, or smaller blocks")
    for (_, before), (number, request) in pairwise(parsed):
        if request.time_s < before.time_s:
            raise TraceError(path, number, "the request is earlier than that of the line above; sort the lines by time")
    start_s = parsed[0][1].time_s
    return tuple(replace(request, time_s=request.time_s - start_s) for _, request in parsed)
