"""The rules of the tree, as functions from the nodes to the list of their violations."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tiers import DEVICE, FULL, HOST, Tier
from hicache.tree.accounts import Account
from hicache.tree.components import TreeComponent
from hicache.tree.node import ChildKey, TreeNode


def structure_violations(
    root: TreeNode, components: Sequence[TreeComponent], page_size: int, num_nodes: int
) -> list[str]:
    """Every broken rule of links, keys, states and locks, one line each."""
    found: list[str] = []
    seen = 0
    stack = [(root, child_key, child) for child_key, child in root.children.items()]
    while stack:
        parent, child_key, node = stack.pop()
        seen += 1
        found.extend(_link_violations(parent, child_key, node, page_size))
        found.extend(_full_violations(parent, node))
        for component in components:
            found.extend(_value_violations(node, component, page_size))
            found.extend(_lock_violations(node, component))
        stack.extend((node, key, child) for key, child in node.children.items())
    if seen != num_nodes:
        found.append(f"{seen} nodes are linked, {num_nodes} were counted")
    return found


def _link_violations(parent: TreeNode, child_key: ChildKey, node: TreeNode, page_size: int) -> list[str]:
    found: list[str] = []
    where = f"node {node.id} at depth {node.depth_tokens}"
    if node.parent is not parent:
        found.append(f"{where}: parent link is wrong")
    if node.run is None or len(node.run) != node.num_tokens or node.child_key != child_key:
        found.append(f"{where}: {node.num_tokens} tokens or the key in the parent are not those of its run")
    if node.depth_tokens != parent.depth_tokens + node.num_tokens:
        found.append(f"{where}: {node.num_tokens} tokens below depth {parent.depth_tokens}")
    if node.run is None or not node.num_tokens or node.num_tokens % page_size:
        found.append(f"{where}: {node.num_tokens} tokens are no whole pages of {page_size}")
        return found
    first = node.run.tokens[:page_size].tobytes()
    if child_key != ((node.namespace, first) if parent.is_root else first):
        found.append(f"{where}: is filed under another first page")
    if not parent.is_root and parent.namespace != node.namespace:
        found.append(f"{where}: namespace {node.namespace!r} below {parent.namespace!r}")
    if node.page_keys is not None and len(node.page_keys) * page_size != node.num_tokens:
        found.append(f"{where}: {len(node.page_keys)} page keys for {node.num_tokens} tokens")
    found.extend(f"{where}: refers to a run that does not know it" for run in node.runs if node not in run.nodes)
    copied = {run.component for run in node.runs}
    for component in node.holdings:
        if node.pending(component) is not None and component not in copied:
            found.append(f"{where}: {component} pages are pending and no copy of the node is in flight")
    return found


def _full_violations(parent: TreeNode, node: TreeNode) -> list[str]:
    found: list[str] = []
    where = f"node {node.id} at depth {node.depth_tokens}"
    if not any(node.holds(FULL, tier) for tier in Tier):
        found.append(f"{where}: held by no tier")
    for tier in Tier:
        if node.holds(FULL, tier) and not (parent.is_root or parent.holds(FULL, tier)):
            found.append(f"{where}: on {tier.name} below a parent that is not")
        children = sum(child.holds(FULL, tier) for child in node.children.values())
        if node.children_on[tier] != children:
            found.append(f"{where}: {children} children on {tier.name}, {node.children_on[tier]} were counted")
    return found


def _value_violations(node: TreeNode, component: TreeComponent, page_size: int) -> list[str]:
    found: list[str] = []
    where, name = f"node {node.id} at depth {node.depth_tokens}", component.name
    if node.pending(name) is not None and (node.holds(name, HOST) or not node.holds(FULL, DEVICE)):
        found.append(f"{where}: {name} is being copied to the host, which holds it, or from where it is not")
    for tier in Tier:
        if not node.holds(name, tier):
            continue
        size = 1 if component.at_node_end else node.num_tokens
        want = size // page_size if tier is HOST and not component.at_node_end else size
        if len(node.held(name, tier)) != want:
            found.append(f"{where}: {len(node.held(name, tier))} elements of {name} on {tier.name}, not {want}")
        if not node.holds(FULL, tier):
            found.append(f"{where}: holds {name} on {tier.name} where it does not hold full")
    shared = component.shares_full_slots and node.holds(name, DEVICE)
    if shared and node.held(name, DEVICE) is not node.holdings[FULL][DEVICE].value:
        found.append(f"{where}: {name} slots are not the node's full slots")
    return found


def _lock_violations(node: TreeNode, component: TreeComponent) -> list[str]:
    found: list[str] = []
    for tier in Tier:
        locks, full = node.locks(component.name, tier), node.locks(FULL, tier)
        if locks < 0 or locks > full:
            found.append(f"node {node.id}: {locks} locks of {component.name} on {tier.name}, {full} of full")
        if component.name == FULL and node.full[tier].expected < sum(
            child.full[tier].expected for child in node.children.values()
        ):
            found.append(f"node {node.id}: expected on {tier.name} less often than its children")
        if component.name == FULL and full < sum(child.locks(FULL, tier) for child in node.children.values()):
            found.append(f"node {node.id}: fewer {tier.name} locks than its children")
    return found


def account_violations(account: Account, holders: list[TreeNode]) -> list[str]:
    """The sums and the eviction order of one account against the nodes that hold something there."""
    found: list[str] = []
    name, size = f"{account.name} on {account.tier.name}", account.size
    unlocked = [node for node in holders if not node.locks(account.name, account.tier)]
    in_order = {id(node.holdings[account.name][account.tier]) for node in unlocked}
    evictable = sum(map(size, unlocked))
    protected = sum(map(size, holders)) - evictable
    if (account.evictable, account.protected) != (evictable, protected):
        counted = f"{account.evictable} evictable + {account.protected} protected"
        found.append(f"{name}: the account says {counted}, the nodes {evictable} + {protected}")
    if {id(holding) for holding in account.order} != in_order:
        found.append(f"{name}: the eviction order is not exactly the unlocked holders")
    holding = account.order.victim()
    victim = None if holding is None else holding.owner
    if (victim is None) != (not any(account.component.is_evictable(node, account.tier) for node in unlocked)):
        found.append(f"{name}: the order names {victim}, {len(unlocked)} nodes are unlocked")
    if victim is not None and not account.component.is_evictable(victim, account.tier):
        found.append(f"{name}: the order names {victim}, which may not be evicted")
    return found
