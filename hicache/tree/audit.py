"""The rules of the tree, as functions from the nodes to the list of their violations."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tiers import FULL
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
        for component in components:
            found.extend(_value_violations(node, component))
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
    return found


def _value_violations(node: TreeNode, component: TreeComponent) -> list[str]:
    found: list[str] = []
    where, name = f"node {node.id} at depth {node.depth_tokens}", component.name
    if not node.has(name):
        return [f"{where}: holds no full slots"] if name == FULL else []
    size = 1 if component.at_node_end else node.num_tokens
    if len(node.value_of(name)) != size:
        found.append(f"{where}: {len(node.value_of(name))} elements of {name}, not {size}")
    if component.shares_full_slots and node.value_of(name) is not node.full.value:
        found.append(f"{where}: {name} slots are not the node's full slots")
    return found


def _lock_violations(node: TreeNode, component: TreeComponent) -> list[str]:
    found: list[str] = []
    locks, full = node.locks(component.name), node.locks(FULL)
    if locks < 0 or locks > full:
        found.append(f"node {node.id}: {locks} locks of {component.name}, {full} of full")
    if component.name == FULL:
        if node.full.expected < sum(child.full.expected for child in node.children.values()):
            found.append(f"node {node.id}: expected less often than its children")
        if full < sum(child.locks(FULL) for child in node.children.values()):
            found.append(f"node {node.id}: fewer locks than its children")
    return found


def account_violations(account: Account, holders: list[TreeNode]) -> list[str]:
    """The sums and the eviction order of one account against the nodes that hold something of it."""
    found: list[str] = []
    name, size = account.name, account.size
    unlocked = [node for node in holders if not node.locks(name)]
    in_order = {id(node.holdings[name]) for node in unlocked}
    evictable = sum(map(size, unlocked))
    protected = sum(map(size, holders)) - evictable
    if (account.evictable, account.protected) != (evictable, protected):
        counted = f"{account.evictable} evictable + {account.protected} protected"
        found.append(f"{name}: the account says {counted}, the nodes {evictable} + {protected}")
    if {id(holding) for holding in account.order} != in_order:
        found.append(f"{name}: the eviction order is not exactly the unlocked holders")
    kept = {node.holdings[name]: size(node) for node in holders if node.holdings[name].keep is not None}
    if account.order.kept != kept or account.order.num_kept != sum(kept.values()):
        found.append(f"{name}: {account.order.num_kept} were counted as kept, {sum(kept.values())} are")
    holding = account.order.victim()
    victim = None if holding is None else holding.owner
    if (victim is None) != (not any(account.component.is_evictable(node) for node in unlocked)):
        found.append(f"{name}: the order names {victim}, {len(unlocked)} nodes are unlocked")
    if victim is not None and not account.component.is_evictable(victim):
        found.append(f"{name}: the order names {victim}, which may not be evicted")
    return found
