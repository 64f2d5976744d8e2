"""The radix tree: which prefixes are held, by which tier, who needs them, and which goes next.

Owns the nodes. It never calls anyone: insertion returns what was already there, dropping returns the slots, pages and
states that became free, and the caller acts on them. One thread, the scheduler's, may use it.

What holds after every call (`check()` proves it):
    nodes that hold FULL on the device form a prefix of every path, and so do nodes that hold FULL on the host;
    every node holds FULL in at least one tier, and other components only on tiers where it holds FULL;
    a recurrent state stands at the end of the tokens that it has consumed;
    per place, evictable + protected is what is held, and exactly the unlocked holders stand in the eviction order.

May import numpy, torch, errors and the rest of its package.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.tree.audit import account_violations, structure_violations
from hicache.tree.base import Duplicate, Inserted, Match, Released
from hicache.tree.components import FullRules, Rules
from hicache.tree.events import EventLog, Medium
from hicache.tree.key import PageHasher, TokenRun, Tokens, bytes_of
from hicache.tree.ledger import Book, Ledger
from hicache.tree.names import PageNames
from hicache.tree.node import Component, PageState, Place, Tier, TreeNode, own

_MEDIUM: dict[Tier, Medium] = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}


class RadixTree:
    """See the module. `page_size`: tokens of a tree page. Prefixes never meet across namespaces.

    `rules`: components beside FULL. `policy`: the eviction order of every place. With `events`, pages that come and go
    are told to that log, which costs their keys at once.
    """

    def __init__(
        self,
        page_size: int,
        hasher: PageHasher,
        rules: Sequence[Rules] = (),
        policy: str = "lru",
        events: EventLog | None = None,
    ) -> None:
        self.page_size = page_size
        self.root = TreeNode(run=TokenRun(np.empty(0, np.int64)))
        self.num_nodes = 0
        self.names, self._events = PageNames(hasher), events
        self._ledger = Ledger((FullRules(page_size), *rules), policy)

    # Looking

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest prefix of `tokens` whose full pages are held. Changes nothing, recency included."""
        nodes, last_len, device_len, host_len, pos = list[TreeNode](), 0, 0, 0, 0
        raw, page = bytes_of(tokens), self.page_size * tokens.itemsize
        node: TreeNode | None = self.root
        while node is not None and pos < len(tokens):
            first = raw[pos * tokens.itemsize : pos * tokens.itemsize + page].tobytes()
            node = node.children.get(first if pos else (namespace, first))
            if node is None:
                break
            last_len = self._common_len(node, tokens, raw, pos)
            nodes.append(node)
            if node.values[Place.FULL_DEVICE] is not None:
                device_len += last_len
            else:
                host_len += last_len
            pos += last_len
            if last_len < node.num_tokens:
                break
        return Match(namespace, tuple(nodes), last_len, device_len, host_len)

    def usable_len(self, match: Match, limit: int, on_host: bool) -> int:
        """The longest part of the first `limit` tokens of a match that all components can use.

        `on_host`: window pages and states that only the host holds count, for they can be loaded.
        """
        walks, best, pos = [rules.walk() for rules in self._ledger.rules[1:]], 0, 0
        if not walks:
            return min(limit, match.full_len)
        for node in match.nodes:
            length = min(node.num_tokens if node is not match.nodes[-1] else match.last_len, limit - pos)
            if length <= 0:
                break
            pos += length
            ends = [walk.ends_in(node, length, on_host) for walk in walks]  # each has to see every node
            if all(ends):
                best = pos
        return best

    def unlocked_len(self, match: Match, length: int) -> int:
        """How many of the first `length` matched tokens count as evictable on the device until someone locks them."""
        tokens = pos = 0
        for node in match.nodes:
            used = min(node.num_tokens, length - pos)
            if used <= 0:
                break
            if node.holds(Tier.DEVICE) and not node.locks[Tier.DEVICE]:
                tokens += used
            pos += used
        return tokens

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def values(self, place: int) -> list[torch.Tensor]:
        """What every node holds at `place`: for audits, in no order."""
        return [node.held(place) for node in self.nodes() if node.holds(place)]

    def book(self, place: int) -> Book:
        """The account of a place, in tokens, or in states for MAMBA."""
        return self._ledger.books[place]

    def evictable(self, place: int) -> int:
        return self.book(place).evictable

    def protected(self, place: int) -> int:
        return self.book(place).protected

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
        tier: Tier,
        namespace: str = "",
        window_from: int | None = None,
    ) -> Inserted:
        """Hold whole pages `tokens`, which follow `parent`, on `tier` as `value` (slots or pages). `value` is copied.

        Stops where a copy to `tier` is in flight, for that may fail (`Inserted.accepted_len`). `window_from`, on the
        device: tokens from there on have window slots paired with their slots; a split is made there. A recurrent state
        is attached to `Inserted.node` by `attach`.
        """
        gained: list[TreeNode] = []
        duplicates: list[Duplicate] = []
        raw, stride = bytes_of(tokens), 1 if tier is Tier.DEVICE else self.page_size
        node, pos = parent, 0
        namespace = namespace if parent.is_root else parent.namespace
        while pos < len(tokens):
            if tier is Tier.HOST and not (node.is_root or node.holds(Tier.HOST)):
                break
            limit = len(tokens) if window_from is None or pos >= window_from else window_from
            child = self._child(node, tokens, raw, pos, limit, namespace)
            end = pos + child.num_tokens
            windows = window_from is not None and pos >= window_from
            if tier is Tier.DEVICE and any(span.to is Tier.DEVICE for span in child.spans):
                break
            if child.holds(tier):
                adopts = windows and not child.holds(Place.SWA_DEVICE)
                duplicates.append(Duplicate(pos, end, child.held(tier), adopts))
                if adopts:
                    self._ledger.gain(child, Place.SWA_DEVICE, own(child.held(tier)))
            elif tier is Tier.HOST and child.state is PageState.BACKING_UP:
                break
            else:
                child.hit_count = max(1, child.hit_count)
                self._gain(child, Place.of(Component.FULL, tier), own(value[pos // stride : end // stride]))
                if windows:
                    self._ledger.gain(child, Place.SWA_DEVICE, child.held(tier))
                gained.append(child)
            node, pos = child, end
        return Inserted(node, tuple(gained), tuple(duplicates), pos)

    def attach(self, node: TreeNode, place: Place, value: torch.Tensor) -> bool:
        """Give `node` window slots or a state that it may lack; False where it has them, and `value` stays the
        caller's.

        A state has consumed exactly the tokens up to the end of `node`.
        """
        assert node.holds(place.tier), "no component is held where FULL is not"
        if node.holds(place):
            return False
        self._ledger.gain(node, place, own(value.reshape(-1)))
        return True

    def detach(self, node: TreeNode, place: Place) -> Released:
        """Undo `attach`, whoever needs the node: what should have come there did not."""
        return Released(place, self._ledger.lose(node, place), node.num_tokens)

    def cut_tail(self, node: TreeNode, keep: int) -> TreeNode:
        """Split `node` after its first `keep` tokens; returns the part behind them."""
        self._split(node, keep)
        return node

    def cut_head(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Split `node` after its first `num_tokens` tokens; returns those."""
        return self._split(node, num_tokens)

    # Copies in flight

    def begin_backup(self, node: TreeNode, pages: torch.Tensor, component: Component = Component.FULL) -> None:
        """A copy of what `component` holds of `node` to host `pages` was submitted."""
        if component is Component.FULL:
            self._ledger.set_state(node, PageState.BACKING_UP)
        assert node.pending[component] is None
        node.pending[component] = own(pages)

    def end_backup(self, node: TreeNode, confirmed: bool, component: Component = Component.FULL) -> torch.Tensor | None:
        """The copy ended. Confirmed: the host holds it too. Else the pages come back, to be freed. FULL ends first."""
        pages, node.pending[component] = node.pending[component], None
        assert pages is not None and node.parent is not None
        above = node.parent if component is Component.FULL else node
        if confirmed and (above.is_root or above.holds(Tier.HOST)):
            self._gain(node, Place.of(component, Tier.HOST), pages)
            return None
        if component is Component.FULL:
            self._ledger.set_state(node, PageState.DEVICE)
        return pages

    def begin_load(self, node: TreeNode, slots: torch.Tensor) -> None:
        """A copy of `node` to device `slots` was submitted; matches see it on the device from now on."""
        self._ledger.set_state(node, PageState.LOADING)
        self._gain(node, Place.FULL_DEVICE, own(slots))

    def end_load(self, node: TreeNode, confirmed: bool) -> torch.Tensor | None:
        """The copy ended. Failed: the node is on the host only again, and its slots come back (windows and all)."""
        if confirmed:
            self._ledger.set_state(node, PageState.BOTH)
            return None
        self._lose_followers(node)
        return self._lose(node, Place.FULL_DEVICE)

    # Needing and leaving

    def lock(self, node: TreeNode, tier: Tier) -> None:
        """Someone needs the prefix that ends with `node` to stay on `tier`, with what its components need of it."""
        self._ledger.lock(node, tier)

    def unlock(self, node: TreeNode, tier: Tier) -> None:
        """Undo one `lock`; what nobody needs any more becomes the newest of the evictable."""
        self._ledger.unlock(node, tier)

    def move_lock(self, old: TreeNode, new: TreeNode, tier: Tier) -> None:
        """A lock at `old` becomes one at `new`, at the cost of what lies between where `new` continues `old`."""
        self._ledger.move_lock(old, new, tier)

    def touch(self, node: TreeNode, tier: Tier) -> None:
        """A request used the prefix that ends with `node`: tell the eviction orders of its tier."""
        self._ledger.touch(node, tier)

    def prioritise(self, node: TreeNode, priority: int) -> None:
        """A request of `priority` uses the prefix that ends with `node`: no node of it has a lower one from now on."""
        self._ledger.prioritise(node, priority)

    def victim(self, place: int) -> TreeNode | None:
        """The node that should lose its value at `place` next, if any may."""
        return self.book(place).order.victim()

    def drop(self, node: TreeNode, place: int) -> list[Released]:
        """Take the value at `place`, which nobody needs, from `node`; returns all that left the tree, to be freed.

        With FULL go the other components on that tier. A leaf that no match can end in any more leaves wholly, and so
        does its parent where the same holds then.
        """
        where = Place(place)
        assert not node.locks[where], "dropped what is needed"
        released: list[Released] = []
        if where.component is Component.FULL:
            assert not node.children_held[where.tier], "dropped a node with a child on the tier"
            self._drop_tier(node, where.tier, released)
        else:
            self._release(node, where, released)
        self._prune(node, released)
        return released

    def check(self) -> None:
        """Raise `InvariantError` with every violation of the rules above."""
        found = structure_violations(self.root, self.page_size, self.num_nodes)
        nodes = self.nodes()
        for book in self._ledger.books.values():
            found.extend(account_violations(book, [node for node in nodes if node.holds(book.place)]))
        if found:
            raise InvariantError("tree", found)

    # Inside

    def _child(self, node: TreeNode, tokens: Tokens, raw: memoryview, pos: int, limit: int, namespace: str) -> TreeNode:
        """The child of `node` that tokens[pos:] go on in, found, split off or made, to at most `limit`."""
        child_key = self._child_key(node, raw, pos, namespace)
        child = node.children.get(child_key)
        if child is None:
            child = TreeNode(run=TokenRun(tokens[pos:limit]), parent=node, namespace=namespace)
            node.children[child_key] = child
            self.num_nodes += 1
            return child
        common = min(self._common_len(child, tokens, raw, pos), limit - pos)
        return child if common == child.num_tokens else self._split(child, common)

    def _child_key(self, parent: TreeNode, raw: memoryview, pos: int, namespace: str) -> bytes | tuple[str, bytes]:
        first = raw[pos * 8 : (pos + self.page_size) * 8].tobytes()
        return (namespace, first) if parent.is_root else first

    def _key_in_parent(self, node: TreeNode) -> bytes | tuple[str, bytes]:
        assert node.run is not None and node.parent is not None
        return self._child_key(node.parent, bytes_of(node.run.tokens), 0, node.namespace)

    def _common_len(self, node: TreeNode, tokens: Tokens, raw: memoryview, pos: int) -> int:
        """Equal tokens of the node and of `tokens[pos:]`, in whole pages."""
        assert node.run is not None
        length = node.run.common_len(tokens, raw, pos)
        return length - length % self.page_size

    def _split(self, lower: TreeNode, at: int) -> TreeNode:
        """Cut `lower` after its first `at` tokens; returns the new node above it.

        [0, at) goes to the upper node, [at, end) stays: who knows the node by its end goes on knowing it.
        """
        assert lower.run is not None and lower.parent is not None
        tokens, parent = lower.run.tokens, lower.parent
        upper = TreeNode(run=TokenRun(tokens[:at]), parent=parent, namespace=lower.namespace)
        parent.children[self._key_in_parent(lower)] = upper
        upper.state, upper.stored, upper.from_disk = lower.state, lower.stored, lower.from_disk
        upper.hit_count, upper.priority = lower.hit_count, lower.priority
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        cut_pages = at // self.page_size
        if lower.page_keys is not None:
            upper.page_keys, lower.page_keys = lower.page_keys[:cut_pages], lower.page_keys[cut_pages:]
        lower.run, lower.parent = TokenRun(tokens[at:]), upper
        self._ledger.split(upper, lower)
        upper.children[self._key_in_parent(lower)] = lower
        self.num_nodes += 1
        return upper

    def _gain(self, node: TreeNode, place: Place, value: torch.Tensor) -> None:
        self._ledger.gain(node, place, value)
        if self._events is not None and place.component is Component.FULL:
            first = node.parent is None or node.parent.is_root
            before = None if first else self.names.before(node)
            self._events.stored(node, self.names.of(node), before, _MEDIUM[place.tier])

    def _lose(self, node: TreeNode, place: Place) -> torch.Tensor:
        if self._events is not None and place.component is Component.FULL:
            self._events.removed(self.names.of(node), _MEDIUM[place.tier])
        return self._ledger.lose(node, place)

    def _lose_followers(self, node: TreeNode) -> None:
        """Take out what is found through the device's full slots and leaves with them."""
        for rules in self._ledger.rules:
            place = rules.places[Tier.DEVICE]
            if rules.follows_full_slots and node.holds(place):
                self._ledger.lose(node, place)

    def _release(self, node: TreeNode, place: Place, released: list[Released]) -> None:
        num_tokens = node.num_tokens if place.component is not Component.MAMBA else 0
        released.append(Released(place, self._lose(node, place), num_tokens))

    def _drop_tier(self, node: TreeNode, tier: Tier, released: list[Released]) -> None:
        """Take all that `node` holds on `tier`."""
        if tier is Tier.DEVICE:
            self._lose_followers(node)
        for rules in reversed(self._ledger.rules):
            place = rules.places[tier]
            if node.holds(place):
                self._release(node, place, released)

    def _prune(self, node: TreeNode, released: list[Released]) -> None:
        """Unlink `node` where it holds nothing, or is a leaf that nobody needs and no match ends in; then parents.

        A lock on a tier where a node holds nothing does not keep it; it is undone as ever, for the path stays.
        """
        while not node.is_root and not node.children:
            if node.state is not PageState.GONE:
                if any(node.locks) or not self._useless(node):
                    break
                for tier in (Tier.DEVICE, Tier.HOST):
                    self._drop_tier(node, tier, released)
            parent = node.parent
            assert parent is not None and not node.spans
            del parent.children[self._key_in_parent(node)]
            self.num_nodes -= 1
            node = parent

    def _useless(self, leaf: TreeNode) -> bool:
        """Whether some component has nothing left of a leaf, on any tier."""
        return any(not any(leaf.holds(place) for place in rules.places) for rules in self._ledger.rules)
