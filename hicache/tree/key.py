"""Keys: tokens as packed memory, and the names under which pages are known outside this process.

Tokens are packed as int64. In a tree of bigrams an element is a pair, (first << 32) | second, so the tree itself knows
of one kind only. Two pairs share an element unless both ids are from 0 to 2^31 - 1, so bigrams take no other ids.

A page's key is a SHA-256 chain over an identity, a namespace and every token up to the page's end, so two pages share a
key only when model, layout, tenant and the whole prefix are the same:

    seed     = SHA-256(identity digest || namespace length, 8 bytes little endian || namespace, UTF-8)
    key[0]   = SHA-256(seed || tokens of page 0, int64 little endian)
    key[i]   = SHA-256(key[i-1] || tokens of page i)

May import numpy, torch, layout, config and errors.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.errors import InvalidTokens

Tokens = npt.NDArray[np.int64]
TokenSource = Callable[[int, int], Tokens]  # tokens [start, end) of a sequence, packed

_ITEM = 8
_BIGRAM_ID_BITS = 31
_MAX_ID = np.iinfo(np.int64).max
_BIGRAM, _ESCAPE = "\x01", "\x00"


def pack_tokens(tokens: npt.ArrayLike) -> Tokens:
    """Any sequence of token ids as one packed, contiguous int64 buffer; no copy when it already is one.

    InvalidTokens where that would change an id: for what is no run of integers, and for integers beyond int64.
    """
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
    return first << 32 | second


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


class RadixKey:
    """Token ids, and what else has to be equal for two prefixes to be the same.

    `token_ids`: a sequence of ids, or of pairs with `is_bigram`. What is indexed or sliced out of a key is a key of the
    same kind with the same `extra_key`; keys with different extra keys never match.
    """

    __slots__ = ("extra_key", "is_bigram", "token_ids")

    def __init__(self, token_ids: Sequence[Any], extra_key: str | None = None, is_bigram: bool = False) -> None:
        self.token_ids, self.extra_key, self.is_bigram = token_ids, extra_key, is_bigram

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.token_ids)

    def __getitem__(self, at: int | slice) -> RadixKey:
        """One id (or pair), or a run of them, as a key."""
        ids = self.token_ids[at] if isinstance(at, slice) else [self.token_ids[at]]
        return RadixKey(ids, self.extra_key, self.is_bigram)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self.namespace == other.namespace and list(self.token_ids) == list(other.token_ids)

    __hash__ = None  # type: ignore[assignment]  # token_ids may be a list

    def __repr__(self) -> str:
        shown = f"{list(self.token_ids[:10])}{'...' if len(self) > 10 else ''}"
        return f"RadixKey(extra_key={self.extra_key!r}, token_ids={shown})"

    @property
    def namespace(self) -> str:
        """Different for different extra keys and kinds, and equal to the extra key where that is plain text."""
        extra = self.extra_key
        text = "" if extra is None else _ESCAPE + extra if not extra or extra[0] in (_ESCAPE, _BIGRAM) else extra
        return _BIGRAM + text if self.is_bigram else text

    def packed(self) -> Tokens:
        """int64 `[len]`; pairs as in `pack_bigrams`. InvalidTokens where ids cannot be packed."""
        if not self.is_bigram or not len(self):
            return pack_tokens(self.token_ids)
        pairs = _as_array(self.token_ids)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise InvalidTokens(f"a key of bigrams has the shape {list(pairs.shape)}; give pairs of token ids")
        ids = _as_int64(pairs)
        return pack_bigrams(ids[:, 0], ids[:, 1])

    def as_bigrams(self) -> RadixKey:
        """The pairs of neighbours, one fewer than tokens; itself where it is of pairs already."""
        if self.is_bigram:
            return self
        ids = list(self.token_ids)
        return RadixKey(list(itertools.pairwise(ids)), self.extra_key, is_bigram=True)


def key_of(tokens: Tokens, namespace: str) -> RadixKey:
    """The key that packed `tokens` and a namespace stand for: the way back from `packed` and `namespace`."""
    is_bigram = namespace.startswith(_BIGRAM)
    text = namespace[len(_BIGRAM) :] if is_bigram else namespace
    extra = None if not text else text[len(_ESCAPE) :] if text.startswith(_ESCAPE) else text
    ids: list[Any] = tokens.tolist()
    if is_bigram:
        ids = [(pair >> 32, pair & 0xFFFFFFFF) for pair in ids]
    return RadixKey(ids, extra, is_bigram)


class TokenRun:
    """Packed tokens with memory of their own, made to be compared: a whole run in one comparison of memory."""

    __slots__ = ("_raw", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        """Copies `tokens`."""
        # A bytearray compares with any buffer by memcmp, at a fraction of the cost of starting a numpy operation.
        self._raw = bytearray(tokens.data.cast("B")) if len(tokens) else bytearray()
        self.tokens: Tokens = np.frombuffer(self._raw, np.int64)

    def __len__(self) -> int:
        return len(self._raw) // _ITEM

    def common_len(self, tokens: Tokens, raw: memoryview, start: int) -> int:
        """How many tokens from the front are those of `tokens` from `start` on. `raw`: the bytes of `tokens`."""
        length = min(len(self), len(tokens) - start)
        if length == len(self) and self._raw == raw[start * _ITEM : (start + length) * _ITEM]:
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
