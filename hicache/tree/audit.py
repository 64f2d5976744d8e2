"""The rules of the tree, as functions from the nodes to the list of their violations.

May import hicache.tree.node, ledger and policy.
"""

from __future__ import annotations

from hicache.tree.ledger import Book
from hicache.tree.node import Component, PageState, Place, Tier, TreeNode
from hicache.tree.policy import RecencyList

_HOLDS = {
    PageState.DEVICE: (True, False),
    PageState.BACKING_UP: (True, False),
    PageState.BOTH: (True, True),
    PageState.HOST: (False, True),
    PageState.LOADING: (True, True),
}
# Tokens behind one element of a value, by place; the page size for pages.
_BY_TOKEN = (Place.FULL_DEVICE, Place.SWA_DEVICE)
_BY_PAGE = (Place.FULL_HOST, Place.SWA_HOST)


def structure_violations(root: TreeNode, page_size: int, num_nodes: int) -> list[str]:
    """Every broken rule of links, keys, states and locks, one line each."""
    found: list[str] = []
    seen = 0
    stack = [(root, child_key, child) for child_key, child in root.children.items()]
    while stack:
        parent, child_key, node = stack.pop()
        seen += 1
        found.extend(_link_violations(parent, child_key, node, page_size))
        found.extend(_value_violations(parent, node, page_size))
        found.extend(_lock_violations(node))
        stack.extend((node, key, child) for key, child in node.children.items())
    if seen != num_nodes:
        found.append(f"{seen} nodes are linked, {num_nodes} were counted")
    return found


def _link_violations(
    parent: TreeNode, child_key: bytes | tuple[str, bytes], node: TreeNode, page_size: int
) -> list[str]:
    found: list[str] = []
    where = f"node {node.id} at depth {node.depth_tokens}"
    if node.parent is not parent:
        found.append(f"{where}: parent link is wrong")
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
    found.extend(f"{where}: follows a span that does not know it" for span in node.spans if node not in span.nodes)
    followed = {span.component for span in node.spans}
    for component in Component:
        if node.pending[component] is not None and component not in followed:
            found.append(f"{where}: {component.name} pages are pending and no copy follows the node")
    return found


def _value_violations(parent: TreeNode, node: TreeNode, page_size: int) -> list[str]:
    found: list[str] = []
    where = f"node {node.id} at depth {node.depth_tokens}"
    held = (node.holds(Tier.DEVICE), node.holds(Tier.HOST))
    if _HOLDS.get(node.state) != held:
        found.append(f"{where}: state {node.state.name} but (device, host) held is {held}")
    if (node.pending[Component.FULL] is not None) != (node.state is PageState.BACKING_UP):
        found.append(f"{where}: pending pages do not fit state {node.state.name}")
    for tier in Tier:
        if node.holds(tier) and not (parent.is_root or parent.holds(tier)):
            found.append(f"{where}: on {tier.name} below a parent that is not")
        children = sum(child.holds(tier) for child in node.children.values())
        if node.children_held[tier] != children:
            found.append(f"{where}: {children} children on {tier.name}, {node.children_held[tier]} were counted")
    for place in Place:
        value = node.values[place]
        if value is None:
            continue
        stride = 1 if place in _BY_TOKEN else page_size
        want = node.num_tokens // stride if place in (*_BY_TOKEN, *_BY_PAGE) else 1
        if len(value) != want:
            found.append(f"{where}: {len(value)} {place.name} elements for {node.num_tokens} tokens")
        if not node.holds(place.tier):
            found.append(f"{where}: holds {place.name} where it does not hold FULL")
    swa = node.values[Place.SWA_DEVICE]
    if swa is not None and node.holds(Tier.DEVICE) and not swa.equal(node.held(Tier.DEVICE)):
        found.append(f"{where}: window slots of other slots than the node's")
    return found


def _lock_violations(node: TreeNode) -> list[str]:
    found = [f"node {node.id}: {node.locks[place]} locks at {place.name}" for place in Place if node.locks[place] < 0]
    for tier in Tier:
        full = node.locks[tier]
        if full < sum(child.locks[tier] for child in node.children.values()):
            found.append(f"node {node.id}: fewer {tier.name} locks than its children")
        for component in (Component.SWA, Component.MAMBA):
            if node.locks[Place.of(component, tier)] > full:
                found.append(f"node {node.id}: more {component.name} locks than FULL ones on {tier.name}")
    return found


def account_violations(book: Book, holders: list[TreeNode]) -> list[str]:
    """The sums and the eviction order of one place against the nodes that hold something there."""
    found: list[str] = []
    place, weight = book.place, book.rules.weight
    free = [node for node in holders if not node.locks[place]]
    evictable = sum(map(weight, free))
    protected = sum(map(weight, holders)) - evictable
    if (book.evictable, book.protected) != (evictable, protected):
        account = f"{book.evictable} evictable + {book.protected} protected"
        found.append(f"{place.name}: account says {account}, the nodes {evictable} + {protected}")
    if {id(node) for node in book.order} != {id(node) for node in free}:
        found.append(f"{place.name}: the eviction order is not exactly the unlocked holders")
    victim = book.order.victim()
    if (victim is None) != (not any(book.rules.may_go(node, place.tier) for node in free)):
        found.append(f"{place.name}: the order names {victim}, {len(free)} nodes are unlocked")
    if victim is not None and not book.rules.may_go(victim, place.tier):
        found.append(f"{place.name}: the order names {victim}, which may not go")
    if isinstance(book.order, RecencyList) and place.component is Component.FULL:
        rank = {id(node): i for i, node in enumerate(book.order)}
        older = [node for node in free if rank.get(id(node.parent), len(rank)) < rank.get(id(node), -1)]
        found.extend(f"{place.name}: the parent of node {node.id} is older than the node" for node in older)
    return found
