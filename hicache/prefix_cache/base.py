"""The common part of the prefix caches: matching, insertion, eviction, and caching of running requests after each step.

Tokens [0, depth of last_node) of a request are in the tree and locked; [depth of last_node, kv_committed_len) belong to
the request until it inserts them into the tree or frees them. The tree returns the slots that it releases, and this
module frees these slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from hicache.errors import ConfigError, InvariantError, ShapeError
from hicache.pages.components import TreeComponent
from hicache.pages.events import EventLog, KVCacheEvent
from hicache.pages.key import PageHasher, Tokens
from hicache.pages.node import Inserted, Match, Released
from hicache.pages.node import TreeNode as Node
from hicache.pages.tree import RadixTree
from hicache.prefix_cache.node import TreeNode
from hicache.prefix_cache.params import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hicache.prefix_cache.protocols import CachedRequest, priority_of
from hicache.prefix_cache.radix_key import RadixKey, TokenSource, block_events, joined_tokens, namespace_of, neighbours
from hicache.prefix_cache.slots import AllocatorAdapter, PrefixBuffers, TableRows
from hicache.tiers import FULL, MAMBA, SWA, Component

# The identity is empty, so that blocks with equal tokens have equal keys in all processes.
_IDENTITY = b""
_SHOWN_TOKENS = 10  # maximum tokens of a node that are shown in a text


class BasePrefixCache(ABC):
    """A prefix cache on the device tier. Only the scheduler's thread uses a cache. `hicache.prefix_cache.protocols`
    describes the requests.

    Invariant, also after a request has ended: free slots + evictable + locked + owned by requests = total number of
    slots.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """Raise ConfigError for an unknown eviction policy, or for a page size below one token."""
        if params.page_size < 1:
            raise ConfigError(f"page_size={params.page_size} is too small; raise it to at least 1")
        self.disable = params.disable
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self.req_to_token_pool: Any = params.req_to_token_pool
        self.token_to_kv_pool_allocator: Any = params.token_to_kv_pool_allocator
        self.eviction_policy = params.eviction_policy.lower()
        self.enable_kv_cache_events = params.enable_kv_cache_events
        allocator = self.token_to_kv_pool_allocator
        self.device: Any = torch.device("cpu") if allocator is None else allocator.device
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.device)
        self._slots = AllocatorAdapter(allocator)
        self._rows = TableRows(params.req_to_token_pool)
        self._prefixes = PrefixBuffers(self._rows)
        self._events = EventLog() if params.enable_kv_cache_events else None
        self._tree = self._new_tree()

    @property
    def root_node(self) -> TreeNode:
        return cast(TreeNode, self._tree.root)

    def reset(self) -> None:
        """Remove all nodes. Slots are not freed: the caller also clears the allocator and the request table."""
        self._prefixes.clear()
        self._tree = self._new_tree()
        if self._events is not None:
            self._events.cleared()

    # Prefixes

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest usable prefix of full pages, and count a use of this prefix. A match that ends within a
        node splits the node."""
        return self._result(self._match(params.key)[1])

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the full pages of a key. For tokens that are already in the tree, the tree keeps its slots."""

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict complete nodes until the requested number of tokens or states of each component is freed, or all
        remaining nodes are locked."""
        if self.disable:
            return EvictResult()
        requested = {FULL: params.num_tokens, SWA: params.swa_num_tokens, MAMBA: params.mamba_num}
        before = {component.name: self._size_of(component.name) for component in self._tree.components}
        released: list[Released] = []
        for name, held in before.items():
            self._evict_until(name, held - requested[name], released)
        self._free(released)
        return EvictResult(*[before[name] - self._size_of(name) if name in before else 0 for name in requested])

    def inc_lock_ref(self, node: TreeNode) -> int | None:
        """Lock the prefix that ends with `node`. Returns the change of the evictable size in tokens, 0 or negative."""
        return self._relock(node, self._tree.lock)

    def dec_lock_ref(self, node: TreeNode, swa_uuid_for_lock: int | None = None) -> int | None:
        """Release one lock of `inc_lock_ref`. Returns the change of the evictable size in tokens, 0 or positive."""
        return self._relock(node, self._tree.unlock)

    # Requests

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Insert the full pages of `req.fill_ids`, after their KV was computed. The request continues from the end of
        these pages.

        The cost is proportional to the tokens that are new since the last call. `chunked`: the request has more chunks
        of its prompt to compute.
        """
        num_tokens, known_len = len(req.fill_ids), self._depth(req)
        if not self.disable:
            self._insert_unfinished(req, joined_tokens(req.fill_ids, ()), num_tokens, chunked)
            self._raise_priority(req.last_node, priority_of(req))
        req.prefix_indices = self._prefixes.extended(req, known_len, num_tokens)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """End a request: insert its committed full pages (with `is_insert`), free its other slots, release its lock.

        The row of the request table is not freed: `release_kv_cache` frees it after this call.
        """
        row, num_tokens = req.req_pool_idx, req.kv_committed_len
        assert row is not None, "the request has no row"
        if is_insert and not self.disable:
            known = min(num_tokens, len(req.origin_input_ids) + len(req.output_ids))
            self._insert_finished(req, joined_tokens(req.origin_input_ids, req.output_ids), known)
            self._raise_priority(req.last_node, priority_of(req))
        # Tokens [start, num_tokens) are not in the tree: a partial page, or all tokens without `is_insert`.
        start = req.cache_protected_len = self._depth(req)
        if start < num_tokens:
            self._slots.free(self._rows.slots(row, start, num_tokens), start)
        self._prefixes.remove(row)
        self._free_states_of(req)
        if not self.disable and not req.last_node.is_root:
            self._tree.unlock(req.last_node)

    # Kinds, sizes and texts

    def is_tree_cache(self) -> bool:
        return True

    def is_chunk_cache(self) -> bool:
        """Return False: this cache shares prefixes between requests."""
        return False

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        """Return the number of tokens of full attention that can be evicted now."""
        return self._tree.evictable(FULL)

    def protected_size(self) -> int:
        """Return the number of tokens of full attention that are locked."""
        return self._tree.protected(FULL)

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    @abstractmethod
    def total_size(self) -> int | tuple[int, int]:
        """Return the number of tokens in the tree. A cache with window slots or states returns a pair: the number of
        tokens, and the number of window slots or states."""

    def all_values_flatten(self) -> torch.Tensor:
        """Return all slots in the tree, int64 `[tokens]`, unordered."""
        return self._flat(FULL)

    def available_and_evictable_str(self) -> str:
        """Return a text with the available and evictable sizes, for messages."""
        return f"{self._slots.available_str()}, {self.evictable_size()} evictable"

    def pretty_print(self) -> str:
        """Print the tree and return the printed text."""
        text = f"{draw(self._tree)}\n{self._totals()}"
        print(text)
        return text

    def take_events(self) -> list[KVCacheEvent]:
        """Return the block events since the last call; none without `enable_kv_cache_events`."""
        changes = () if self._events is None else self._events.take_changes()
        return [event for change in changes for event in block_events(change)]

    def sanity_check(self) -> None:
        """Raise InvariantError with all violations in the tree, its accounts, the allocator and the pools."""
        found: list[str] = []
        try:
            self._tree.check()
        except InvariantError as error:
            found.extend(error.violations)
        found.extend(self._slots.violations(self._tree))
        found.extend(self._own_violations())
        if found:
            raise InvariantError(type(self).__name__, found)

    # Methods that subclasses override

    def _new_components(self) -> Sequence[TreeComponent]:
        """Return the components of the tree in addition to FULL."""
        return ()

    def _insert_unfinished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Insert the first `num_tokens` tokens of a request that continues."""
        self._insert_pages(req, tokens, num_tokens, chunked)

    def _insert_finished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int) -> None:
        """Insert the first `num_tokens` tokens of a request that ends."""
        self._insert_pages(req, tokens, num_tokens, chunked=False)

    def _free_states_of(self, req: CachedRequest) -> None:  # noqa: B027  (most have no states)
        """Free the recurrent states of a request that ends."""

    def _window_from(self, swa_evicted_seqlen: int, start: int, end: int) -> int | None:
        """Return the position, relative to `start`, of the first token of [start, end) with a window slot. Returns None
        for a cache without window slots."""
        return None

    def _evicted_window(self, req: CachedRequest) -> int:
        """Return the number of tokens at the start of a request whose window slots were freed."""
        return 0

    def _part_to_evict(self, victim: Node, component: Component) -> Node:
        """Return the node to evict: the victim, or only its front part, after splitting the victim."""
        return victim

    def _free(self, released: list[Released]) -> None:
        """Free the slots and states that the tree released."""
        self._slots.free_released(released)

    def _own_violations(self) -> list[str]:
        return []

    @abstractmethod
    def _totals(self) -> str:
        """Return the last line of `pretty_print`."""

    # Internal methods

    def _new_tree(self) -> RadixTree:
        hasher = PageHasher(_IDENTITY, self.page_size)
        tree = RadixTree(self.page_size, hasher, self._new_components(), self.eviction_policy, self._events, TreeNode)
        cast(TreeNode, tree.root).tree = tree
        return tree

    def _relock(self, node: Node, change: Callable[[Node], None]) -> int:
        if self.disable or node.is_root:
            return 0
        self._check_own(node)
        before = self._tree.protected(FULL)
        change(node)
        return before - self._tree.protected(FULL)

    def _check_own(self, node: Node) -> None:
        root = node
        while root.parent is not None:
            root = root.parent
        if root is not self._tree.root:
            raise InvariantError(type(self).__name__, [f"{node} is of another cache, or of a tree that was reset"])

    def _evict_until(self, component: Component, target: int, released: list[Released]) -> None:
        """Evict nodes until the tree has at most `target` tokens or states of a component, or all remaining nodes are
        locked."""
        tree, pages = self._tree, self._tree.pages[component]
        while pages.total > target and len(rows := pages.take(1)):
            part = self._part_to_evict(tree.node_of(int(rows[0])), component)
            released += tree.evict(pages.held(part.rows), component)

    def _size_of(self, component: Component) -> int:
        return self._tree.pages[component].total

    def _flat(self, component: Component) -> torch.Tensor:
        values = self._tree.values(component)
        return values if len(values) else self._no_slots.clone()

    def _match(self, key: RadixKey) -> tuple[Match, Node]:
        """Match a key and count a use of the match. Returns the complete match, and the node at which the usable part
        of the match ends."""
        tokens, namespace = self._packed(key)
        match = self._tree.match(tokens[:0] if self.disable else tokens, namespace)
        node = self._tree.node_at(match, self._tree.usable_len(match))
        if not node.is_root:
            self._tree.table.hits[self._tree.path_rows(node)] += 1
            self._tree.touch(node)
        return match, node

    def _result(self, node: Node) -> MatchResult:
        end = cast(TreeNode, node)
        if node.is_root:
            return MatchResult(self._no_slots, end, end)
        return MatchResult(self._tree.pages[FULL].value(self._tree.path_rows(node)), end, end)

    def _insert(
        self, params: InsertParams, known_len: int = 0, end_values: Mapping[Component, torch.Tensor] | None = None
    ) -> tuple[Inserted, torch.Tensor]:
        """Insert the full pages of a key after its first `known_len` tokens. These first tokens are already in the
        tree.

        `end_values`: as in `RadixTree.insert`. Returns the tree's result and the offered slots, int64 `[tokens]`."""
        tokens, namespace = self._packed(params.key)
        num_tokens = self._full_pages_len(len(tokens))
        slots = self._offered(params, num_tokens)
        parent, run = self._tree.root, tokens[known_len:num_tokens]
        if known_len:
            parent = self._tree.node_at(self._tree.match(tokens[:known_len], namespace), known_len)
            slots = slots[known_len:]
        window_from = self._window_from(params.swa_evicted_seqlen, known_len, num_tokens)
        inserted = self._tree.insert(parent, run, slots, namespace, window_from, end_values=end_values)
        self._count_use(self._tree.root, inserted, params.priority, params.chunked)
        self._raise_priority(inserted.node, params.priority)
        self._tree.touch(inserted.node)
        return inserted, slots

    def _offered(self, params: InsertParams, num_tokens: int) -> torch.Tensor:
        value = params.value
        if value is None:
            packed = params.key.packed()
            value = torch.tensor(packed >> 32 if params.key.is_bigram else packed)
        if value.numel() != num_tokens:
            if value.numel() < num_tokens:
                raise ShapeError(f"{value.numel()} slots for a key of {num_tokens} tokens; give one per token")
            value = value[:num_tokens]
        return (
            value if value.dtype == torch.int64 and value.device == self.device else value.to(self.device, torch.int64)
        )

    def _packed(self, key: RadixKey) -> tuple[Tokens, str]:
        """Return the tokens of a key (pairs of tokens in a cache of bigrams) and its namespace."""
        key = key.as_bigrams() if self.is_eagle else key
        return key.packed(), key.namespace

    def _full_pages_len(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    def _depth(self, req: CachedRequest) -> int:
        """Return the number of tokens of a request that are in the tree."""
        return 0 if self.disable else req.last_node.depth_tokens

    def _insert_pages(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Insert the full pages of the first `num_tokens` tokens, and move the request's lock to the end of these
        pages.

        If another request inserted the same tokens first, the tree's slots replace the request's slots in its row, and
        the replaced slots are freed. Updates the row and `last_node`, not `prefix_indices`.
        """
        old, row = req.last_node, req.req_pool_idx
        assert row is not None, "the request has no row"
        start, end = old.depth_tokens, self._full_pages_len(max(0, num_tokens - self.is_eagle))
        if end <= start:
            return
        slots = self._rows.slots(row, start, end)
        run = neighbours(tokens(start, end + 1)) if self.is_eagle else tokens(start, end)
        namespace = namespace_of(req.extra_key, self.is_eagle)
        window_from = self._window_from(self._evicted_window(req), start, end)
        inserted = self._tree.insert(old, run, slots, namespace, window_from)
        if num_held := len(inserted.existing):
            self.req_to_token_pool.write((row, slice(start, start + num_held)), inserted.existing)
            self._slots.free_replaced(slots, inserted, start)
        self._count_use(old, inserted, priority_of(req), chunked)
        if old.is_root:
            self._tree.lock(inserted.node)
        else:
            self._tree.move_lock(old, inserted.node)
        req.last_node, req.cache_protected_len = cast(TreeNode, inserted.node), end

    def _count_use(self, above: Node, inserted: Inserted, priority: int, chunked: bool) -> None:
        """Count a use of each page of the inserted key that is below the node `above` and was cached before this
        insert. If `priority` is negative, set the priority of the added pages."""
        rows, gained = self._tree.path_rows(inserted.node, above.depth_tokens), inserted.gained
        if priority < 0:
            self._tree.table.priority[gained] = priority
        if not chunked:
            self._tree.table.hits[rows[: len(rows) - len(gained)]] += 1  # new pages are last in `rows`

    def _raise_priority(self, node: Node, priority: int) -> None:
        if cast(TreeNode, node).priority < priority:  # seldom true, because most requests have the same priority
            self._tree.raise_priority(node, priority)


def draw(tree: RadixTree) -> str:
    """Return one line per node with its id, number of tokens, first tokens and number of locks. Children are below
    their parent, indented."""
    lines: list[str] = []
    stack = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(cast(TreeNode, node)))
        stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    return "\n".join(lines)


def _line(node: TreeNode) -> str:
    key = node.key
    tokens = [] if key is None else list(key[:_SHOWN_TOKENS])
    extra = f" extra_key={key.extra_key!r}" if key is not None and key.extra_key is not None else ""
    parts = [f"[{node.id}] {node.num_tokens} {tokens}{extra} r={node.lock_ref}"]
    if node.tree is not None and SWA in node.tree.pages:
        parts.append(f"sr={node.swa_lock_ref} ts={node.swa_tombstone}")
    if node.tree is not None and MAMBA in node.tree.pages:
        state = node.mamba_value
        parts.append(f"mr={node.mamba_lock_ref} mv={None if state is None else state.tolist()}")
    return " ".join(parts)
