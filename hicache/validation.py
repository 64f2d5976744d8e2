"""What every verb of the engine checks of its arguments before it changes anything.

Each function returns the value in the form that the flows take, or raises an error that names both sides.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hicache.config import PrefetchMode
from hicache.errors import InvalidArgument, InvalidTokens
from hicache.flow.lease import CacheRequest
from hicache.tree.key import Tokens, pack_tokens

_MODES = get_args(PrefetchMode)


def valid_tokens(tokens: npt.ArrayLike, minimum: int = 1, known_len: int = 0) -> Tokens:
    """At least `minimum` token ids as contiguous int64 `[n]`; no copy where they are. Raises `InvalidTokens`.

    The first `known_len` are compared with valid ones elsewhere.
    """
    ids = pack_tokens(tokens)
    if len(ids) < minimum:
        raise InvalidTokens("there are no tokens; give at least one token id")
    fresh = ids[known_len:]
    if len(fresh) and fresh.min() < 0:
        raise InvalidTokens(f"the lowest token id is {fresh.min()}; give ids of at least 0")
    return ids


def valid_namespace(namespace: str) -> str:
    """Text that page keys can be made of. Raises `InvalidArgument`."""
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
    """Raises `InvalidArgument`."""
    if not isinstance(request_id, str):
        raise InvalidArgument(f"request_id={request_id!r} is of type {type(request_id).__name__}; give a str")
    return request_id


def valid_mode(mode: PrefetchMode) -> PrefetchMode:
    """Raises `InvalidArgument`."""
    if mode not in _MODES:
        raise InvalidArgument(f"mode={mode!r}: choose one of {', '.join(_MODES)}")
    return mode


def valid_count(name: str, value: Any) -> int:
    """A whole number of at least 0, of any integer type but bool. Raises `InvalidArgument`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    if count < 0:
        raise InvalidArgument(f"{name}={count} is below 0")
    return count


def valid_request(request: CacheRequest) -> CacheRequest:
    """The same, its tokens packed. Raises `InvalidTokens` and `InvalidArgument`."""
    reserve, uses, cached = request.reserve_tokens, request.expected_uses, request.max_cached_tokens
    return dataclasses.replace(
        request,
        request_id=valid_request_id(request.request_id),
        tokens=valid_tokens(request.tokens),
        namespace=valid_namespace(request.namespace),
        reserve_tokens=None if reserve is None else valid_count("reserve_tokens", reserve),
        priority=valid_count("priority", request.priority),
        branch_points=tuple(valid_count("branch_points", point) for point in request.branch_points),
        max_cached_tokens=None if cached is None else valid_count("max_cached_tokens", cached),
        expected_uses=None if uses is None else valid_count("expected_uses", uses),
    )
