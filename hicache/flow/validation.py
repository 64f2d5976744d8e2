"""Checks of the arguments of all engine methods, made before anything changes.

Each function returns the normalized value, or raises an error with the given value and the allowed ones.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hicache.config import PrefetchMode
from hicache.errors import InvalidArgument, InvalidTokens
from hicache.flow.lease import CacheRequest
from hicache.pages.key import Tokens, pack_tokens

_MODES = get_args(PrefetchMode)
_MAX_COUNT = (1 << 63) - 1
_MAX_RANK = (1 << 31) - 1  # maximum priority and number of uses: up to 2^31, eviction ranks (sums of floats) are exact
MAX_NEXT_TURN_S = 86_400.0  # a day; a next turn after more than a day may still hit pages that were not evicted
_MAX_PASS_TOKENS, _MAX_PASS_S = (
    1 << 32,
    1e6,
)  # maximum tokens and seconds of a reported pass, so that a wrong report spoils the estimates only briefly


def valid_tokens(tokens: npt.ArrayLike, minimum: int = 1, known_len: int = 0) -> Tokens:
    """Return at least `minimum` token ids as contiguous int64 `[n]`, without a copy if possible. Raises
    `InvalidTokens`.

    The first `known_len` tokens are not checked, because the caller compares them with valid tokens.
    """
    ids = pack_tokens(tokens)
    if len(ids) < minimum:
        raise InvalidTokens("there are no tokens; give at least one token id")
    fresh = ids[known_len:]
    if len(fresh) and fresh.min() < 0:
        raise InvalidTokens(f"the lowest token id is {fresh.min()}; give ids of at least 0")
    return ids


def valid_namespace(namespace: str) -> str:
    """Return a namespace that can be part of page keys. Raises `InvalidArgument`."""
    if not isinstance(namespace, str):
        raise InvalidArgument(f"namespace={namespace!r} is of type {type(namespace).__name__}; give a str")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"namespace={namespace!a} has no UTF-8 form (position {error.start}); give text without lone surrogates"
        ) from None
    return namespace


def valid_request_id(request_id: str) -> str:
    """Return a request id that is a str. Raises `InvalidArgument`."""
    if not isinstance(request_id, str):
        raise InvalidArgument(f"request_id={request_id!r} is of type {type(request_id).__name__}; give a str")
    return request_id


def valid_mode(mode: PrefetchMode) -> PrefetchMode:
    """Return a known prefetch mode. Raises `InvalidArgument`."""
    if mode not in _MODES:
        raise InvalidArgument(f"mode={mode!r}: choose one of {', '.join(_MODES)}")
    return mode


def valid_number(name: str, value: Any, maximum: float = math.inf) -> float:
    """Return a number from 0 to `maximum`. Raises `InvalidArgument`."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a number")
    if not 0 <= value <= maximum:
        raise InvalidArgument(f"{name}={value} is not from 0 to {maximum:g}")
    return float(value)


def valid_count(name: str, value: Any, maximum: int = _MAX_COUNT, minimum: int = 0) -> int:
    """Return `value` as an int from `minimum` to `maximum`. Accepts each integer type except bool. Raises
    `InvalidArgument`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    if not minimum <= count <= maximum:
        shown = f"{name}={count}" if abs(count) <= _MAX_COUNT else f"{name}=..., a number of {count.bit_length()} bits,"
        raise InvalidArgument(f"{shown} is not from {minimum} to {maximum}")
    return count


def valid_interval(start: Any, end: Any) -> tuple[int, int]:
    """Return `start` and `end` as ints of at least 0. Raises `InvalidArgument`."""
    if type(start) is int and type(end) is int and 0 <= start <= _MAX_COUNT and 0 <= end <= _MAX_COUNT:
        return start, end
    return valid_count("start", start), valid_count("end", end)


def valid_pass(num_tokens: Any, seconds: Any, mean_position: Any) -> tuple[int, float, float]:
    """Return tokens, seconds and mean position of a pass. Raises `InvalidArgument`."""
    tokens = valid_count("num_tokens", num_tokens, _MAX_PASS_TOKENS)
    position = tokens / 2 if mean_position is None else valid_number("mean_position", mean_position, _MAX_PASS_TOKENS)
    return tokens, valid_number("seconds", seconds, _MAX_PASS_S), position


def valid_request(request: CacheRequest) -> CacheRequest:
    """Return the request with contiguous tokens. Raises `InvalidTokens` and `InvalidArgument`."""
    if not isinstance(request, CacheRequest):
        raise InvalidArgument(f"a {type(request).__name__} was given for a request; give a CacheRequest")
    reserve, uses, points = request.reserve_tokens, request.expected_uses, request.branch_points
    cached, within_s = request.max_cached_tokens, request.next_turn_within_s
    if request.session_end and (uses is not None or within_s is not None):
        raise InvalidArgument("session_end=True excludes expected_uses and next_turn_within_s; give one of them")
    if not isinstance(points, Iterable):
        raise InvalidArgument(f"branch_points={points!r} is of type {type(points).__name__}; give positions")
    return dataclasses.replace(
        request,
        request_id=valid_request_id(request.request_id),
        tokens=valid_tokens(request.tokens),
        namespace=valid_namespace(request.namespace),
        reserve_tokens=None if reserve is None else valid_count("reserve_tokens", reserve),
        priority=valid_count("priority", request.priority, _MAX_RANK),
        branch_points=tuple(valid_count("branch_points", point) for point in points),
        is_counted=bool(request.is_counted),
        may_wait=bool(request.may_wait),
        max_cached_tokens=None if cached is None else valid_count("max_cached_tokens", cached),
        expected_uses=None if uses is None else valid_count("expected_uses", uses, _MAX_RANK, minimum=1),
        session_end=bool(request.session_end),
        next_turn_within_s=None if within_s is None else valid_number("next_turn_within_s", within_s, MAX_NEXT_TURN_S),
    )
