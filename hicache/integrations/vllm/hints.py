"""Hints of a request for the CPU tier and the disk. vLLM passes these hints to hicache unchanged.

    "kv_transfer_params": {"hicache": {"keep_s": 600, "priority": 1}}    the next turn is expected within ten minutes
    "kv_transfer_params": {"hicache": {"session_end": true}}             no later prompt continues this one

An `agent_hint` with `priority` and `lease`, in seconds, means the same as `priority` and `keep_s`. A client gives an
`agent_hint` in `kv_transfer_params`, or as an action of `kv_hints`; vLLM defines no fields for these actions.

A hint applies from the end of the request on. A wrong value is ignored with one warning, because vLLM also ignores
wrong values in these fields.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

log = logging.getLogger(__name__)

MAX_KEEP_S: Final = 86_400.0
MAX_PRIORITY: Final = 100
_PARAM = "hicache"  # key in kv_transfer_params
_AGENT_HINT = (
    "agent_hint"  # type of an action in kv_hints, or key in kv_transfer_params: priority, and lease in seconds
)
_warned = set[str]()


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request.

    `keep_s`: seconds after the end of the request for which its chunks are evicted only after other chunks; inf means
    without a deadline. `priority`: if the chunks with hints exceed nine tenths of the CPU tier, the hint with the
    lowest priority ends first. A priority without `keep_s` keeps chunks without a deadline. `session_end`: no later
    prompt continues this prompt; this hint excludes the other hints.
    """

    keep_s: float = 0.0
    priority: int = 0
    session_end: bool = False


_NO_HINTS = Hints()


def hints_of(context: ReqContext) -> Hints:
    """Return the hints of a request. The request's parameters are parsed once."""
    hints = context.get_state(Hints)
    if hints is None:
        hints = _read(context)
        context.set_state(hints)
    return hints


def _read(context: ReqContext) -> Hints:
    where, found = _found(context)
    if found is None:
        return _NO_HINTS
    if not isinstance(found, Mapping):
        _ignore(where, found, "an object")
        return _NO_HINTS
    given: dict[str, Any] = {}
    for key, value in found.items():
        expected = _expected(key, value)
        if expected:
            _ignore(f"{where}.{key}", value, expected)
        else:
            given[key] = value
    if given.get("session_end") and len(given) > 1:
        _ignore(f"{where}.session_end", True, "alone: keep_s and priority keep what it evicts")
        del given["session_end"]
    if given.get("priority") and "keep_s" not in given:
        given["keep_s"] = math.inf
    return Hints(**given)


def _found(context: ReqContext) -> tuple[str, object]:
    """Return the field in which the request gives hints, and the hints with hicache's names; None without hints."""
    params = context.kv_transfer_params or {}
    if params.get(_PARAM) is not None:
        return f"kv_transfer_params.{_PARAM}", params[_PARAM]
    where, found = f"kv_transfer_params.{_AGENT_HINT}", params.get(_AGENT_HINT)
    for action in context.kv_hints.actions if context.kv_hints is not None else ():
        if action.action_type == _AGENT_HINT:
            where, found = f"kv_hints.{_AGENT_HINT}", action.payload
    if isinstance(found, Mapping) and "lease" in found:
        found = {**found, "keep_s": found["lease"]}
        del found["lease"]
    return where, found


def _expected(key: str, value: object) -> str:
    """Return a description of the values that a hint accepts; "" if the hint accepts `value`."""
    if key == "session_end":
        return "" if isinstance(value, bool) else "true or false"
    if key == "priority":
        is_right = type(value) is int and 0 <= value <= MAX_PRIORITY
        return "" if is_right else f"a whole number from 0 to {MAX_PRIORITY}"
    if key == "keep_s":
        is_right = type(value) in (int, float) and 0 <= value <= MAX_KEEP_S  # type: ignore[operator]
        return "" if is_right else f"seconds from 0 to {MAX_KEEP_S:g}"
    return "one of keep_s, priority, session_end"


def _ignore(what: str, value: object, expected: str) -> None:
    """Log one warning for each wrong field."""
    level = logging.DEBUG if what in _warned else logging.WARNING
    _warned.add(what)
    log.log(level, "%s must be %s, got %.80r; ignoring it, here and in later requests", what, expected, value)


def chunks_in_order(context: ReqContext) -> list[OffloadKey]:
    """Return the complete chunks of a request, of all groups of layers, in the order of its prompt."""
    return [key for key, _ in sorted(context._offload_key_positions.items(), key=itemgetter(1))]


def by_group(chunks: Sequence[OffloadKey]) -> dict[int, list[OffloadKey]]:
    """Return the chunks of each group of layers, in the same order."""
    groups: dict[int, list[OffloadKey]] = {}
    for chunk in chunks:
        groups.setdefault(get_offload_group_idx(chunk), []).append(chunk)
    return groups


class Continuations:
    """Records which chunk follows each chunk in prompts, to find the part of a prompt that other prompts share. At most
    the latest `max_chunks` chunks are recorded."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._next: dict[OffloadKey, OffloadKey | None] = {}  # None: several chunks follow

    def note(self, chunks: Sequence[OffloadKey]) -> None:
        """Record the chunks of a prompt for one group of layers."""
        known = self._next
        for chunk, following in pairwise(chunks):
            before = known.pop(chunk, following)
            known[chunk] = following if before == following else None
        if len(known) > self._max_chunks:
            self._next = dict(islice(known.items(), len(known) - self._max_chunks // 2, None))

    def num_shared(self, chunks: Sequence[OffloadKey]) -> int:
        """Return the number of leading chunks of a prompt that other prompts share."""
        for number in range(len(chunks), 0, -1):
            own = chunks[number] if number < len(chunks) else b""
            if self._next.get(chunks[number - 1], own) != own:
                return number
        return 0
