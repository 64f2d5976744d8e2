"""The common part of the prefix caches: value objects in and out, and requests that are cached as they grow.

Of a request's tokens, [0, depth of last_node) are in the tree and locked, and [depth of last_node, kv_committed_len)
belong to the request until they are shared or freed. The tree returns what became free; here it is freed.
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
from hicache.pages.node import TreeNode as Node
from hicache.pages.tree import RadixTree
from hicache.pages.tree_results import Inserted, Match, Released
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

# Blocks are identified across processes by their tokens alone.
_IDENTITY = b""
_SHOWN_TOKENS = 10  # of a node, in a text


class BasePrefixCache(ABC):
    """A prefix cache on the device tier. Scheduler thread only; `protocols` says what it asks of requests.

    Every exit of a request leaves available + evictable + protected + owned by requests = total.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """ConfigError for an unknown policy or a page below one token."""
        if params.page_size < 1:
            raise ConfigError(f"page_size={params.page_size} holds no token; raise it to at least 1")
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
        """Forget everything. Slots are not freed: the caller clears the allocator and the table too."""
        self._prefixes.clear()
        self._tree = self._new_tree()
        if self._events is not None:
            self._events.cleared()

    # Prefixes

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest usable prefix of whole pages, which counts as used now; a node may be split."""
        return self._result(self._match(params.key)[1])

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Hold the whole pages of a key; tokens that the tree held before keep their slots."""

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict whole nodes until at least so much of each kind is free, or nothing unlocked is left."""
        if self.disable:
            return EvictResult()
        asked = {FULL: params.num_tokens, SWA: params.swa_num_tokens, MAMBA: params.mamba_num}
        before = {component.name: self._held(component.name) for component in self._tree.components}
        released: list[Released] = []
        for name, held in before.items():
            self._drop(name, held - asked[name], released)
        self._free(released)
        return EvictResult(*[before[name] - self._held(name) if name in before else 0 for name in asked])

    def inc_lock_ref(self, node: TreeNode) -> int | None:
        """Lock the prefix that ends with `node`. Returns the growth of the evictable size in tokens, 0 or negative."""
        return self._relock(node, self._tree.lock)

    def dec_lock_ref(self, node: TreeNode, swa_uuid_for_lock: int | None = None) -> int | None:
        """Undo one `inc_lock_ref`; the tree itself remembers what the lock covered. Returns as that does."""
        return self._relock(node, self._tree.unlock)

    # Requests

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Share the whole pages of `req.fill_ids`, whose slots are computed; the request continues from there.

        Costs in proportion to what is new since the last call. `chunked`: more of the prompt follows.
        """
        num_tokens, known_len = len(req.fill_ids), self._depth(req)
        if not self.disable:
            self._share_unfinished(req, joined_tokens(req.fill_ids, ()), num_tokens, chunked)
            self._raise_priority(req.last_node, priority_of(req))
        req.prefix_indices = self._prefixes.grown(req, known_len, num_tokens)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """Share the committed whole pages of a request that ends, with `is_insert`; free the rest, and unlock.

        The row stays the request's: `release_kv_cache` calls this and frees the row.
        """
        row, num_tokens = req.req_pool_idx, req.kv_committed_len
        assert row is not None, "the request has no row"
        if is_insert and not self.disable:
            known = min(num_tokens, len(req.origin_input_ids) + len(req.output_ids))
            self._share_finished(req, joined_tokens(req.origin_input_ids, req.output_ids), known)
            self._raise_priority(req.last_node, priority_of(req))
        # [start, num_tokens) is not in the tree: a partial page, or all where nothing may be kept.
        start = req.cache_protected_len = self._depth(req)
        if start < num_tokens:
            self._slots.free(self._rows.slots(row, start, num_tokens), start)
        self._prefixes.forget(row)
        self._free_states_of(req)
        if not self.disable and not req.last_node.is_root:
            self._tree.unlock(req.last_node)

    # Kinds, sizes and texts

    def is_tree_cache(self) -> bool:
        return True

    def is_chunk_cache(self) -> bool:
        """Whether it keeps the chunks of a request and shares nothing: never."""
        return False

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        """Tokens of full attention that can be evicted now."""
        return self._tree.evictable(FULL)

    def protected_size(self) -> int:
        """Tokens of full attention that are locked."""
        return self._tree.protected(FULL)

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    @abstractmethod
    def total_size(self) -> int | tuple[int, int]:
        """Tokens held; with a second component, also what is held of it."""

    def all_values_flatten(self) -> torch.Tensor:
        """All slots that the tree holds, int64, in no order."""
        return self._flat(FULL)

    def available_and_evictable_str(self) -> str:
        """What could be allocated now, for messages."""
        return f"{self._slots.available_str()}, {self.evictable_size()} evictable"

    def pretty_print(self) -> str:
        """Prints the tree, and returns what it printed."""
        text = f"{draw(self._tree)}\n{self._totals()}"
        print(text)
        return text

    def take_events(self) -> list[KVCacheEvent]:
        """Events of blocks since the last call; none without `enable_kv_cache_events`."""
        changes = () if self._events is None else self._events.take_changes()
        return [event for change in changes for event in block_events(change)]

    def sanity_check(self) -> None:
        """Raise InvariantError with every violation: of the tree, of its accounts, and against allocator and pools."""
        found: list[str] = []
        try:
            self._tree.check()
        except InvariantError as error:
            found.extend(error.violations)
        found.extend(self._slots.violations(self._tree))
        found.extend(self._own_violations())
        if found:
            raise InvariantError(type(self).__name__, found)

    # Differs by cache

    def _new_components(self) -> Sequence[TreeComponent]:
        """New components beside FULL."""
        return ()

    def _share_unfinished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Share the first `num_tokens` tokens of a request that continues."""
        self._share(req, tokens, num_tokens, chunked)

    def _share_finished(self, req: CachedRequest, tokens: TokenSource, num_tokens: int) -> None:
        """Share the first `num_tokens` tokens of a request that ends."""
        self._share(req, tokens, num_tokens, chunked=False)

    def _free_states_of(self, req: CachedRequest) -> None:  # noqa: B027  (most have no states)
        """Free the recurrent states that an ending request still has."""

    def _window_from(self, swa_evicted_seqlen: int, start: int, end: int) -> int | None:
        """The first token of [start, end), relative to `start`, with a window slot; None in a tree without windows."""
        return None

    def _evicted_window(self, req: CachedRequest) -> int:
        """Tokens at the front of a request that have no window slots any more."""
        return 0

    def _part_to_evict(self, victim: Node, component: Component) -> Node:
        """The victim, or the front part of it, split off, that is evicted alone."""
        return victim

    def _free(self, released: list[Released]) -> None:
        """Free what left the tree."""
        self._slots.free_released(released)

    def _own_violations(self) -> list[str]:
        return []

    @abstractmethod
    def _totals(self) -> str:
        """The last line of `pretty_print`."""

    # Inside

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
            raise InvariantError(type(self).__name__, [f"{node} belongs to a tree that was reset, or to another cache"])

    def _drop(self, component: Component, target: int, released: list[Released]) -> None:
        """Drop nodes from the tree until it holds at most `target` of a component, or nothing unlocked is left."""
        tree, pages = self._tree, self._tree.pages[component]
        while pages.total > target and len(rows := pages.take(1)):
            part = self._part_to_evict(tree.node_of(int(rows[0])), component)
            released += tree.evict(pages.held(part.rows), component)
            pages.order.put_back(pages.held(rows))

    def _held(self, component: Component) -> int:
        return self._tree.pages[component].total

    def _flat(self, component: Component) -> torch.Tensor:
        values = self._tree.values(component)
        return values if len(values) else self._no_slots.clone()

    def _match(self, key: RadixKey) -> tuple[Match, Node]:
        """All that is held of a key, and the node where the usable part of it ends."""
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
        self, params: InsertParams, known_len: int = 0, donated: Mapping[Component, torch.Tensor] | None = None
    ) -> tuple[Inserted, torch.Tensor]:
        """Insert the whole pages of a key after its first `known_len` tokens, which are held; `donated` as
        `RadixTree.insert`. Returns the slots that were offered, too."""
        tokens, namespace = self._packed(params.key)
        num_tokens = self._whole_pages(len(tokens))
        slots = self._offered(params, num_tokens)
        parent, run = self._tree.root, tokens[known_len:num_tokens]
        if known_len:
            parent = self._tree.node_at(self._tree.match(tokens[:known_len], namespace), known_len)
            slots = slots[known_len:]
        window_from = self._window_from(params.swa_evicted_seqlen, known_len, num_tokens)
        inserted = self._tree.insert(parent, run, slots, namespace, window_from, donated=donated)
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
        """A key's tokens, or pairs of them in a cache of bigrams, and its namespace."""
        key = key.as_bigrams() if self.is_eagle else key
        return key.packed(), key.namespace

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    def _depth(self, req: CachedRequest) -> int:
        """How many of a request's tokens are in the tree."""
        return 0 if self.disable else req.last_node.depth_tokens

    def _share(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Share the whole pages of the first `num_tokens` tokens, and move the request's lock to their end.

        Where another request was first, its slots replace the request's own in the row, and those are freed. The row
        and `last_node` are up to date then; `prefix_indices` is not.
        """
        old, row = req.last_node, req.req_pool_idx
        assert row is not None, "the request has no row"
        start, end = old.depth_tokens, self._whole_pages(max(0, num_tokens - self.is_eagle))
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
        """Count a use of the pages behind `above` that were there before, and give new ones a priority below 0."""
        rows, gained = self._tree.path_rows(inserted.node, above.depth_tokens), inserted.gained
        if priority < 0:
            self._tree.table.priority[gained] = priority
        if not chunked:
            self._tree.table.hits[rows[: len(rows) - len(gained)]] += 1  # new pages are behind old ones

    def _raise_priority(self, node: Node, priority: int) -> None:
        if cast(TreeNode, node).priority < priority:  # seldom: most requests have the same
            self._tree.raise_priority(node, priority)


def draw(tree: RadixTree) -> str:
    """A line a node, children below and right of their parent: id, tokens, the first of them, and what holds them."""
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
