"""Packed tokens, and page keys, by which the host, stores and other processes find pages.

Tokens are packed as int64. Long token runs of nodes are views of memory that this module allocated. The array of a
caller is copied, even if it is read-only.

A page's key is a SHA-256 chain over an identity, a namespace and every token up to the page's end. So two pages have
the same key only if model, layout, tenant and prefix are the same:

    seed     = SHA-256(identity digest || namespace length, 8 bytes little endian || namespace, UTF-8)
    key[0]   = SHA-256(seed || tokens of page 0, int64 little endian)
    key[i]   = SHA-256(key[i-1] || tokens of page i)

The key of a window or state is SHA-256(page key || name of the component).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.errors import InvalidTokens
from hicache.tiers import FULL, Component

Tokens = npt.NDArray[np.int64]

_ITEM = 8
_MANY_IDS = 64
SHARED_TOKENS = 4096  # 32 KiB; numpy compares runs of at least this size at the speed of memcmp
_MAX_ID = np.iinfo(np.int64).max


def pack_tokens(tokens: npt.ArrayLike) -> Tokens:
    """Return a sequence of token ids as one contiguous int64 array, without a copy if the sequence already is such an
    array.

    A list is converted to read-only memory. Raises InvalidTokens unless it is a one-dimensional sequence of integers
    within int64.
    """
    if isinstance(tokens, (list, tuple)) and tokens and not isinstance(tokens[0], bool):
        try:
            # `array` accepts no floats. Unsigned conversion of long lists is twice as fast as numpy's.
            many = len(tokens) >= _MANY_IDS
            packed = _view(_Memory(array("Q" if many else "q", tokens)))
            if not many or not np.count_nonzero(packed < 0):
                return packed
        except (TypeError, OverflowError):
            pass  # negative ids or other types: numpy decides
    if type(tokens) is np.ndarray and tokens.dtype == np.int64 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens
    ids = as_array(tokens)
    if ids.ndim != 1:
        raise InvalidTokens(f"token ids have the shape {list(ids.shape)}; give one dimension")
    return as_int64(ids)


def as_array(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return `tokens` as an array. Raises InvalidTokens if numpy cannot convert them."""
    try:
        return np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidTokens(f"token ids cannot be read as an array: {error}") from error


def as_int64(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return ids as contiguous int64. Raises InvalidTokens if the conversion would change an id."""
    if ids.size and ids.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids are of type {ids.dtype}; give integers of at most {_MAX_ID}")
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > _MAX_ID:
        raise InvalidTokens(f"the largest token id is {ids.max()}; give integers of at most {_MAX_ID}")
    return np.ascontiguousarray(ids, dtype=np.int64)


def new_tokens(num_tokens: int) -> Tokens:
    """Allocate memory for token ids that nodes may share. The caller fills the memory and then makes it read-only."""
    return np.frombuffer(_Memory(num_tokens * _ITEM), np.int64)


class _Memory(bytearray):
    """Token ids that this module copied. No other module can write this memory, so views of it never change. A caller's
    array can change even if it is read-only, because its base may be writable."""


def _view(memory: _Memory) -> Tokens:
    """Return a read-only view of token ids."""
    tokens = np.frombuffer(memory, np.int64)
    tokens.setflags(write=False)
    return tokens


def owned(tokens: Tokens) -> Tokens:
    """Return packed tokens in memory that does not change. The tokens are copied if a caller owns their memory, or if a
    view would keep more than twice the memory of the tokens alive."""
    base: Any = tokens.base.base if isinstance(tokens.base, np.ndarray) else tokens.base
    is_owned = isinstance(base, memoryview) and isinstance(base.obj, _Memory)
    return tokens if is_owned and 2 * len(tokens) * _ITEM >= len(base.obj) else _view(_Memory(tokens))


class TokenRun:
    """Packed tokens in memory that does not change. The tokens of short runs are copied. Long runs are `owned`: neither
    an insertion nor a split copies them again."""

    __slots__ = ("_raw", "_tokens", "num_tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.num_tokens = len(tokens)
        self._raw: _Memory | None = None
        self._tokens: Tokens | None = None
        if len(tokens) >= SHARED_TOKENS:
            self._tokens = owned(tokens)
        else:
            # A bytearray compares with a buffer by memcmp, which is faster than starting a numpy operation.
            self._raw = _Memory(tokens)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> Tokens:
        """The token ids of the run, int64 `[num_tokens]`, read-only."""
        if self._tokens is None:
            self._tokens = _view(self._raw or _Memory())
        return self._tokens

    def common_len(self, tokens: Tokens, raw: memoryview, start: int) -> int:
        """Return the number of leading tokens of this run that equal `tokens` from position `start` on. `raw`: the
        bytes of `tokens`."""
        length = min(self.num_tokens, len(tokens) - start)
        if self._raw is not None and self._raw.startswith(raw[start * _ITEM : (start + length) * _ITEM]):
            return length
        own_tokens = self.tokens if self._tokens is None else self._tokens
        same = own_tokens[:length] == tokens[start : start + length]
        first = int(same.argmin()) if length else 0
        return length if not length or same[first] else first


def bytes_of(tokens: Tokens) -> memoryview:
    """Return the memory of packed tokens as bytes."""
    return tokens.data.cast("B") if len(tokens) else memoryview(b"")


class PromptPages(NamedTuple):
    """Consecutive pages of one prompt: the `tokens` and `keys` of the pages, and `previous_key`, the key of the page
    before them (None at the start of the prompt)."""

    keys: Sequence[bytes]
    previous_key: bytes | None
    tokens: Tokens
    namespace: str

    def part(self, start: int, end: int) -> PromptPages:
        """Return pages [start, end)."""
        size = len(self.tokens) // max(1, len(self.keys))
        previous_key = self.keys[start - 1] if start else self.previous_key
        return PromptPages(self.keys[start:end], previous_key, self.tokens[start * size : end * size], self.namespace)


def component_keys(component: Component, page_keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of a component's data for the pages with the keys `page_keys`."""
    if component == FULL:
        return [*page_keys]
    name = component.encode()
    return [hashlib.sha256(key + name).digest() for key in page_keys]


class PageHasher:
    """Computes page keys for one identity. The only state of a hasher is the counter `pages_hashed`. Owned by the
    scheduler thread."""

    def __init__(self, identity_digest: bytes, page_size: int) -> None:
        self.page_size = page_size
        self.pages_hashed = 0
        self._identity = identity_digest

    def seed(self, namespace: str) -> bytes:
        raw = namespace.encode()
        return hashlib.sha256(self._identity + len(raw).to_bytes(8, "little") + raw).digest()

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        """Return the keys of the complete pages in `tokens`, after the page with key `previous` (or the seed)."""
        step, sha256 = self.page_size * _ITEM, hashlib.sha256
        raw = tokens.astype("<i8", copy=False).tobytes()
        starts = range(0, len(raw) - step + 1, step)
        keys = [previous := sha256(previous + raw[start : start + step]).digest() for start in starts]
        self.pages_hashed += len(keys)
        return keys
