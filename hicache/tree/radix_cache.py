"""The prefix cache of models with full attention only.

May import what `request_cache` may.
"""

from __future__ import annotations

from typing import Any

from hicache.tree.node import Component
from hicache.tree.params import CacheInitParams, InsertParams, InsertResult
from hicache.tree.request_cache import BasePrefixCache


class RadixCache(BasePrefixCache):
    """Prefixes of token pages and their slots. See the base."""

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
    ) -> RadixCache:
        """A cache without pools. `mock_allocator`: anything with a `device` and `free(slots)`, or None."""
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
        """As the base's. Of what was offered for `prefix_len` tokens the caller stays the owner."""
        if self.disable:
            return InsertResult(0)
        inserted, _ = self._insert(params)
        return InsertResult(sum(duplicate.end - duplicate.start for duplicate in inserted.duplicates))

    def total_size(self) -> int:
        """Tokens held."""
        return self._held(Component.FULL)

    def _totals(self) -> str:
        return f"#tokens: {self.total_size()}"
