"""Size accounts, locks and eviction orders of a tree: one account for each component.

Owns the values and locks of nodes. Knows of the structure only a node's parent; `RadixTree` is its only caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from hicache.eviction.orders import NOBODY, EvictionOrder
from hicache.eviction.policy import make_order
from hicache.tiers import FULL, Component
from hicache.tree.base import Released
from hicache.tree.components import TreeComponent
from hicache.tree.node import Holding, TreeNode, alone, last_nodes, name_of


@dataclass(frozen=True)
class Expectation:
    """A queued request will need the prefix that ends with `node`. `num_tokens`: of each component, how many tokens up
    to the end of `node` that was counted over; they are the same however the nodes were split since."""

    node: TreeNode
    num_tokens: Mapping[Component, int]


class Account:
    """What a component holds, in tokens or states. `evictable` is the size of what the order contains."""

    def __init__(self, component: TreeComponent, policy: str) -> None:
        self.component, self.name = component, component.name
        is_evictable = component.is_evictable
        self.order: EvictionOrder[Holding] = make_order(policy, lambda holding: is_evictable(holding.owner))
        self.evictable = self.protected = 0

    @property
    def total(self) -> int:
        return self.evictable + self.protected

    def size(self, node: TreeNode) -> int:
        """What a node that holds a value counts for: its tokens, or 1 for a state."""
        return 1 if self.component.at_node_end else node.num_tokens

    def uses_of(self, node: TreeNode) -> float:
        """Of what `node` has, see `EvictionPolicy.uses_of`."""
        return self.order.policy.uses_of(node.holdings[self.name])

    def like_tokens(self, namespace: str, start: int, raw: memoryview, page_size: int) -> int:
        """How many tokens of `raw`, which follow `start` others, one node is to have, see
        `EvictionPolicy.like_tokens`."""

        def name_at(num_tokens: int) -> int:
            depth, first = start + num_tokens, raw[8 * num_tokens : 8 * (num_tokens + page_size)].tobytes()
            return name_of(namespace, depth, first if depth else (namespace, first))

        return self.order.policy.like_tokens(len(raw) // 8, name_at)

    def lock(self, node: TreeNode) -> None:
        holding = node.holdings[self.name]
        holding.locks += 1
        if holding.locks == 1 and holding.value is not None:
            size = self.size(node)
            self.order.lock(holding)
            self.evictable -= size
            self.protected += size

    def unlock(self, node: TreeNode) -> None:
        holding = node.holdings[self.name]
        holding.locks -= 1
        assert holding.locks >= 0, "unlocked more often than locked"
        if not holding.locks and holding.value is not None:
            size = self.size(node)
            self.order.unlock(holding)
            self.evictable += size
            self.protected -= size

    def expect(self, node: TreeNode, change: int) -> None:
        """`change` more (1) or fewer (-1) queued requests will need what `node` has."""
        holding = node.holdings[self.name]
        self.order.expect(holding, change)
        assert holding.expected >= 0, "no longer expected more often than expected"

    def keep_parents_newer(self, node: TreeNode) -> None:
        """A child of `node` entered as just used. Above what is locked everything is, and finds its place later."""
        while node.parent is not None and not (holding := node.holdings[self.name]).locks:
            node.touch()
            if holding.value is not None:
                self.order.hit(holding)
            node = node.parent


class Accounts:
    """All accounts of one tree, and the locks of its nodes. `components`: FULL first."""

    def __init__(self, components: Sequence[TreeComponent], policy: str) -> None:
        self.components = tuple(components)
        self._by_component = {component.name: Account(component, policy) for component in self.components}
        self._accounts = tuple(self._by_component.values())
        self._shares_full_slots = [component.name for component in self.components if component.shares_full_slots]
        self._at_node_end = {component.name for component in self.components if component.at_node_end}

    def _enter(self, node: TreeNode, component: Component, value: torch.Tensor) -> None:
        """Enter a value; an unlocked node counts as just used, and so does its path: parents must stay newer."""
        account, holding = self._by_component[component], node.holdings[component]
        assert holding.value is None and node.parent is not None
        holding.value, holding.owner = value, node
        size = account.size(node)
        if holding.locks:
            account.protected += size
            account.order.hit(holding)
            return
        account.evictable += size
        node.touch()
        account.order.insert(holding)
        if component == FULL:
            account.keep_parents_newer(node.parent)

    def detach(self, node: TreeNode, component: Component) -> Released:
        """Take a value out, whatever the locks."""
        account, holding = self._by_component[component], node.holdings[component]
        value = holding.value
        assert value is not None
        size = account.size(node)
        holding.value = None
        if holding.locks:
            account.protected -= size
            account.order.end_keep(holding)
        else:
            account.evictable -= size
            account.order.evict(holding)
        holding.owner = NOBODY
        return Released(component, value, size)

    def account(self, component: Component) -> Account:
        """The account of a component, in tokens or states."""
        return self._by_component[component]

    def evictable(self, component: Component) -> int:
        return self._by_component[component].evictable

    def protected(self, component: Component) -> int:
        return self._by_component[component].protected

    def lock(self, node: TreeNode, ahead: int = 0) -> None:
        """Someone needs the prefix that ends `ahead` tokens behind `node` to stay up to there, with what its components
        need of it."""
        if node.parent is None:
            return
        for account in self._accounts:
            for locked in account.component.nodes_to_lock(node, ahead):
                account.lock(locked)

    def unlock(self, node: TreeNode, ahead: int = 0) -> None:
        """Undo one `lock`. That is no use: what has no lock left goes where its last use puts it, see `touch`."""
        if node.parent is None:
            return
        for account in self._accounts:
            for locked in account.component.nodes_to_unlock(node, ahead):
                account.unlock(locked)

    def move_lock(self, old: TreeNode, new: TreeNode, ahead: int = 0) -> None:
        """A lock at `old`, with `ahead`, becomes one at `new`, for the same prefix where that goes on, at the cost of
        what lies between where `new` continues `old`."""
        left = max(0, ahead + old.depth_tokens - new.depth_tokens)
        if old.parent is None or new.parent is None:
            self.lock(new, left)
            self.unlock(old, ahead)
            return
        for account in self._accounts:
            to_lock, to_unlock = account.component.nodes_to_move(old, new, ahead, left)
            for locked in to_lock:
                account.lock(locked)
            for locked in to_unlock:
                account.unlock(locked)

    def expect(self, node: TreeNode) -> Expectation:
        """A queued request will need the prefix that ends with `node`: it is evicted after what no queued request
        needs, until `forget`. It is no lock."""
        num_tokens: dict[Component, int] = {}
        for account in self._accounts:
            nodes = account.component.required_nodes(node)
            num_tokens[account.name] = sum(required.num_tokens for required in nodes)
            for required in nodes:
                account.expect(required, 1)
        return Expectation(node, num_tokens)

    def forget(self, expectation: Expectation) -> None:
        """Undo one `expect`."""
        for account in self._accounts:
            num_tokens = 1 if account.name in self._at_node_end else expectation.num_tokens[account.name]
            for required in last_nodes(expectation.node, num_tokens):
                account.expect(required, -1)

    def expect_uses(self, node: TreeNode, num_uses: int) -> None:
        """The prefix that ends with `node` will be asked for `num_uses` times. Counts under the policy auto alone."""
        for above in node.climb():
            for account in self._accounts:
                holding = above.holdings[account.name]
                if holding.value is not None:
                    account.order.expect_uses(holding, num_uses)

    def end_session(self, node: TreeNode, start: int = 0) -> list[TreeNode]:
        """The prefix that ends with `node` will not be asked for again: what it has in common with no other, behind
        `start` tokens, is evicted first, until somebody uses it. Returns these nodes, deepest first."""
        found = list(takewhile(lambda above: above.depth_tokens > start, alone(node)))
        for above in found:
            for account in self._accounts:
                holding = above.holdings[account.name]
                if holding.value is not None:
                    account.order.end(holding)
        return found

    def keep(self, node: TreeNode, until_s: float, limits: Mapping[Component, float]) -> None:
        """Evict the values that the prefix ending with `node` needs after plain ones until a deadline. It is no lock.
        `limits`: the most that each component keeps, see `EvictionOrder.keep`."""
        for account in self._accounts:
            nodes = [above for above in account.component.required_nodes(node) if above.has(account.name)]
            sizes = {above.holdings[account.name]: account.size(above) for above in nodes}
            account.order.keep(sizes, until_s, limits[account.name])

    def expire(self, now_s: float) -> None:
        """End the deadlines up to now."""
        for account in self._accounts:
            account.order.expire(now_s)

    def touch(self, node: TreeNode) -> None:
        """A request used the prefix that ends with `node`: tell the eviction orders."""
        for account in self._accounts:
            name, hit = account.name, account.order.hit
            for required in account.component.required_nodes(node):
                required.touch()
                holding = required.holdings[name]
                if holding.value is not None:
                    hit(holding)

    def raise_priority(self, node: TreeNode, priority: int) -> None:
        """A request of `priority` uses the prefix that ends with `node`: no node of it has a lower one from now on."""
        while node.parent is not None and node.priority < priority:  # no node ranks below its children
            node.priority = priority
            for account in self._accounts:
                account.order.update(node.holdings[account.name])
            node = node.parent

    def _divide(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` took the first tokens of `lower`, which still holds everything; divide it between the two."""
        at_tokens = upper.num_tokens
        for account in self._accounts:
            component = account.component
            above, below = upper.holdings[account.name], lower.holdings[account.name]
            above.locks = 0 if component.at_node_end else below.locks
            above.expected = 0 if component.at_node_end else below.expected
            above.follow(below)
            if below.value is not None and not component.shares_full_slots:
                above.value, below.value = component.split(below.value, at_tokens)
        for name in self._shares_full_slots:
            if lower.has(name):
                upper.holdings[name].value, lower.holdings[name].value = upper.full.value, lower.full.value
        for account in self._accounts:
            above, below = upper.holdings[account.name], lower.holdings[account.name]
            if above.value is not None:
                above.owner = upper
                account.order.split(above, below, account.size(upper))
        for run in lower.runs:
            if run.component not in self._at_node_end:
                run.nodes.insert(run.nodes.index(lower), upper)
                upper.runs.append(run)
