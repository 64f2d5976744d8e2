"""The radix tree: which prefixes the device holds, who needs them, and which is evicted next.

Owns the nodes. It never calls anyone: insertion returns what was already there, dropping returns the slots and states
that became free, and the caller acts on them. One thread, the scheduler's, may use it.

What holds after every call (`check()` proves it):
    every node holds FULL, so what is held forms a prefix of every path;
    a recurrent state is at the end of the tokens that it has consumed;
    for each component, evictable + protected is what is held, and the eviction order contains exactly the unlocked
    holders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.tiers import FULL, SWA, Component, joined, own
from hicache.tree.accounts import Accounts
from hicache.tree.audit import account_violations, structure_violations
from hicache.tree.base import Inserted, Match, Released
from hicache.tree.components import FullComponent, TreeComponent, last_end
from hicache.tree.events import EventLog
from hicache.tree.key import PageHasher, TokenRun, Tokens, bytes_of
from hicache.tree.names import PageNames
from hicache.tree.node import ChildKey, TreeNode

_DEPTH = attrgetter("depth_tokens")
_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class RadixTree(Accounts):
    """See the module. `page_size`: tokens of a tree page. Prefixes never meet across namespaces.

    `components`: those beside FULL. `policy`: the eviction order of every component. With `events`, pages that
    come and go are reported to that log, which costs their keys at once. `is_below`: whether what a leaf lacks of a
    component can be had from a tier below, so that a match may end in it. `goes_below`: what leaves goes there, so that
    a match may go on there behind any leaf.
    """

    def __init__(
        self,
        page_size: int,
        hasher: PageHasher,
        components: Sequence[TreeComponent] = (),
        policy: str = "lru",
        events: EventLog | None = None,
        node_type: type[TreeNode] = TreeNode,
        is_below: Callable[[TreeNode, Component], bool] | None = None,
        goes_below: bool = False,
    ) -> None:
        super().__init__((FullComponent(), *components), policy)
        self.page_size = page_size
        self._names = tuple(component.name for component in self.components)
        self._ends_matches = any(component.ends_matches for component in self.components)
        self._new_node, self._is_below, self._goes_below = node_type, is_below, goes_below
        self.root = self._new_node(run=TokenRun(np.empty(0, np.int64)), components=self._names)
        self.num_nodes = 0
        self.names, self.events = PageNames(hasher), events

    # Looking

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest prefix of `tokens` whose full pages are held. Changes nothing, recency included."""
        nodes: list[TreeNode] = []
        last_len = pos = 0
        raw, page = bytes_of(tokens), self.page_size * tokens.itemsize
        node: TreeNode | None = self.root
        while node is not None and pos < len(tokens):
            first = raw[pos * tokens.itemsize : pos * tokens.itemsize + page].tobytes()
            node = node.children.get(first if pos else (namespace, first))
            if node is None:
                break
            last_len = self._common_len(node, tokens, raw, pos)
            nodes.append(node)
            pos += last_len
            if last_len < node.num_tokens:
                break
        return Match(namespace, tuple(nodes), last_len, pos)

    def usable_len(self, match: Match) -> int:
        """The longest part of a match that all components can use."""

        nodes = match.nodes

        def gap(component: TreeComponent, start: int, end: int) -> int | None:
            """Where the last nodes without a value, of those that tokens [start, end) lie in, begin."""
            name, at = component.name, bisect_left(nodes, end, key=_DEPTH)
            has = nodes[at].has(name) and (nodes[at].depth_tokens == end or not component.at_node_end)
            while has and at and nodes[at - 1].depth_tokens > start:
                at -= 1
                has = nodes[at].has(name)
            if has:
                return None
            while at and not nodes[at - 1].has(name):
                at -= 1
            return nodes[at].depth_tokens - nodes[at].num_tokens

        return last_end(self.components[1:], match.full_len, 0, gap)

    def to_protect(self, component: Component, match: Match, end: int, length: int) -> int:
        """What a lock takes from what is evictable of a component: one at the first `end` tokens of a match, for a
        prefix of `length` tokens."""
        account, size = self.account(component), 0
        start = account.component.first_required(length) // self.page_size * self.page_size
        for node in match.nodes:
            first, last = max(start, node.depth_tokens - node.num_tokens), min(node.depth_tokens, end)
            if first < last and node.has(component) and not node.locks(component):
                at_end = account.component.at_node_end
                size += int(node.depth_tokens <= end) if at_end else last - first
        return size

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def values(self, component: Component) -> list[torch.Tensor]:
        """What every node holds of it: for audits, in no order."""
        return [node.value_of(component) for node in self.nodes() if node.has(component)]

    # Growing

    def node_at(self, match: Match, length: int) -> TreeNode:
        """The node that ends after the first `length` tokens of the match; splits one when it has to."""
        node, pos = self.root, 0
        for below in match.nodes:
            if pos == length:
                break
            take = min(below.num_tokens, length - pos)
            node = below if take == below.num_tokens else self._split(below, take)
            pos += take
        assert pos == length, f"asked for {length} tokens of a match of {pos}"
        return node

    def insert(
        self,
        parent: TreeNode,
        tokens: Tokens,
        value: torch.Tensor,
        namespace: str = "",
        window_from: int | None = None,
        hit_count: int = 1,
        donated: Mapping[Component, torch.Tensor] | None = None,
    ) -> Inserted:
        """Hold whole pages `tokens`, which follow `parent`, as slots `value`, which are copied. `hit_count`: requests
        that used them. Locks are the caller's.

        Stops where a load is in flight, for that may fail (`Inserted.accepted_len`). `window_from`: tokens from there
        on have window slots mapped to their slots; a split is made there. `donated`: values of components that belong
        to the end of `tokens`, like a recurrent state, see `attach`.
        """
        gained, existing, adopted = list[TreeNode](), list[torch.Tensor](), list[tuple[int, int]]()
        raw, node, pos, account = bytes_of(tokens), parent, 0, self.account(FULL)
        namespace = namespace if parent.parent is None else parent.namespace
        while pos < len(tokens):
            limit = len(tokens) if window_from is None or pos >= window_from else window_from
            limit = pos + account.like_tokens(namespace, node.depth_tokens, raw[8 * pos : 8 * limit], self.page_size)
            child = self._child(node, tokens, raw, pos, limit, namespace)
            if child.is_loading:
                break
            end = pos + child.num_tokens  # the child is of tokens [pos, end)
            adopts = window_from is not None and pos >= window_from and not child.has(SWA)
            if child.has(FULL):  # what is new lies below it: existing are [0, pos) until then
                existing.append(child.value_of(FULL))
            else:
                child.hit_count = max(hit_count, child.hit_count)
                self._enter(child, FULL, own(value if not pos and end == len(tokens) else value[pos:end]))
                if self.events is not None:
                    self.events.stored(self.names.pages(child), "GPU")
                gained.append(child)
            if adopts:
                self._enter(child, SWA, child.value_of(FULL))
                adopted += [] if gained else [(pos, end)]
            node, pos = child, end
        offered = donated.items() if donated is not None and pos == len(tokens) else ()
        attached = frozenset(name for name, given in offered if self.attach(node, name, given))
        return Inserted(node, tuple(gained), joined(existing or [_NO_SLOTS]), tuple(adopted), pos, attached)

    def withdraw(self, inserted: Inserted) -> None:
        """Undo an insertion: what it gave is the caller's again. Only before anybody has locked it. Splits stay."""
        for component in inserted.attached:
            self.detach(inserted.node, component)
        start, num_existing = inserted.node.depth_tokens - inserted.accepted_len, len(inserted.existing)
        for node in inserted.node.path():
            end = node.depth_tokens - start
            if end <= 0:
                break
            if end > num_existing:
                self._remove(node, [])
            elif any(first < end <= last for first, last in inserted.adopted):
                self.detach(node, SWA)

    def attach(self, node: TreeNode, component: Component, value: torch.Tensor) -> bool:
        """Give `node` what it may lack of a component; False where it has it, and `value` stays the caller's.

        A state has consumed exactly the tokens up to the end of `node`. Of windows `value` is not kept: the full slots
        of the node are, whose window slots are mapped.
        """
        if node.has(component):
            return False
        shares = self.account(component).component.shares_full_slots
        self._enter(node, component, node.value_of(FULL) if shares else own(value.reshape(-1)))
        return True

    def fail_load(self, node: TreeNode) -> torch.Tensor:
        """The copy to a leaf failed: it leaves the tree, whoever has locked it, and its slots come back (windows and
        all). Locks on it are undone as ever, for it keeps its parent."""
        assert not node.children, "what depends on a load leaves before it does"
        released: list[Released] = []
        self._remove(node, released)
        return next(gone.value for gone in released if gone.component == FULL)

    def split_suffix(self, node: TreeNode, num_kept: int) -> TreeNode:
        """Split `node` after its first `num_kept` tokens; returns the part after them."""
        self._split(node, num_kept)
        return node

    def split_prefix(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Split `node` after its first `num_tokens` tokens; returns those."""
        return self._split(node, num_tokens)

    # Locks and eviction

    def victim(self, component: Component, num_tokens: int | None = None) -> TreeNode | None:
        """The node that should lose `component` next, if any may.

        With `num_tokens`, split down to its last pages where fewer than all are needed: the front of a long prefix
        outlives its end. It is not split where that would help nobody: a value at its end cannot be divided, and where
        matches end at values only, the front could end none, nor be continued.
        """
        account = self.account(component)
        holding = account.order.victim()
        node = None if holding is None else holding.owner
        is_whole = account.component.at_node_end or (self._ends_matches and not self._goes_below)
        if node is None or num_tokens is None or is_whole:
            return node
        num_evicted = -(-num_tokens // self.page_size) * self.page_size
        while node.num_tokens > 2 * num_evicted:  # a split costs the length of both parts: in halves a page costs few
            self.split_suffix(node, node.num_tokens // 2 // self.page_size * self.page_size)
        return node if node.num_tokens <= num_evicted else self.split_suffix(node, node.num_tokens - num_evicted)

    def drop(self, node: TreeNode, component: Component) -> list[Released]:
        """Take what nobody has locked from `node`; returns all that left the tree, to be freed.

        With FULL goes the node, which is a leaf. A leaf that no match can end in any more is removed, and so is its
        parent where the same holds then.
        """
        assert not node.locks(component), "dropped what is locked"
        released: list[Released] = []
        if component == FULL:
            assert not node.children, "dropped a node with a child"
            parent = node.parent
            self._remove(node, released)
            self._prune(parent, released)
        else:
            released.append(self.detach(node, component))
            self._prune(node, released)
        return released

    def check(self) -> None:
        """Raise `InvariantError` with every violation of the rules above."""
        found = structure_violations(self.root, self.components, self.page_size, self.num_nodes)
        nodes = self.nodes()
        for account in self._accounts:
            found.extend(account_violations(account, [node for node in nodes if node.has(account.name)]))
        if found:
            raise InvariantError("tree", found)

    # Inside

    def _child(self, node: TreeNode, tokens: Tokens, raw: memoryview, pos: int, limit: int, namespace: str) -> TreeNode:
        """The child of `node` that tokens[pos:] go on in, found, split off or made, to at most `limit`."""
        child_key = self._child_key(node, raw, pos, namespace)
        child = node.children.get(child_key)
        if child is None:
            run = TokenRun(tokens[pos:limit])
            child = self._new_node(run=run, parent=node, namespace=namespace, components=self._names)
            self._link(node, child, child_key)
            self.num_nodes += 1
            return child
        common = min(self._common_len(child, tokens, raw, pos), limit - pos)
        return child if common == child.num_tokens else self._split(child, common)

    def _child_key(self, parent: TreeNode, raw: memoryview, pos: int, namespace: str) -> ChildKey:
        first = raw[pos * 8 : (pos + self.page_size) * 8].tobytes()
        return (namespace, first) if parent.parent is None else first

    @staticmethod
    def _link(parent: TreeNode, child: TreeNode, child_key: ChildKey) -> None:
        parent.children[child_key] = child
        child.parent, child.child_key = parent, child_key

    def _common_len(self, node: TreeNode, tokens: Tokens, raw: memoryview, pos: int) -> int:
        """Equal tokens of the node and of `tokens[pos:]`, in whole pages."""
        assert node.run is not None
        length = node.run.common_len(tokens, raw, pos)
        return length - length % self.page_size

    def _split(self, lower: TreeNode, at: int) -> TreeNode:
        """Cut `lower` after its first `at` tokens; returns the new node above it.

        [0, at) goes to the upper node, [at, end) stays: whoever refers to the node by its end still does.
        """
        assert lower.run is not None and lower.parent is not None
        tokens, parent = lower.run.tokens, lower.parent
        run = TokenRun(tokens[:at])
        upper = self._new_node(run=run, parent=parent, namespace=lower.namespace, components=self._names)
        self._link(parent, upper, lower.child_key)
        upper.hit_count, upper.priority = lower.hit_count, lower.priority
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        cut_pages = at // self.page_size
        if lower.page_keys is not None:
            upper.page_keys, lower.page_keys = lower.page_keys[:cut_pages], lower.page_keys[cut_pages:]
        lower.run, lower.num_tokens = TokenRun(tokens[at:]), lower.num_tokens - at
        self._link(upper, lower, self._child_key(upper, bytes_of(tokens), at, lower.namespace))
        self._divide(upper, lower)
        self.num_nodes += 1
        return upper

    def _remove(self, node: TreeNode, released: list[Released]) -> None:
        """Take a leaf out of the tree with all that it holds, the full slots last."""
        parent = node.parent
        assert parent is not None and not node.children
        for name in reversed(self._names):
            if node.has(name):
                if self.events is not None and name == FULL:
                    self.events.removed(self.names.of(node), "GPU")
                released.append(self.detach(node, name))
        del parent.children[node.child_key]
        self.num_nodes -= 1
        if parent.parent is not None and not parent.children:
            self.account(FULL).order.update(parent.full)

    def _is_dead(self, component: TreeComponent, leaf: TreeNode) -> bool:
        """Whether no match can end in `leaf`, or go on."""
        if self._goes_below or not component.is_dead(leaf):
            return False
        return self._is_below is None or not self._is_below(leaf, component.name)

    def _prune(self, node: TreeNode | None, released: list[Released]) -> None:
        """Remove `node` where it is an unlocked leaf that no match can end in; then its parents."""
        while node is not None and node.parent is not None and not node.children:
            if node.is_locked or not any(self._is_dead(component, node) for component in self.components[1:]):
                break
            parent = node.parent
            self._remove(node, released)
            node = parent
