"""The rules of the tree, as functions from the nodes to the list of their violations.

May import hicache.tree.node and hicache.tree.policy.
"""

from __future__ import annotations

from hicache.tree.node import PageState, Tier, TreeNode
from hicache.tree.policy import TierBook

_HOLDS = {
    PageState.DEVICE: (True, False),
    PageState.BACKING_UP: (True, False),
    PageState.BOTH: (True, True),
    PageState.HOST: (False, True),
    PageState.LOADING: (True, True),
}


def structure_violations(roots: dict[str, TreeNode], page_size: int, num_nodes: int) -> list[str]:
    """Every broken rule, one line each."""
    found: list[str] = []
    seen = 0
    for namespace, root in roots.items():
        if not root.children and not any(root.locks):
            found.append(f"namespace {namespace!r}: an unlocked root without children was kept")
        stack = [(root, child_key, child) for child_key, child in root.children.items()]
        while stack:
            parent, child_key, node = stack.pop()
            seen += 1
            found.extend(_node_violations(parent, child_key, node, page_size))
            stack.extend((node, key, child) for key, child in node.children.items())
        for tier in Tier:
            needed = sum(child.locks[tier] for child in root.children.values())
            if root.locks[tier] < needed:
                found.append(f"namespace {namespace!r}: root has fewer {tier.name} locks than its children")
    if seen != num_nodes:
        found.append(f"{seen} nodes are linked, {num_nodes} were counted")
    return found


def _node_violations(parent: TreeNode, child_key: bytes, node: TreeNode, page_size: int) -> list[str]:
    found: list[str] = []
    where = f"node at depth {node.depth_tokens}"
    if node.parent is not parent:
        found.append(f"{where}: parent link is wrong")
    if not len(node.key) or len(node.key) % page_size:
        found.append(f"{where}: {len(node.key)} tokens are no whole pages of {page_size}")
    if node.key[:page_size].tobytes() != child_key:
        found.append(f"{where}: is filed under another first page")
    held = (node.holds(Tier.DEVICE), node.holds(Tier.HOST))
    if _HOLDS.get(node.state) != held:
        found.append(f"{where}: state {node.state.name} but (device, host) held is {held}")
    if (node.pending_pages is not None) != (node.state is PageState.BACKING_UP):
        found.append(f"{where}: pending pages do not fit state {node.state.name}")
    for tier, stride in ((Tier.DEVICE, 1), (Tier.HOST, page_size)):
        value = node.values[tier]
        if value is not None and len(value) * stride != len(node.key):
            found.append(f"{where}: {len(value)} {tier.name} elements for {len(node.key)} tokens")
        if value is not None and not (parent.is_root or parent.holds(tier)):
            found.append(f"{where}: on {tier.name} below a parent that is not")
        if node.locks[tier] < sum(child.locks[tier] for child in node.children.values()):
            found.append(f"{where}: fewer {tier.name} locks than its children")
    if node.page_keys is not None and len(node.page_keys) * page_size != len(node.key):
        found.append(f"{where}: {len(node.page_keys)} page keys for {len(node.key)} tokens")
    for span in node.spans:
        if node not in span.nodes:
            found.append(f"{where}: follows a span that does not know it")
    return found


def account_violations(tier: Tier, book: TierBook, holders: list[TreeNode]) -> list[str]:
    """The sums and the recency order of one tier against the nodes that hold it."""
    found: list[str] = []
    free = [node for node in holders if not node.locks[tier]]
    evictable = sum(len(node.key) for node in free)
    protected = sum(len(node.key) for node in holders) - evictable
    if (book.evictable, book.protected) != (evictable, protected):
        account = f"{book.evictable} evictable + {book.protected} protected"
        found.append(f"{tier.name}: account says {account}, the nodes {evictable} + {protected}")
    rank = {id(node): i for i, node in enumerate(book.recency)}
    if set(rank) != {id(node) for node in free}:
        found.append(f"{tier.name}: recency order is not exactly the unlocked holders")
    for node in free:
        parent = rank.get(id(node.parent), len(rank))
        if parent < rank.get(id(node), -1):
            found.append(f"{tier.name}: a parent is older than its child")
    return found


def nodes_below(root: TreeNode) -> list[TreeNode]:
    """All nodes under a root, in no order."""
    found: list[TreeNode] = []
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found
