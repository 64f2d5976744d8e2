"""Session hints computed from a trace: whether a request is the last of its session, and the time of the next turn.

The next turn of a request is the next request of the session that begins with all blocks of this request except for the
last two. The last two blocks may differ, because the client may change the end of the prompt. In a trace without
sessions all requests count as one session. A request without a next turn counts as the last of a session. An example is
the last prompt of a subagent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hicache.replay.trace import Trace

HintName = Literal["session", "next"]
HINTS: tuple[HintName, ...] = get_args(HintName)
_OPEN_BLOCKS = 2


@dataclass(frozen=True)
class Hint:
    """The hints of one request. `next_turn_within_s`: seconds from this request to the next turn; None: no hint."""

    session_end: bool = False
    next_turn_within_s: float | None = None


NO_HINT = Hint()


def hints_of(trace: Trace, names: tuple[HintName, ...]) -> list[Hint]:
    """Return the hint of each request: `session` for the last request of a session, `next` for all other requests.

    Hints that are not in `names` are left out."""
    if not names:
        return [NO_HINT] * len(trace.requests)
    found: list[Hint] = []
    for request, next_s in zip(trace.requests, _next_turns(trace), strict=True):
        within_s = None if next_s is None or "next" not in names else next_s - request.time_s
        found.append(Hint(next_s is None and "session" in names, within_s))
    return found


def _next_turns(trace: Trace) -> list[float | None]:
    """Return the time of the next turn of each request in seconds; None for the last request of a session."""
    next_s: dict[tuple[str, int], float] = {}  # time of the next request by session and prefix
    found: list[float | None] = []
    for request, prefixes in zip(reversed(trace.requests), reversed(trace.prefixes), strict=True):
        ids = prefixes.tolist()
        last = ids[max(0, len(ids) - 1 - _OPEN_BLOCKS)] if ids else -1
        found.append(next_s.get((request.session, last)))
        next_s.update(((request.session, prefix), request.time_s) for prefix in ids)
    return found[::-1]
