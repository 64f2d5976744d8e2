"""What requests of a trace would say of later ones: which was the last of its session, and when the next turn came.

The next turn is the next request of the same session, where the trace has sessions, that has all blocks of the prompt
but the last two, which its answer or a changed end may differ in. So what a session does not go on from, like the last
prompt of a helper that it started, has ended as well.
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
    """Of one request. `next_turn_within_s`: seconds from it; None: nothing is said."""

    session_end: bool = False
    next_turn_within_s: float | None = None


NO_HINT = Hint()


def hints_of(trace: Trace, names: tuple[HintName, ...]) -> list[Hint]:
    """What each request says, that says all of `names` that are true of it: `session` of the last of a session alone,
    `next` of all others."""
    if not names:
        return [NO_HINT] * len(trace.requests)
    found: list[Hint] = []
    for request, next_s in zip(trace.requests, _next_turns(trace), strict=True):
        within_s = None if next_s is None or "next" not in names else next_s - request.time_s
        found.append(Hint(next_s is None and "session" in names, within_s))
    return found


def _next_turns(trace: Trace) -> list[float | None]:
    """When the next turn of each request came; None after the last."""
    next_s: dict[tuple[str, int], float] = {}  # by session and prefix, of the next request that has it
    found: list[float | None] = []
    for request, prefixes in zip(reversed(trace.requests), reversed(trace.prefixes), strict=True):
        ids = prefixes.tolist()
        last = ids[max(0, len(ids) - 1 - _OPEN_BLOCKS)] if ids else -1
        found.append(next_s.get((request.session, last)))
        next_s.update(((request.session, prefix), request.time_s) for prefix in ids)
    return found[::-1]
