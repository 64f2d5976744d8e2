"""The prefix cache of models with full attention only."""

from __future__ import annotations

from typing import Any

from hicache.prefix_cache.base import BasePrefixCache
from hicache.prefix_cache.params import CacheInitParams, InsertParams, InsertResult
from hicache.tiers import FULL


class RadixCache(BasePrefixCache):
    """Prefixes of full pages with their slots. See `BasePrefixCache`."""

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
    ) -> RadixCache:
        """Build a cache without pools. `mock_allocator`: an object with `device` and `free(slots)`, or None."""
        return cls(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=mock_allocator,
                page_size=page_size,
                enable_kv_cache_events=enable_kv_cache_events,
            )
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the full pages of a key. The caller keeps the slots offered for the first `prefix_len` tokens."""
        if self.disable:
            return InsertResult(0)
        inserted, _ = self._insert(params)
        return InsertResult(len(inserted.existing))

    def total_size(self) -> int:
        """Return the number of tokens in the tree."""
        return self._size_of(FULL)

    def _totals(self) -> str:
        return f"#tokens: {self.total_size()}"
