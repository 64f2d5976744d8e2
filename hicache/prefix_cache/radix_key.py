"""`RadixKey`, the key of a prefix in the prefix caches, and its conversion to the tokens and namespace of a tree.

The elements of every tree are int64. In a tree of bigrams an element is a pair of tokens, packed as (first << 32) |
second. The ids of bigrams must be from 0 to 2^31 - 1, because with other ids two different pairs could have equal
elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hicache.errors import InvalidTokens
from hicache.pages.events import BlockStored, KVCacheEvent, PageChange, PagesStored
from hicache.pages.key import Tokens, as_array, as_int64, new_tokens, pack_tokens

TokenSource = Callable[[int, int], Tokens]  # returns tokens [start, end) of a sequence, packed

_BIGRAM_ID_BITS = 31
_BIGRAM, _ESCAPE = "\x01", "\x00"


class RadixKey:
    """The token ids and the `extra_key` of a prefix. Immutable.

    `token_ids`: a sequence of ids, or of pairs with `is_bigram`. A cache packs the ids at the first use of the key; an
    int64 array is not copied. Indexing or slicing a key returns a key of the same kind with the same `extra_key`, which
    shares the packed memory. Keys with different extra keys never match.
    """

    __slots__ = ("_bigrams", "_ids", "_packed", "extra_key", "is_bigram")

    def __init__(self, token_ids: Sequence[Any], extra_key: str | None = None, is_bigram: bool = False) -> None:
        self.extra_key = extra_key
        self.is_bigram = is_bigram
        self._ids: Any = token_ids
        self._packed: Tokens | None = None
        self._bigrams: RadixKey | None = None

    @classmethod
    def of_packed(cls, tokens: Tokens, extra_key: str | None, is_bigram: bool) -> RadixKey:
        """Build a key from packed tokens. The first use of `token_ids` unpacks these tokens."""
        key = cls(None, extra_key, is_bigram)  # type: ignore[arg-type]
        key._packed = tokens
        return key

    @property
    def token_ids(self) -> Any:
        """The ids as the caller gave them. If the key was built from packed tokens, for example by slicing, the ids are
        a list."""
        if self._ids is None:
            ids = self.packed().tolist()
            self._ids = _pairs(ids) if self.is_bigram else ids
        return self._ids

    def __len__(self) -> int:
        return len(self._ids if self._packed is None else self._packed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.token_ids)

    def __getitem__(self, at: int | slice) -> RadixKey:
        """Return the key of the id or pair at an index, or of a slice."""
        packed = self.packed()[at] if isinstance(at, slice) else self.packed()[at : at + 1 or None]
        if not isinstance(at, slice) and not len(packed):
            raise IndexError(f"a key of {len(self)} tokens has no index {at}")
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
        """The namespace of the key, see `namespace_of`."""
        return namespace_of(self.extra_key, self.is_bigram)

    def packed(self) -> Tokens:
        """Return the ids as int64 `[len]`; pairs are packed by `pack_bigrams`. Raises InvalidTokens if ids cannot be
        packed."""
        if self._packed is None:
            self._packed = _pack_pairs(self._ids) if self.is_bigram and len(self._ids) else pack_tokens(self._ids)
        return self._packed

    def as_bigrams(self) -> RadixKey:
        """Return the key of the pairs of adjacent tokens; it has one pair fewer than tokens. A key of pairs returns
        itself."""
        if self.is_bigram:
            return self
        if self._bigrams is None:
            self._bigrams = RadixKey.of_packed(neighbours(self.packed()), self.extra_key, is_bigram=True)
        return self._bigrams


def namespace_of(extra_key: str | None, is_bigram: bool = False) -> str:
    """Return the namespace of an extra key, which also depends on `is_bigram`.

    Different extra keys have different namespaces. The namespace of an extra key of plain text is that text."""
    text = extra_key or ""
    if extra_key is not None and (not text or text[0] in (_ESCAPE, _BIGRAM)):
        text = _ESCAPE + text
    return _BIGRAM + text if is_bigram else text


def _pairs(ids: list[int]) -> list[Any]:
    return [(pair >> 32, pair & 0xFFFFFFFF) for pair in ids]


def _pack_pairs(pairs: Sequence[Any]) -> Tokens:
    ids = as_array(pairs)
    if ids.ndim != 2 or ids.shape[1] != 2:
        raise InvalidTokens(f"a key of bigrams has the shape {list(ids.shape)}; give pairs of token ids")
    ids = as_int64(ids)
    return pack_bigrams(ids[:, 0], ids[:, 1])


def key_of(tokens: Tokens, namespace: str) -> RadixKey:
    """Return the key of packed `tokens` and a namespace: the inverse of `packed` and `namespace`."""
    is_bigram = namespace.startswith(_BIGRAM)
    text = namespace[len(_BIGRAM) :] if is_bigram else namespace
    extra = None if not text else text[len(_ESCAPE) :] if text.startswith(_ESCAPE) else text
    return RadixKey.of_packed(tokens, extra, is_bigram)


def block_events(change: PageChange) -> Iterator[KVCacheEvent]:
    """Yield the events of a change, one event for each block. Events of a tree of bigrams have pairs as token ids."""
    for event in change.blocks(1):
        if isinstance(change, PagesStored) and isinstance(event, BlockStored) and change.namespace.startswith(_BIGRAM):
            yield dataclasses.replace(event, token_ids=_pairs(event.token_ids))
        else:
            yield event


def pack_bigrams(first: Tokens, second: Tokens) -> Tokens:
    """Pack pairs of ids, element by element, as (first << 32) | second.

    Raises InvalidTokens for ids outside [0, 2^31), because two different pairs could be packed to the same number.
    """
    # All ids are in range if and only if the bitwise OR of all ids has no bit above the lowest 31.
    if (np.bitwise_or.reduce(first) | np.bitwise_or.reduce(second)) >> _BIGRAM_ID_BITS:
        ids = np.concatenate((first, second))
        raise InvalidTokens(
            f"a key of bigrams has ids from {ids.min()} to {ids.max()}; give ids from 0 to {(1 << _BIGRAM_ID_BITS) - 1}"
        )
    pairs = new_tokens(len(first))
    np.left_shift(first, 32, out=pairs)
    np.bitwise_or(pairs, second, out=pairs)
    pairs.setflags(write=False)
    return pairs


def neighbours(tokens: Tokens) -> Tokens:
    """Return all pairs of adjacent tokens, packed by `pack_bigrams`, int64 `[tokens - 1]`."""
    return pack_bigrams(tokens[:-1], tokens[1:])


def joined_tokens(first: Sequence[int], second: Sequence[int]) -> TokenSource:
    """Return a function that packs tokens [start, end) of `first + second` and only reads these tokens."""

    def run(start: int, end: int) -> Tokens:
        split = len(first)
        if end <= split:
            return pack_tokens(first[start:end])
        tail = pack_tokens(second[max(0, start - split) : end - split])
        return np.concatenate((pack_tokens(first[start:]), tail)) if start < split else tail

    return run
