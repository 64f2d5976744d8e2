"""The prefix cache of models with full attention and sliding windows.

A prefix is usable if its last `sliding_window_size` tokens have window slots. A prefix shorter than that is usable if
all its tokens have window slots. Window slots are evicted before full slots. A node whose window slots were evicted is
a tombstone: a match may pass through a tombstone but not end in it. While a request decodes, it frees the slots of
tokens that leave the window (`swa_evicted_seqlen`). A tombstone gets window slots again from the next request that
computes the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.errors import ConfigError
from hicache.pages.components import SwaComponent, TreeComponent
from hicache.pages.node import TreeNode as Node
from hicache.prefix_cache.base import BasePrefixCache
from hicache.prefix_cache.node import TreeNode
from hicache.prefix_cache.params import CacheInitParams, InsertParams, InsertResult
from hicache.prefix_cache.protocols import CachedRequest
from hicache.tiers import FULL, SWA, Component


class _NodeWindows(SwaComponent):
    """Manages the window slots of complete nodes. A lock covers the same tokens from `lock` to `unlock`, even if nodes
    are split in between."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self._locked_from: dict[Node, list[int]] = {}

    def required_from(self, node: Node, ahead: int = 0) -> int:
        start = super().required_from(node, ahead)
        while node.parent is not None and node.parent.depth_tokens > start:
            node = node.parent
        return node.depth_tokens - node.num_tokens

    def lock_from(self, node: Node, ahead: int) -> int:
        start = self.required_from(node, ahead)
        self._locked_from.setdefault(node, []).append(start)
        return start

    def unlock_from(self, node: Node, ahead: int) -> int:
        starts = self._locked_from[node]
        start = starts.pop()
        if not starts:
            del self._locked_from[node]
        return start


class SWARadixCache(BasePrefixCache):
    """Prefixes with their full slots. Some tokens also have window slots. The allocator maps the full slot of each of
    these tokens to its window slot.

    Sizes are in tokens: `full_*` of full slots, `swa_*` of window slots. A lock covers the window slots of all nodes
    with some of the last `sliding_window_size` tokens.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """Raise ConfigError if `sliding_window_size` is missing or below 1, or if the allocator has no window slots."""
        window, allocator = params.sliding_window_size, params.token_to_kv_pool_allocator
        if window is None or window < 1:
            raise ConfigError(f"sliding_window_size={window} is too small; give the window of the model, in tokens")
        if allocator is not None and not isinstance(allocator, SWATokenToKVPoolAllocator):
            raise ConfigError(f"{type(allocator).__name__} has no window slots; use SWATokenToKVPoolAllocator")
        self.sliding_window_size = window
        super().__init__(params)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the full pages of a key. The offered slots of tokens from `swa_evicted_seqlen` on have window slots.

        If tokens from `prev_prefix_len` on are already in the tree, their offered slots are freed. Tombstones among
        them first take over the window slots of the offered slots.
        """
        if self.disable:
            return InsertResult(0)
        tokens, namespace = self._packed(params.key)
        known_len = self._full_pages_len(min(params.prev_prefix_len, len(tokens)))
        # The caller got the first slots from a match, so their tokens are in the tree. Some may have become tombstones
        # since.
        if known_len:
            known_len = min(known_len, self._tree.match(tokens[:known_len], namespace).full_len)
        inserted, offered = self._insert(params, known_len)
        self._slots.free_replaced(offered, inserted, known_len)
        return InsertResult(known_len + len(inserted.existing))

    def inc_lock_ref(self, node: TreeNode) -> int | None:
        """Lock the prefix that ends with `node`. Returns a value that the caller may pass to `dec_lock_ref`, which
        ignores this value."""
        super().inc_lock_ref(node)
        return None if self.disable or node.is_root else node.id

    def swa_evictable_size(self) -> int:
        return self._tree.evictable(SWA)

    def swa_protected_size(self) -> int:
        return self._tree.protected(SWA)

    def total_size(self) -> tuple[int, int]:
        """Return the number of tokens in the tree, and the number of these tokens that have window slots."""
        return self._size_of(FULL), self._size_of(SWA)

    def supports_swa(self) -> bool:
        return True

    def available_and_evictable_str(self) -> str:
        return f"{super().available_and_evictable_str()} (window {self.swa_evictable_size()})"

    def _new_components(self) -> Sequence[TreeComponent]:
        return (_NodeWindows(self.sliding_window_size),)

    def _window_from(self, swa_evicted_seqlen: int, start: int, end: int) -> int | None:
        # A page whose first token has lost its window slot counts as a page without window slots.
        lost = -(-swa_evicted_seqlen // self.page_size) * self.page_size
        return min(max(lost, start), end) - start

    def _evicted_window(self, req: CachedRequest) -> int:
        return req.swa_evicted_seqlen

    def _part_to_evict(self, victim: Node, component: Component) -> Node:
        # A match at the end of a node longer than the window does not need the window slots at the node's front.
        surplus = self._full_pages_len(max(0, victim.num_tokens - self.sliding_window_size)) if component == SWA else 0
        return self._tree.split(victim, surplus) if surplus else victim

    def _own_violations(self) -> list[str]:
        return self._slots.window_violations(self._tree)

    def _totals(self) -> str:
        full, swa = self.total_size()
        return f"#full_tokens: {full}, #swa_tokens: {swa}"
