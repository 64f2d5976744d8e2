"""What the tests of RadixCache share."""

from __future__ import annotations

from typing import Any

from hicache import (
    InsertParams,
    RadixCache,
    RadixKey,
)


def insert(cache: RadixCache, tokens: list[int], extra_key: str | None = None, **more: Any) -> int:
    return cache.insert(InsertParams(RadixKey(tokens, extra_key), **more)).prefix_len
