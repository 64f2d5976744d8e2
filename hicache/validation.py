"""What every verb of the engine checks of its arguments before it changes anything.

Each function returns the value in the form that the flows take, or raises an error that names both sides. Owns nothing.
May import config, errors and what stands below them.
"""

from __future__ import annotations

import operator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hicache.config import PrefetchMode
from hicache.errors import InvalidArgument, InvalidTokens

_MODES = get_args(PrefetchMode)
_MAX_ID = np.iinfo(np.int64).max


def valid_tokens(tokens: npt.ArrayLike, what: str = "tokens", *, minimum: int = 1) -> npt.NDArray[np.int64]:
    """At least `minimum` token ids as contiguous int64 `[n]`; no copy where they are. Raises `InvalidTokens`."""
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidTokens(f"{what} cannot be read as an array of ids: {error}") from error
    if ids.ndim != 1:
        raise InvalidTokens(f"{what} have the shape {list(ids.shape)}; give one dimension of token ids")
    if len(ids) < minimum:
        raise InvalidTokens(f"{what} are empty; give at least one token id")
    if not len(ids):
        return np.empty(0, np.int64)
    if ids.dtype.kind not in "iu":
        raise InvalidTokens(f"{what} are of type {ids.dtype}; give integers from 0 to {_MAX_ID}")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest > _MAX_ID:
        raise InvalidTokens(f"{what} have ids from {lowest} to {highest}; give integers from 0 to {_MAX_ID}")
    return np.ascontiguousarray(ids, dtype=np.int64)


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


def valid_count(name: str, value: Any, minimum: int | None = 0) -> int:
    """A whole number of at least `minimum` (None: any), of any integer type but bool. Raises `InvalidArgument`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r} is of type {type(value).__name__}; give a whole number")
    if minimum is not None and count < minimum:
        raise InvalidArgument(f"{name}={count} is below {minimum}")
    return count
