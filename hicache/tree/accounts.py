"""Size accounts, locks and eviction orders of a tree: one account for each component on each tier.

Owns the values and locks of nodes. Knows of the structure only a node's parent; `RadixTree` is its only caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hicache.tiers import DEVICE, FULL, HOST, Component, Tier
from hicache.tree.base import Released
from hicache.tree.components.base import TreeComponent
from hicache.tree.frequency import FadingFrequency
from hicache.tree.node import TreeNode, last_nodes
from hicache.tree.orders import ExpectedLast
from hicache.tree.policy import make_orders


@dataclass(frozen=True)
class Expectation:
    """A queued request will need the prefix that ends with `node`. `num_tokens`: of each component, how many tokens up
    to the end of `node` that was counted over; they are the same however the nodes were split since."""

    node: TreeNode
    num_tokens: Mapping[Component, int]


class Account:
    """What a component holds on a tier, in tokens or states. `evictable` is the size of what the order contains."""

    def __init__(self, component: TreeComponent, tier: Tier, policy: str) -> None:
        self.component, self.name, self.tier = component, component.name, tier
        is_evictable = partial(component.is_evictable, tier=tier)
        others, expected = make_orders(policy, component.name, tier, is_evictable)
        self.order = ExpectedLast(component.name, tier, others, expected)
        self.log = others.log if isinstance(others, FadingFrequency) else None
        self.evictable = self.protected = 0

    @property
    def held(self) -> int:
        return self.evictable + self.protected

    def size(self, node: TreeNode) -> int:
        """What a node that holds a value counts for: its tokens, or 1 for a state."""
        return 1 if self.component.at_node_end else node.num_tokens

    def lock(self, node: TreeNode) -> None:
        holding = node.holdings[self.name][self.tier]
        holding.locks += 1
        if holding.locks == 1 and holding.value is not None:
            size = self.size(node)
            self.order.lock(node)
            self.evictable -= size
            self.protected += size

    def unlock(self, node: TreeNode) -> None:
        holding = node.holdings[self.name][self.tier]
        holding.locks -= 1
        assert holding.locks >= 0, "unlocked more often than locked"
        if not holding.locks and holding.value is not None:
            size = self.size(node)
            self.order.unlock(node)
            self.evictable += size
            self.protected -= size

    def expect(self, node: TreeNode, change: int) -> None:
        """`change` more (1) or fewer (-1) queued requests will need what `node` has. It counts as just used, so that
        parents, which follow their children, stay newer."""
        holding = node.holdings[self.name][self.tier]
        is_in_order = holding.value is not None and not holding.locks
        if is_in_order:
            self.order.evict(node)
        holding.expected += change
        assert holding.expected >= 0, "no longer expected more often than expected"
        if is_in_order:
            self.order.insert(node)

    def touch(self, node: TreeNode) -> None:
        """A use of the prefix that ends with `node`."""
        for at in self.component.required_nodes(node):
            at.touch()
            if at.holdings[self.name][self.tier].value is not None:
                self.order.hit(at)

    def keep_parents_newer(self, node: TreeNode) -> None:
        """A child of `node` entered as just used. Above what is locked everything is, and finds its place later."""
        while node.parent is not None and not node.holdings[self.name][self.tier].locks:
            node.touch()
            if node.holdings[self.name][self.tier].value is not None:
                self.order.hit(node)
            node = node.parent


class Accounts:
    """All accounts of one tree, and the locks of its nodes. `components`: FULL first."""

    def __init__(self, components: Sequence[TreeComponent], policy: str) -> None:
        self.components = tuple(components)
        self._by_component: dict[Component, tuple[Account, Account]] = {
            component.name: (Account(component, DEVICE, policy), Account(component, HOST, policy))
            for component in self.components
        }
        self._on_tier: tuple[tuple[Account, ...], tuple[Account, ...]] = (
            tuple(pair[DEVICE] for pair in self._by_component.values()),
            tuple(pair[HOST] for pair in self._by_component.values()),
        )
        self._shares_full_slots = [component.name for component in self.components if component.shares_full_slots]
        self._at_node_end = {component.name for component in self.components if component.at_node_end}

    def _enter(self, node: TreeNode, component: Component, tier: Tier, value: torch.Tensor) -> None:
        """Enter a value; an unlocked node counts as just used, and so does its path: parents must stay newer."""
        account, holding = self._by_component[component][tier], node.holdings[component][tier]
        assert holding.value is None and node.parent is not None
        holding.value = value
        size = account.size(node)
        if component == FULL:
            node.parent.children_on[tier] += 1
        if holding.locks:
            account.protected += size
            account.order.hit(node)
            return
        account.evictable += size
        node.touch()
        account.order.insert(node)
        if component == FULL:
            account.keep_parents_newer(node.parent)

    def _take_out(self, node: TreeNode, component: Component, tier: Tier) -> Released:
        """Take a value out."""
        account, holding, parent = self._by_component[component][tier], node.holdings[component][tier], node.parent
        value = holding.value
        assert value is not None and parent is not None
        size = account.size(node)
        holding.value = None
        if holding.locks:
            account.protected -= size
        else:
            account.evictable -= size
            account.order.evict(node)
        if component == FULL:
            parent.children_on[tier] -= 1
            if not parent.children_on[tier] and parent in account.order:
                account.order.on_leaf(parent)
        return Released(component, tier, value, size)

    def account(self, component: Component, tier: Tier) -> Account:
        """The account of a component on a tier, in tokens or states."""
        return self._by_component[component][tier]

    def evictable(self, component: Component, tier: Tier) -> int:
        return self._by_component[component][tier].evictable

    def protected(self, component: Component, tier: Tier) -> int:
        return self._by_component[component][tier].protected

    def lock(self, node: TreeNode, tier: Tier) -> None:
        """Someone needs the prefix that ends with `node` to stay on `tier`, with what its components need of it."""
        if node.parent is None:
            return
        for account in self._on_tier[tier]:
            for at in account.component.nodes_to_lock(node, tier):
                account.lock(at)

    def unlock(self, node: TreeNode, tier: Tier) -> None:
        """Undo one `lock`. That is no use: what has no lock left goes where its last use puts it, see `touch`."""
        if node.parent is None:
            return
        for account in self._on_tier[tier]:
            for at in account.component.nodes_to_unlock(node, tier):
                account.unlock(at)

    def move_lock(self, old: TreeNode, new: TreeNode, tier: Tier) -> None:
        """A lock at `old` becomes one at `new`, at the cost of what lies between where `new` continues `old`."""
        if old.parent is None or new.parent is None:
            self.lock(new, tier)
            self.unlock(old, tier)
            return
        for account in self._on_tier[tier]:
            to_lock, to_unlock = account.component.nodes_to_move(old, new, tier)
            for at in to_lock:
                account.lock(at)
            for at in to_unlock:
                account.unlock(at)

    def expect(self, node: TreeNode) -> Expectation:
        """A queued request will need the prefix that ends with `node`: on either tier it is evicted after what no
        queued request needs, until `forget`. It is no lock."""
        num_tokens: dict[Component, int] = {}
        for name, pair in self._by_component.items():
            nodes = list(pair[DEVICE].component.required_nodes(node))
            num_tokens[name] = sum(at.num_tokens for at in nodes)
            for account in pair:
                for at in nodes:
                    account.expect(at, 1)
        return Expectation(node, num_tokens)

    def forget(self, expectation: Expectation) -> None:
        """Undo one `expect`."""
        for name, pair in self._by_component.items():
            num_tokens = 1 if name in self._at_node_end else expectation.num_tokens[name]
            nodes = last_nodes(expectation.node, num_tokens)
            for account in pair:
                for at in nodes:
                    account.expect(at, -1)

    def expect_uses(self, node: TreeNode, num_uses: int, start: int) -> None:
        """The prefix that ends with `node` will be asked for `num_uses` times. 0: what it has in common with no other,
        behind `start` tokens, has no uses left. Counts under the policy auto alone."""
        if not num_uses and node.children:
            return
        while node.parent is not None and (num_uses or node.depth_tokens > start):
            for account in (*self._on_tier[DEVICE], *self._on_tier[HOST]):
                if account.log is not None and node.holds(account.name, account.tier):
                    account.log.expect(node, num_uses)
                    if node in account.order:
                        account.order.on_leaf(node)
            node = node.parent
            if not num_uses and len(node.children) > 1:
                return

    def touch(self, node: TreeNode, tier: Tier) -> None:
        """A request used the prefix that ends with `node`: tell the eviction orders of its tier."""
        for account in self._on_tier[tier]:
            account.touch(node)

    def raise_priority(self, node: TreeNode, priority: int) -> None:
        """A request of `priority` uses the prefix that ends with `node`: no node of it has a lower one from now on."""
        while node.parent is not None and node.priority < priority:  # no node ranks below its children
            node.priority = priority
            for account in (*self._on_tier[DEVICE], *self._on_tier[HOST]):
                if node in account.order:
                    account.order.on_leaf(node)
            node = node.parent

    def _divide(self, upper: TreeNode, lower: TreeNode, page_size: int) -> None:
        """`upper` took the first tokens of `lower`, which still holds everything; divide it between the two."""
        at_tokens = upper.num_tokens
        for account in (*self._on_tier[DEVICE], *self._on_tier[HOST]):
            component, tier = account.component, account.tier
            above, below = upper.holdings[account.name][tier], lower.holdings[account.name][tier]
            above.locks = 0 if component.at_node_end else below.locks
            above.expected = 0 if component.at_node_end else below.expected
            above.uses, above.used_at, above.hits = below.uses, below.used_at, below.hits
            above.last_use = below.last_use
            if below.value is not None and not (component.shares_full_slots and tier is DEVICE):
                above.value, below.value = component.split(below.value, at_tokens, tier, page_size)
            if below.pending is not None:
                above.pending, below.pending = component.split(below.pending, at_tokens, HOST, page_size)
            above.stored = 0 if component.at_node_end else below.stored
        for name in self._shares_full_slots:
            if lower.holds(name, DEVICE):
                upper.holdings[name][DEVICE].value = upper.full[DEVICE].value
                lower.holdings[name][DEVICE].value = lower.full[DEVICE].value
        for account in (*self._on_tier[DEVICE], *self._on_tier[HOST]):
            if upper.holds(account.name, account.tier) and lower in account.order:
                account.order.split(upper, lower)
        upper.children_on = [int(lower.holds(FULL, tier)) for tier in Tier]
        for run in lower.runs:
            if run.component not in self._at_node_end:
                run.nodes.insert(run.nodes.index(lower), upper)
                upper.runs.append(run)
