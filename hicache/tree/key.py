"""Keys: tokens as packed memory, and the names under which pages are known outside this process.

Tokens are packed as int64. In a tree of bigrams an element is a pair, (first << 32) | second, so the tree itself knows
one kind only. Two pairs share an element unless both ids are from 0 to 2^31 - 1, so bigrams take no other ids.

Ids that were packed here are shared: slices of keys, and long runs of nodes, are views of the same memory. An array of
the caller's, read-only or not, is copied by a node.

A page's key is a SHA-256 chain over an identity, a namespace and every token up to the page's end, so two pages share a
key only when model, layout, tenant and the whole prefix are the same:

    seed     = SHA-256(identity digest || namespace length, 8 bytes little endian || namespace, UTF-8)
    key[0]   = SHA-256(seed || tokens of page 0, int64 little endian)
    key[i]   = SHA-256(key[i-1] || tokens of page i)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.errors import InvalidTokens

Tokens = npt.NDArray[np.int64]
TokenSource = Callable[[int, int], Tokens]  # tokens [start, end) of a sequence, packed

_ITEM = 8
_MANY_IDS = 64
_SHARED_TOKENS = 4096  # 32 KiB: from here on numpy compares at the speed of memcmp
_BIGRAM_ID_BITS = 31
_MAX_ID = np.iinfo(np.int64).max
_BIGRAM, _ESCAPE = "\x01", "\x00"


def pack_tokens(tokens: npt.ArrayLike) -> Tokens:
    """Any sequence of token ids as one packed, contiguous int64 buffer; no copy where it already is one.

    A list is converted into read-only memory. InvalidTokens where that would change an id: for anything but a
    one-dimensional sequence of integers, and for integers beyond int64.
    """
    if isinstance(tokens, (list, tuple)) and tokens and not isinstance(tokens[0], bool):
        try:
            # Strict, for no float is cut to an integer; many ids as unsigned, twice as fast as numpy converts them.
            many = len(tokens) >= _MANY_IDS
            packed = _view(_Memory(array("Q" if many else "q", tokens)))
            if not many or not np.count_nonzero(packed < 0):
                return packed
        except (TypeError, OverflowError):
            pass  # negative ids, or none at all: numpy tells
    ids = _as_array(tokens)
    if ids.ndim != 1:
        raise InvalidTokens(f"token ids have the shape {list(ids.shape)}; give one dimension")
    return _as_int64(ids)


def pack_bigrams(first: Tokens, second: Tokens) -> Tokens:
    """Pairs of packed ids, element by element, as (first << 32) | second.

    InvalidTokens for ids outside [0, 2^31), for their pairs would read as other pairs.
    """
    # No bit beyond the lowest 31 is set in the union of all ids exactly where each id is in range.
    if (np.bitwise_or.reduce(first) | np.bitwise_or.reduce(second)) >> _BIGRAM_ID_BITS:
        ids = np.concatenate((first, second))
        raise InvalidTokens(
            f"a key of bigrams has ids from {ids.min()} to {ids.max()}; give ids from 0 to {(1 << _BIGRAM_ID_BITS) - 1}"
        )
    memory = _Memory(len(first) * _ITEM)
    pairs = np.frombuffer(memory, np.int64)
    np.left_shift(first, 32, out=pairs)
    np.bitwise_or(pairs, second, out=pairs)
    return _view(memory)


def neighbours(tokens: Tokens) -> Tokens:
    """Pairs of neighbours, one fewer than tokens, as `pack_bigrams` has them."""
    return pack_bigrams(tokens[:-1], tokens[1:])


def joined_tokens(first: Sequence[int], second: Sequence[int]) -> TokenSource:
    """Tokens [start, end) of two sequences after each other, at the cost of those tokens."""

    def run(start: int, end: int) -> Tokens:
        split = len(first)
        if end <= split:
            return pack_tokens(first[start:end])
        tail = pack_tokens(second[max(0, start - split) : end - split])
        return np.concatenate((pack_tokens(first[start:]), tail)) if start < split else tail

    return run


def _as_array(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidTokens(f"token ids cannot be read as an array: {error}") from error


def _as_int64(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if ids.size and ids.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids are of type {ids.dtype}; give integers of at most {_MAX_ID}")
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > _MAX_ID:
        raise InvalidTokens(f"the largest token id is {ids.max()}; give integers of at most {_MAX_ID}")
    return np.ascontiguousarray(ids, dtype=np.int64)


class _Memory(bytearray):
    """Token ids that this module copied. Nobody else has the memory, so views of it never change; a read-only array of
    a caller says nothing of the kind, for its base may be writable."""


def _view(memory: _Memory) -> Tokens:
    """Read-only."""
    tokens = np.frombuffer(memory, np.int64)
    tokens.setflags(write=False)
    return tokens


def _memory_of(tokens: Tokens) -> _Memory | None:
    """The memory that `tokens` are a view of, where this module made it."""
    base: Any = tokens.base.base if isinstance(tokens.base, np.ndarray) else tokens.base
    return base.obj if isinstance(base, memoryview) and isinstance(base.obj, _Memory) else None


class RadixKey:
    """Token ids, and what else has to be equal for two prefixes to be the same. Not changed once made.

    `token_ids`: a sequence of ids, or of pairs with `is_bigram`. They are packed once, when a cache first asks; an
    int64 array is not copied at all. An index or a slice is a key of the same kind with the same `extra_key`, and
    shares the packed memory. Keys with different extra keys never match.
    """

    __slots__ = ("_bigrams", "_ids", "_packed", "extra_key", "is_bigram")

    def __init__(self, token_ids: Sequence[Any], extra_key: str | None = None, is_bigram: bool = False) -> None:
        self.extra_key, self.is_bigram = extra_key, is_bigram
        self._ids: Any = token_ids
        self._packed: Tokens | None = None
        self._bigrams: RadixKey | None = None

    @classmethod
    def of_packed(cls, tokens: Tokens, extra_key: str | None, is_bigram: bool) -> RadixKey:
        """The key of packed tokens, whose ids are unpacked where somebody asks for them."""
        key = cls(None, extra_key, is_bigram)  # type: ignore[arg-type]
        key._packed = tokens
        return key

    @property
    def token_ids(self) -> Any:
        """As they were given; a list where the key is a part of another."""
        if self._ids is None:
            ids = self.packed().tolist()
            self._ids = [(pair >> 32, pair & 0xFFFFFFFF) for pair in ids] if self.is_bigram else ids
        return self._ids

    def __len__(self) -> int:
        return len(self._ids if self._packed is None else self._packed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.token_ids)

    def __getitem__(self, at: int | slice) -> RadixKey:
        """One id (or pair), or a run of them, as a key."""
        packed = self.packed()[at] if isinstance(at, slice) else self.packed()[at : at + 1 or None]
        if not isinstance(at, slice) and not len(packed):
            raise IndexError(f"a key of {len(self)} tokens has none at {at}")
        return RadixKey.of_packed(packed, self.extra_key, self.is_bigram)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self.namespace == other.namespace and np.array_equal(self.packed(), other.packed())

    __hash__ = None  # type: ignore[assignment]  # token_ids may be a list

    def __repr__(self) -> str:
        shown = f"{list(self[:10].token_ids)}{'...' if len(self) > 10 else ''}"
        return f"RadixKey(extra_key={self.extra_key!r}, token_ids={shown})"

    @property
    def namespace(self) -> str:
        """See `namespace_of`."""
        return namespace_of(self.extra_key, self.is_bigram)

    def packed(self) -> Tokens:
        """int64 `[len]`; pairs as in `pack_bigrams`. InvalidTokens where ids cannot be packed."""
        if self._packed is None:
            self._packed = _pack_pairs(self._ids) if self.is_bigram and len(self._ids) else pack_tokens(self._ids)
        return self._packed

    def as_bigrams(self) -> RadixKey:
        """The pairs of neighbours, one fewer than tokens; itself where it is of pairs already."""
        if self.is_bigram:
            return self
        if self._bigrams is None:
            self._bigrams = RadixKey.of_packed(neighbours(self.packed()), self.extra_key, is_bigram=True)
        return self._bigrams


def namespace_of(extra_key: str | None, is_bigram: bool = False) -> str:
    """Different for different extra keys and kinds of tokens, and equal to an extra key of plain text."""
    text = extra_key or ""
    if extra_key is not None and (not text or text[0] in (_ESCAPE, _BIGRAM)):
        text = _ESCAPE + text
    return _BIGRAM + text if is_bigram else text


def _pack_pairs(pairs: Sequence[Any]) -> Tokens:
    ids = _as_array(pairs)
    if ids.ndim != 2 or ids.shape[1] != 2:
        raise InvalidTokens(f"a key of bigrams has the shape {list(ids.shape)}; give pairs of token ids")
    ids = _as_int64(ids)
    return pack_bigrams(ids[:, 0], ids[:, 1])


def key_of(tokens: Tokens, namespace: str) -> RadixKey:
    """The key that packed `tokens` and a namespace stand for: the way back from `packed` and `namespace`."""
    is_bigram = namespace.startswith(_BIGRAM)
    text = namespace[len(_BIGRAM) :] if is_bigram else namespace
    extra = None if not text else text[len(_ESCAPE) :] if text.startswith(_ESCAPE) else text
    return RadixKey.of_packed(tokens, extra, is_bigram)


class TokenRun:
    """Packed tokens in memory that does not change.

    A short run, one of a caller's memory, and one that would keep more than twice its own memory alive is copied. A
    long run of packed ids is a view of them: neither an insertion nor a split copies it.
    """

    __slots__ = ("_raw", "_tokens")

    def __init__(self, tokens: Tokens) -> None:
        self._raw: _Memory | None = None
        self._tokens: Tokens | None = None
        memory = _memory_of(tokens) if len(tokens) >= _SHARED_TOKENS else None
        if memory is not None and 2 * len(tokens) * _ITEM >= len(memory):
            self._tokens = tokens
        else:
            # A bytearray compares its front with any buffer by memcmp, which is faster than starting a numpy operation.
            self._raw = _Memory(tokens)

    def __len__(self) -> int:
        return len(self.tokens) if self._raw is None else len(self._raw) // _ITEM

    @property
    def tokens(self) -> Tokens:
        """int64 `[len]`, read-only."""
        if self._tokens is None:
            self._tokens = _view(self._raw or _Memory())
        return self._tokens

    def common_len(self, tokens: Tokens, raw: memoryview, start: int) -> int:
        """How many tokens from the front are those of `tokens` from `start` on. `raw`: the bytes of `tokens`."""
        length = min(len(self), len(tokens) - start)
        if self._raw is not None and self._raw.startswith(raw[start * _ITEM : (start + length) * _ITEM]):
            return length
        same = self.tokens[:length] == tokens[start : start + length]
        first = int(same.argmin()) if length else 0
        return length if not length or same[first] else first


def bytes_of(tokens: Tokens) -> memoryview:
    """The memory of packed tokens as bytes."""
    return tokens.data.cast("B") if len(tokens) else memoryview(b"")


class PageHasher:
    """Computes page keys for one identity. Stateless but for `pages_hashed`; owned by the scheduler thread."""

    def __init__(self, identity_digest: bytes, page_size: int) -> None:
        self.page_size = page_size
        self.pages_hashed = 0
        self._identity = identity_digest

    def seed(self, namespace: str) -> bytes:
        raw = namespace.encode()
        return hashlib.sha256(self._identity + len(raw).to_bytes(8, "little") + raw).digest()

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        """Keys of the whole pages in `tokens`, given the key of the page before them (or the seed)."""
        step = self.page_size * _ITEM
        raw = bytes_of(tokens.astype("<i8", copy=False))
        keys = []
        for start in range(0, len(raw) - step + 1, step):
            previous = hashlib.sha256(previous + raw[start : start + step]).digest()
            keys.append(previous)
        self.pages_hashed += len(keys)
        return keys
