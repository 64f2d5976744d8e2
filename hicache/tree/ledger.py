"""Who holds what, how much of it is needed, and which goes next: one book for each place, a component on a tier.

Owns the values and locks of nodes, the account of each place and its eviction order. Knows no structure but a node's
parent; `RadixTree` is its only caller. May import torch and the rest of hicache.tree below core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hicache.tree.components.base import Rules
from hicache.tree.node import TRANSITIONS, Component, PageState, Place, Tier, TreeNode
from hicache.tree.policy import EvictionOrder, make_order

_GAIN = {
    (PageState.GONE, Tier.DEVICE): PageState.DEVICE,
    (PageState.GONE, Tier.HOST): PageState.HOST,
    (PageState.HOST, Tier.DEVICE): PageState.BOTH,
    (PageState.DEVICE, Tier.HOST): PageState.BOTH,
    (PageState.BACKING_UP, Tier.HOST): PageState.BOTH,
    (PageState.LOADING, Tier.DEVICE): PageState.LOADING,
}
_LOSE = {
    (PageState.DEVICE, Tier.DEVICE): PageState.GONE,
    (PageState.BOTH, Tier.DEVICE): PageState.HOST,
    (PageState.LOADING, Tier.DEVICE): PageState.HOST,
    (PageState.BOTH, Tier.HOST): PageState.DEVICE,
    (PageState.HOST, Tier.HOST): PageState.GONE,
}


class Book:
    """Account and order of one place, in tokens or states. `evictable` counts what the order holds."""

    def __init__(self, place: Place, rules: Rules, policy: str) -> None:
        self.place, self.rules = place, rules
        self.order: EvictionOrder = make_order(policy, place, partial(rules.may_go, tier=place.tier))
        self.evictable = self.protected = 0


class Ledger:
    """The books of one tree. `rules`: its components, FULL first."""

    def __init__(self, rules: Sequence[Rules], policy: str) -> None:
        self.rules = tuple(rules)
        self._at_node_end = {rule.component for rule in self.rules if rule.at_node_end}
        self.books: dict[int, Book] = {
            place: Book(place, rule, policy) for rule in self.rules for place in (rule.places[tier] for tier in Tier)
        }

    def set_state(self, node: TreeNode, to: PageState) -> None:
        if to is not node.state:
            assert to in TRANSITIONS[node.state], f"no way from {node.state} to {to}"
            node.state = to

    def gain(self, node: TreeNode, place: Place, value: torch.Tensor) -> None:
        """Enter a value; an unlocked node counts as just used, and so does its path, for parents must stay newer."""
        book = self.books[place]
        assert node.values[place] is None and node.parent is not None
        if place.component is Component.FULL:
            self.set_state(node, _GAIN[node.state, place.tier])
            node.parent.children_held[place.tier] += 1
        node.values[place] = value
        weight = book.rules.weight(node)
        if node.locks[place]:
            book.protected += weight
            return
        book.evictable += weight
        node.used()
        book.order.insert(node)
        if place.component is Component.FULL:
            self._use(book, node.parent)

    def lose(self, node: TreeNode, place: Place) -> torch.Tensor:
        """Take a value out; returns it."""
        book, value, parent = self.books[place], node.held(place), node.parent
        assert parent is not None
        weight = book.rules.weight(node)
        node.values[place] = None
        if node.locks[place]:
            book.protected -= weight
        else:
            book.evictable -= weight
            book.order.evict(node)
        if place.component is Component.FULL:
            tier = place.tier
            self.set_state(node, _LOSE[node.state, tier])
            parent.children_held[tier] -= 1
            if not parent.children_held[tier] and parent in book.order:
                book.order.expose(parent)
        return value

    def lock(self, node: TreeNode, tier: Tier) -> None:
        for rules in self.rules:
            for at in rules.to_lock(node, tier):
                self._lock(at, self.books[rules.places[tier]])

    def unlock(self, node: TreeNode, tier: Tier) -> None:
        for rules in self.rules:
            for at in rules.to_unlock(node, tier):
                self._unlock(at, self.books[rules.places[tier]])

    def move_lock(self, old: TreeNode, new: TreeNode, tier: Tier) -> None:
        for rules in self.rules:
            book = self.books[rules.places[tier]]
            to_lock, to_unlock = rules.to_move(old, new, tier)
            for at in to_lock:
                self._lock(at, book)
            for at in to_unlock:
                self._unlock(at, book)

    def touch(self, node: TreeNode, tier: Tier) -> None:
        """A use of the prefix that ends with `node`. What is locked becomes the newest when it is unlocked."""
        for rules in self.rules:
            self._use(self.books[rules.places[tier]], node)

    def prioritise(self, node: TreeNode, priority: int) -> None:
        """Raise what the path to `node` has less of. Ranks change without a use, as where a node's last child goes."""
        for at in node.path():
            if at.priority >= priority:
                return  # no node ranks below its children, so nor does anything above
            at.priority = priority
            for book in self.books.values():
                if at in book.order:
                    book.order.expose(at)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` took the first tokens of `lower`, which holds everything still; share it between the two."""
        at_tokens = upper.num_tokens
        for book in self.books.values():
            place = book.place
            upper.locks[place] = book.rules.upper_locks(lower.locks[place])
            value = lower.values[place]
            if value is not None:
                upper.values[place], lower.values[place] = book.rules.split(value, at_tokens, place.tier)
            if upper.values[place] is not None and lower in book.order:
                book.order.split(upper, lower)
        for rules in self.rules:
            pending = lower.pending[rules.component]
            if pending is not None:
                halves = rules.split(pending, at_tokens, Tier.HOST)
                upper.pending[rules.component], lower.pending[rules.component] = halves
        upper.children_held = [int(lower.holds(tier)) for tier in Tier]
        for span in lower.spans:
            if span.component not in self._at_node_end:
                span.nodes.insert(span.nodes.index(lower), upper)
                upper.spans.append(span)

    def free_to_leave(self, node: TreeNode) -> bool:
        """Whether nobody needs anything that `node` holds."""
        return not any(node.locks)

    def _lock(self, node: TreeNode, book: Book) -> None:
        place = book.place
        node.locks[place] += 1
        if node.locks[place] == 1 and node.values[place] is not None:
            weight = book.rules.weight(node)
            book.order.lock(node)
            book.evictable -= weight
            book.protected += weight

    def _unlock(self, node: TreeNode, book: Book) -> None:
        place = book.place
        node.locks[place] -= 1
        assert node.locks[place] >= 0, "unlocked more often than locked"
        if not node.locks[place] and node.values[place] is not None:
            weight = book.rules.weight(node)
            node.used()
            book.order.unlock(node)
            book.evictable += weight
            book.protected -= weight

    @staticmethod
    def _use(book: Book, node: TreeNode) -> None:
        full = book.place.component is Component.FULL
        for at in book.rules.reach(node):
            if at.locks[book.place]:
                if full:
                    return  # so is everything above
                continue
            at.used()
            if at.values[book.place] is not None:
                book.order.hit(at)
