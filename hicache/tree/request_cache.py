"""What the public prefix caches share: matching and inserting by value objects, and requests that are cached as they
grow.

    [0, depth of last_node)                the tree's; the request holds a lock there
    [depth of last_node, kv_committed_len) the request's, until it is handed over or freed

The tree returns what becomes free; here it goes back to the allocator. Owns the tree. May import numpy, torch, errors
and the rest of its package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hicache.errors import ConfigError, InvariantError, ShapeError
from hicache.tree.base import Inserted, Match
from hicache.tree.components import Rules
from hicache.tree.core import RadixTree
from hicache.tree.events import EventLog, KVCacheEvent
from hicache.tree.key import PageHasher, RadixKey, Tokens, TokenSource, joined_tokens, neighbours, pack_tokens
from hicache.tree.node import Component, Place, Tier, TreeNode
from hicache.tree.params import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hicache.tree.pretty import draw
from hicache.tree.slots import PrefixBuffers, SlotReturn
from hicache.tree.views import CachedRequest, evicted_window_of, priority_of

# Blocks are named for routers, which compare them across processes: by their tokens and nothing else.
_IDENTITY = b""


class BasePrefixCache(ABC):
    """A prefix cache on the device tier. Scheduler thread only; see `hicache.tree.views` for what it asks of others.

    Every exit of a request leaves available + evictable + protected + owned by requests = total.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """ConfigError for an unknown policy or a page below one token."""
        if params.page_size < 1:
            raise ConfigError(f"page_size={params.page_size} holds no token; raise it to at least 1")
        self._params = params
        self.disable, self.page_size, self.is_eagle = params.disable, params.page_size, params.is_eagle
        # Typed by `views` where they are used: callers hand them on as what they are.
        self.req_to_token_pool: Any = params.req_to_token_pool
        self.token_to_kv_pool_allocator: Any = params.token_to_kv_pool_allocator
        self.eviction_policy = params.eviction_policy.lower()
        self.enable_kv_cache_events = params.enable_kv_cache_events
        allocator = self.token_to_kv_pool_allocator
        self.device: Any = torch.device("cpu") if allocator is None else allocator.device
        self._slots, self._prefixes = SlotReturn(allocator), PrefixBuffers()
        self._events = EventLog() if params.enable_kv_cache_events else None
        self._tree, self._components = self._new_tree()

    @property
    def root_node(self) -> TreeNode:
        return self._tree.root

    def reset(self) -> None:
        """Forget everything. The slots are not freed: whoever resets clears the allocator and the table too."""
        self._prefixes.clear()
        self._tree, self._components = self._new_tree()
        if self._events is not None:
            self._events.cleared()

    # Prefixes

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of whole pages that can be used. It counts as used now; a node may be split."""
        return self._result(self._match(params.key)[1])

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Hold the whole pages of a key; what was held before keeps its slots."""

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so much of each kind, in whole nodes, or all that nobody has locked."""
        if self.disable:
            return EvictResult()
        asked = (params.num_tokens, params.swa_num_tokens, params.mamba_num)
        before = {component: self._held(component) for component in self._components}
        for component, held in before.items():
            place = Place.of(component, Tier.DEVICE)
            while held - self._held(component) < asked[component]:
                victim = self._tree.victim(place)
                if victim is None:
                    break
                self._drop(victim, place)
        gone = [before[c] - self._held(c) if c in before else 0 for c in Component]
        return EvictResult(*gone)

    def inc_lock_ref(self, node: TreeNode) -> int | None:
        """Keep the prefix that ends with `node`. Returns by how many tokens the evictable size grew: 0 or fewer."""
        if self.disable or node.is_root:
            return 0
        self._check_own(node)
        before = self.protected_size()
        self._tree.lock(node, Tier.DEVICE)
        return before - self.protected_size()

    def dec_lock_ref(self, node: TreeNode, swa_uuid_for_lock: int | None = None) -> int | None:
        """Undo one `inc_lock_ref`; the tree itself remembers what the lock covered. Returns as that does."""
        if self.disable or node.is_root:
            return 0
        self._check_own(node)
        before = self.protected_size()
        self._tree.unlock(node, Tier.DEVICE)
        return before - self.protected_size()

    # Requests

    def cache_unfinished_req(self, req: CachedRequest, chunked: bool = False) -> None:
        """Hand what is computed of `req.fill_ids` over to the tree, as far as it is whole pages, and go on behind it.

        Costs in proportion to what is new since the last call. `chunked`: more of the prompt follows.
        """
        num_tokens, known_len = len(req.fill_ids), self._depth(req)
        if not self.disable:
            self._hand_over(req, joined_tokens(req.fill_ids, ()), num_tokens, chunked)
            self._tree.prioritise(req.last_node, priority_of(req))
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        req.prefix_indices = self._prefixes.grown(req, row, known_len, num_tokens)

    def cache_finished_req(self, req: CachedRequest, is_insert: bool = True) -> None:
        """The request ends: its whole pages go to the tree, with `is_insert`, the rest is freed, and its lock ends.

        The row stays the request's: `release_kv_cache` calls this and frees the row.
        """
        row, num_tokens = req.req_pool_idx, req.kv_committed_len
        assert row is not None, "the request has no row"
        if is_insert and not self.disable:
            known = min(num_tokens, len(req.origin_input_ids) + len(req.output_ids))
            self._hand_over_last(req, joined_tokens(req.origin_input_ids, req.output_ids), known)
            self._tree.prioritise(req.last_node, priority_of(req))
        # [start, num_tokens) did not go to the tree: its partial page, what may not be kept, or all.
        start = req.cache_protected_len = self._depth(req)
        self._slots.free(self._row(row, start, max(start, num_tokens)), start)
        self._prefixes.forget(row)
        self._end(req)
        self.dec_lock_ref(req.last_node)

    # Kinds, sizes and texts

    def is_tree_cache(self) -> bool:
        return True

    def is_chunk_cache(self) -> bool:
        """Whether it keeps a request's chunks and shares nothing; none of these does."""
        return False

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        """Tokens of full attention that eviction could free now."""
        return self._tree.evictable(Place.FULL_DEVICE)

    def protected_size(self) -> int:
        """Tokens that locks keep."""
        return self._tree.protected(Place.FULL_DEVICE)

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    @abstractmethod
    def total_size(self) -> int | tuple[int, int]:
        """Tokens held; beside it what the second component holds, where there is one."""

    def all_values_flatten(self) -> torch.Tensor:
        """All slots that the tree holds, int64, in no order."""
        return self._flat(Place.FULL_DEVICE)

    def available_and_evictable_str(self) -> str:
        """What could be allocated now, for messages."""
        return f"{self._slots.available_str()}, {self.evictable_size()} evictable"

    def pretty_print(self) -> str:
        """Prints the tree, and returns what it printed."""
        text = f"{draw(self._tree, self._components)}\n{self._totals()}"
        print(text)
        return text

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to blocks since the last call; nothing without `enable_kv_cache_events`."""
        return [] if self._events is None else self._events.take()

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

    # What differs

    def _rules(self) -> Sequence[Rules]:
        """New rules of the components beside FULL."""
        return ()

    def _hand_over(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Give the first `num_tokens` tokens of a request that goes on to the tree."""
        self._advance(req, tokens, num_tokens, chunked)

    def _hand_over_last(self, req: CachedRequest, tokens: TokenSource, num_tokens: int) -> None:
        """The same of a request that ends."""
        self._advance(req, tokens, num_tokens, chunked=False)

    def _end(self, req: CachedRequest) -> None:  # noqa: B027  (most hold nothing else)
        """Free what else an ending request holds."""

    def _window_from(self, swa_evicted_seqlen: int, start: int, end: int) -> int | None:
        """From where in [start, end), relative to `start`, slots have window slots; None in a tree without windows."""
        return None

    def _give_back(self, inserted: Inserted, offered: torch.Tensor, first_position: int) -> None:
        """Free what was offered for tokens that the tree had already."""
        self._slots.free(offered[: _held_before(inserted)], first_position)

    def _drop(self, victim: TreeNode, place: Place) -> None:
        self._slots.take(self._tree.drop(victim, place))

    def _own_violations(self) -> list[str]:
        return []

    @abstractmethod
    def _totals(self) -> str:
        """The last line of `pretty_print`."""

    # Inside

    def _new_tree(self) -> tuple[RadixTree, tuple[Component, ...]]:
        rules = self._rules()
        hasher = PageHasher(_IDENTITY, self.page_size)
        tree = RadixTree(self.page_size, hasher, rules, self.eviction_policy, self._events)
        return tree, (Component.FULL, *(rule.component for rule in rules))

    def _check_own(self, node: TreeNode) -> None:
        *_, top = node.path()
        if top.parent is not self._tree.root:
            raise InvariantError(type(self).__name__, [f"{node} belongs to a tree that was reset, or to another cache"])

    def _held(self, component: Component) -> int:
        book = self._tree.book(Place.of(component, Tier.DEVICE))
        return book.evictable + book.protected

    def _flat(self, place: Place) -> torch.Tensor:
        values = self._tree.values(place)
        return torch.cat(values) if values else torch.empty(0, dtype=torch.int64, device=self.device)

    def _match(self, key: RadixKey) -> tuple[Match, TreeNode]:
        """All that is held of a key, and the node where the usable part of it ends."""
        tokens, namespace = self._packed(key)
        match = self._tree.match(tokens[:0] if self.disable else tokens, namespace)
        node = self._tree.node_at(match, self._tree.usable_len(match, match.device_len, on_host=False))
        self._note_use(node)
        return match, node

    def _result(self, node: TreeNode) -> MatchResult:
        slots = [at.held(Place.FULL_DEVICE) for at in node.path()]
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return MatchResult(torch.cat(slots[::-1]) if slots else none, node, node)

    def _insert(self, params: InsertParams, skip: int = 0) -> tuple[Inserted, torch.Tensor]:
        """Insert behind the first `skip` tokens, which are held. Also returns what was offered behind them."""
        tokens, namespace = self._packed(params.key)
        tokens = tokens[: self._whole_pages(len(tokens))]
        offered = self._offered(params, len(tokens))[skip:]
        parent = self._tree.node_at(self._tree.match(tokens[:skip], namespace), skip)
        window_from = self._window_from(params.swa_evicted_seqlen, skip, len(tokens))
        inserted = self._tree.insert(parent, tokens[skip:], offered, Tier.DEVICE, namespace, window_from)
        self._mark(self._tree.root, inserted, params.priority, params.chunked)
        self._tree.touch(inserted.node, Tier.DEVICE)
        return inserted, offered

    def _offered(self, params: InsertParams, num_tokens: int) -> torch.Tensor:
        value = params.value
        if value is None:
            packed = params.key.packed()
            value = torch.tensor(packed >> 32 if params.key.is_bigram else packed)
        if value.numel() < num_tokens:
            raise ShapeError(f"{value.numel()} slots for a key of {num_tokens} tokens; give one a token")
        return value[:num_tokens].to(device=self.device, dtype=torch.int64)

    def _packed(self, key: RadixKey) -> tuple[Tokens, str]:
        """A key's tokens, or pairs of them in a cache of bigrams, and its namespace."""
        if self.is_eagle and not key.is_bigram:
            return neighbours(pack_tokens(key.token_ids)), self._namespace(key.extra_key)
        return key.packed(), key.namespace

    def _namespace(self, extra_key: str | None) -> str:
        return RadixKey((), extra_key, self.is_eagle).namespace

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    def _depth(self, req: CachedRequest) -> int:
        """How many of a request's tokens are the tree's."""
        return 0 if self.disable else req.last_node.depth_tokens

    def _row(self, row: int, start: int, end: int) -> torch.Tensor:
        """The slots of tokens [start, end), int64, a copy."""
        slots: torch.Tensor = self.req_to_token_pool.req_to_token[row, start:end].to(torch.int64)
        return slots

    def _advance(self, req: CachedRequest, tokens: TokenSource, num_tokens: int, chunked: bool) -> None:
        """Give the whole pages of the first `num_tokens` tokens to the tree, and move the request's lock behind them.

        The row and `last_node` are up to date then, `prefix_indices` is not.
        """
        old, row = req.last_node, req.req_pool_idx
        assert row is not None, "the request has no row"
        start, end = old.depth_tokens, self._whole_pages(max(0, num_tokens - self.is_eagle))
        if end <= start:
            return
        offered = self._row(row, start, end)
        run = neighbours(tokens(start, end + 1)) if self.is_eagle else tokens(start, end)
        window_from = self._window_from(evicted_window_of(req), start, end)
        inserted = self._tree.insert(old, run, offered, Tier.DEVICE, self._namespace(req.extra_key), window_from)
        self._give_back(inserted, offered, start)
        held = _held_before(inserted)
        if held:
            theirs = torch.cat([duplicate.value for duplicate in inserted.duplicates])
            self.req_to_token_pool.write((row, slice(start, start + held)), theirs)
        self._mark(old, inserted, priority_of(req), chunked)
        if old.is_root:
            self._tree.lock(inserted.node, Tier.DEVICE)
        else:
            self._tree.move_lock(old, inserted.node, Tier.DEVICE)
        req.last_node, req.cache_protected_len = inserted.node, end

    def _note_use(self, node: TreeNode) -> None:
        for at in node.path():
            at.hit_count += 1
        self._tree.touch(node, Tier.DEVICE)

    def _mark(self, above: TreeNode, inserted: Inserted, priority: int, chunked: bool) -> None:
        """Give new nodes their priority, raise that of the path to them, and count the use of nodes below `above` that
        were there."""
        fresh, reached = set(inserted.gained), inserted.node
        for node in inserted.gained:
            node.priority = priority
        if inserted.gained and inserted.gained[0].parent is not None:
            reached = inserted.gained[0].parent
        self._tree.prioritise(reached, priority)
        for node in inserted.node.path():
            if node is above:
                break
            node.hit_count += node not in fresh and not chunked


def _held_before(inserted: Inserted) -> int:
    """Tokens from the start of an insertion that were held already. On one tier what is new lies below what is old."""
    return inserted.duplicates[-1].end if inserted.duplicates else 0
