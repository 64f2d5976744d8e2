"""The prefix cache of models with sliding windows beside full attention.

A prefix is usable where the last `sliding_window_size` tokens have their window slots, or all from the root on have. So
window slots are given up before full ones: a node without them is a tombstone, which a match may pass and not end in.
A request gives up its own as it decodes (`swa_evicted_seqlen`), and they come back where another request, which has
computed the same tokens, offers its own.

May import what `request_cache` may.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.errors import ConfigError
from hicache.tree.base import Inserted
from hicache.tree.components import Rules, SwaRules
from hicache.tree.node import Component, Place, TreeNode
from hicache.tree.params import CacheInitParams, InsertParams, InsertResult
from hicache.tree.request_cache import BasePrefixCache
from hicache.tree.views import WindowAllocator


class SWARadixCache(BasePrefixCache):
    """Prefixes, their full slots, and for some of them window slots, which the allocator finds through the full ones.

    Sizes are in tokens: `full_*` of full slots, `swa_*` of window slots. A lock covers the window's side of as many
    nodes as the last `sliding_window_size` tokens lie in.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """ConfigError without a window, or with an allocator that does not pair slots."""
        window, allocator = params.sliding_window_size, params.token_to_kv_pool_allocator
        if window is None or window < 1:
            raise ConfigError(f"sliding_window_size={window}; give the window of the model, in tokens")
        if allocator is not None and not isinstance(allocator, WindowAllocator):
            raise ConfigError(f"{type(allocator).__name__} has no window slots; use SWATokenToKVPoolAllocator")
        self.sliding_window_size = window
        self._window = SwaRules(window, params.page_size)
        super().__init__(params)

    def insert(self, params: InsertParams) -> InsertResult:
        """As the base's, and what was offered for tokens from `prev_prefix_len` on that were held before is freed.

        Tokens from `swa_evicted_seqlen` on are offered with window slots, which tombstones take over.
        """
        if self.disable:
            return InsertResult(0)
        tokens, namespace = self._packed(params.key)
        known_len = self._whole_pages(min(params.prev_prefix_len, len(tokens)))
        # What the caller has from a match it offers back to its owner, tombstones without windows among it.
        known_len = min(known_len, self._tree.match(tokens[:known_len], namespace).device_len)
        inserted, offered = self._insert(params, known_len)
        self._give_back(inserted, offered, known_len)
        return InsertResult(known_len + sum(duplicate.end - duplicate.start for duplicate in inserted.duplicates))

    def inc_lock_ref(self, node: TreeNode) -> int | None:
        """Keep the prefix that ends with `node`. What is returned may be handed to `dec_lock_ref`, and need not."""
        super().inc_lock_ref(node)
        return None if self.disable or node.is_root else node.id

    def swa_evictable_size(self) -> int:
        return self._tree.evictable(Place.SWA_DEVICE)

    def swa_protected_size(self) -> int:
        return self._tree.protected(Place.SWA_DEVICE)

    def total_size(self) -> tuple[int, int]:
        """Tokens held, and tokens with window slots."""
        return self._held(Component.FULL), self._held(Component.SWA)

    def supports_swa(self) -> bool:
        return True

    def available_and_evictable_str(self) -> str:
        return f"{super().available_and_evictable_str()} (window {self.swa_evictable_size()})"

    def _rules(self) -> Sequence[Rules]:
        # A new tree: the old one's locks are not its own.
        self._window = SwaRules(self.sliding_window_size, self.page_size)
        return (self._window,)

    def _window_from(self, swa_evicted_seqlen: int, start: int, end: int) -> int | None:
        # A page lost its window slots with the first of its tokens that did.
        lost = -(-swa_evicted_seqlen // self.page_size) * self.page_size
        return min(max(lost, start), end) - start

    def _give_back(self, inserted: Inserted, offered: torch.Tensor, first_position: int) -> None:
        for duplicate in inserted.duplicates:
            if duplicate.adopts_window:
                self._slots.move_window(offered[duplicate.start : duplicate.end], duplicate.value)
        super()._give_back(inserted, offered, first_position)

    def _drop(self, victim: TreeNode, place: Place) -> None:
        # Of a node longer than the window, the front is of no use to a match at its end.
        spare = self._window.spare_tokens(victim) if place is Place.SWA_DEVICE else 0
        super()._drop(self._tree.cut_head(victim, spare) if spare else victim, place)

    def _own_violations(self) -> list[str]:
        return self._slots.window_violations(self._tree)

    def _totals(self) -> str:
        full, swa = self.total_size()
        return f"#full_tokens: {full}, #swa_tokens: {swa}"
