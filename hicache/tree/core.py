"""The radix tree: which prefixes are held, by which tier, who needs them, and which goes next.

Owns the nodes, their recency order and the account of tokens per tier. It never calls anyone: insertion returns what
was already there, dropping returns the slots or pages that became free, and the caller acts on them. One thread, the
scheduler's, may use it.

What holds after every call (`check()` proves it):
    nodes that hold DEVICE bytes form a prefix of every path, and so do nodes that hold HOST bytes;
    every node holds bytes in at least one tier;
    per tier, evictable + protected tokens are the tokens held, and the unlocked holders stand in recency order.

May import numpy, torch, layout, config and errors.
"""

from __future__ import annotations

import torch

from hicache.errors import InvariantError
from hicache.tree.audit import account_violations, nodes_below, structure_violations
from hicache.tree.base import Duplicate, Inserted, Match
from hicache.tree.key import PageHasher, Tokens
from hicache.tree.node import TRANSITIONS, PageState, Tier, TreeNode
from hicache.tree.policy import TierBook

_GAIN = {
    (PageState.GONE, Tier.DEVICE): PageState.DEVICE,
    (PageState.GONE, Tier.HOST): PageState.HOST,
    (PageState.HOST, Tier.DEVICE): PageState.BOTH,
    (PageState.DEVICE, Tier.HOST): PageState.BOTH,
    (PageState.BACKING_UP, Tier.HOST): PageState.BOTH,
}
_LOSE = {
    (PageState.DEVICE, Tier.DEVICE): PageState.GONE,
    (PageState.BOTH, Tier.DEVICE): PageState.HOST,
    (PageState.LOADING, Tier.DEVICE): PageState.HOST,
    (PageState.BOTH, Tier.HOST): PageState.DEVICE,
    (PageState.HOST, Tier.HOST): PageState.GONE,
}


class RadixTree:
    """See the module. `page_size`: tokens of a tree page. One root a namespace: prefixes never meet across them."""

    def __init__(self, page_size: int, hasher: PageHasher) -> None:
        self.page_size = page_size
        self._hasher = hasher
        self._roots: dict[str, TreeNode] = {}
        self._books = {Tier.DEVICE: TierBook(Tier.DEVICE, 1), Tier.HOST: TierBook(Tier.HOST, page_size)}
        self.num_nodes = 0

    # Looking

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest held prefix of `tokens`, in whole pages. Changes nothing, recency included."""
        nodes: list[TreeNode] = []
        last_len = device_len = host_len = 0
        node, pos = self._roots.get(namespace), 0
        while node is not None and pos < len(tokens):
            node = node.children.get(self._child_key(tokens, pos))
            if node is None:
                break
            last_len = self._common_len(node.key, tokens, pos)
            nodes.append(node)
            if node.holds(Tier.DEVICE):
                device_len += last_len
            else:
                host_len += last_len
            pos += last_len
            if last_len < len(node.key):
                break
        return Match(namespace, tuple(nodes), last_len, device_len, host_len)

    def unlocked_len(self, match: Match, length: int) -> int:
        """How many of the first `length` matched tokens count as evictable on the device until someone locks them."""
        tokens = pos = 0
        for node in match.nodes:
            used = min(len(node.key), length - pos)
            if used <= 0:
                break
            if node.holds(Tier.DEVICE) and not node.locks[Tier.DEVICE]:
                tokens += used
            pos += used
        return tokens

    def page_keys(self, node: TreeNode) -> list[bytes]:
        """The keys of the node's pages; each is computed once in the life of the page."""
        missing = []
        above = node
        while above.page_keys is None:
            missing.append(above)
            assert above.parent is not None
            above = above.parent
        for below in reversed(missing):
            assert above.page_keys is not None
            below.page_keys = self._hasher.chain(above.page_keys[-1], below.key)
            above = below
        assert node.page_keys is not None
        return node.page_keys

    def keys_of(self, tokens: Tokens, namespace: str) -> list[bytes]:
        """Keys of the whole pages of a prompt, held or not."""
        return self._hasher.chain(self._hasher.seed(namespace), tokens)

    def values(self, tier: Tier) -> list[torch.Tensor]:
        """What every node holds on `tier`: for audits, in no order."""
        return [n.value(tier) for root in self._roots.values() for n in nodes_below(root) if n.holds(tier)]

    def evictable(self, tier: Tier) -> int:
        return self._books[tier].evictable

    def protected(self, tier: Tier) -> int:
        return self._books[tier].protected

    # Growing

    def root(self, namespace: str) -> TreeNode:
        """The root of a namespace, made when missing. It goes again when it is unlocked and has no child."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = TreeNode(torch.empty(0, dtype=torch.int64).numpy(), None)
            root.page_keys = [self._hasher.seed(namespace)]
        return root

    def node_at(self, match: Match, length: int) -> TreeNode:
        """The node that ends after the first `length` tokens of the match; splits one when it has to."""
        node, pos = self.root(match.namespace), 0
        for below in match.nodes:
            if pos == length:
                break
            take = min(len(below.key), length - pos)
            node = below if take == len(below.key) else self._split(below, take)
            pos += take
        assert pos == length, f"asked for {length} tokens of a match of {pos}"
        return node

    def insert(self, parent: TreeNode, tokens: Tokens, value: torch.Tensor, tier: Tier) -> Inserted:
        """Hold whole pages `tokens`, which follow `parent`, on `tier` as `value` (slots or pages). `value` is
        copied."""
        stride = self._books[tier].stride
        gained: list[TreeNode] = []
        duplicates: list[Duplicate] = []
        node, pos = parent, 0
        while pos < len(tokens):
            if tier is Tier.HOST and not (node.is_root or node.holds(Tier.HOST)):
                break
            child = node.children.get(self._child_key(tokens, pos))
            if child is None:
                child = self._link(TreeNode(tokens[pos:].copy(), node))
            else:
                common = self._common_len(child.key, tokens, pos)
                child = child if common == len(child.key) else self._split(child, common)
            end = pos + len(child.key)
            if child.holds(tier):
                duplicates.append(Duplicate(pos, end, child.value(tier)))
            elif tier is Tier.HOST and child.state is PageState.BACKING_UP:
                break
            else:
                child.hit_count = max(1, child.hit_count)
                self._gain(child, tier, value[pos // stride : end // stride].clone())
                gained.append(child)
            node, pos = child, end
        return Inserted(node, tuple(gained), tuple(duplicates), pos)

    def cut_tail(self, node: TreeNode, keep: int) -> TreeNode:
        """Split `node` after its first `keep` tokens; returns the part behind them."""
        self._split(node, keep)
        return node

    def keys_after(self, node: TreeNode, tokens: Tokens) -> list[bytes]:
        """Keys of the whole pages `tokens` would have below `node`."""
        return self._hasher.chain(self.page_keys(node)[-1], tokens)

    # Copies in flight

    def begin_backup(self, node: TreeNode, pages: torch.Tensor) -> None:
        """A copy of `node` to host `pages` was submitted."""
        self._move(node, PageState.BACKING_UP)
        node.pending_pages = pages.clone()

    def end_backup(self, node: TreeNode, confirmed: bool) -> torch.Tensor | None:
        """The copy ended. Confirmed: the host holds the node too. Else the pages come back, to be freed."""
        pages, node.pending_pages = node.pending_pages, None
        assert node.parent is not None and pages is not None
        if confirmed and (node.parent.is_root or node.parent.holds(Tier.HOST)):
            self._gain(node, Tier.HOST, pages)
            return None
        self._move(node, PageState.DEVICE)
        return pages

    def begin_load(self, node: TreeNode, slots: torch.Tensor) -> None:
        """A copy of `node` to device `slots` was submitted; matches see it on the device from now on."""
        self._move(node, PageState.LOADING)
        self._account(node, Tier.DEVICE, slots.clone())

    def end_load(self, node: TreeNode, confirmed: bool) -> torch.Tensor | None:
        """The copy ended. Failed: the node is on the host only again, and its slots come back."""
        if confirmed:
            self._move(node, PageState.BOTH)
            return None
        return self._lose(node, Tier.DEVICE)

    # Needing and letting go

    def lock(self, node: TreeNode, tier: Tier) -> None:
        """Keep the whole path to `node` on `tier` until `unlock`."""
        book = self._books[tier]
        for at in node.path():
            if not at.locks[tier] and at.holds(tier):
                book.recency.remove(at)
                book.evictable -= len(at.key)
                book.protected += len(at.key)
            at.locks[tier] += 1
        self._root_of(node).locks[tier] += 1

    def unlock(self, node: TreeNode, tier: Tier) -> None:
        """Undo one `lock`; what nobody needs any more becomes the newest of the evictable."""
        book = self._books[tier]
        root = self._root_of(node)
        for at in node.path():
            at.locks[tier] -= 1
            assert at.locks[tier] >= 0, "unlocked more often than locked"
            if not at.locks[tier] and at.holds(tier):
                book.recency.append(at)
                book.evictable += len(at.key)
                book.protected -= len(at.key)
        root.locks[tier] -= 1
        self._prune_root(root)

    def touch(self, node: TreeNode, tier: Tier) -> None:
        """Make the unlocked part of the path to `node` the newest of its tier."""
        recency = self._books[tier].recency
        for at in node.path():
            if at in recency:
                recency.remove(at)
                recency.append(at)

    def victim(self, tier: Tier) -> TreeNode | None:
        """The node that should leave `tier` next: held, unlocked, without a child on that tier."""
        return self._books[tier].recency.oldest()

    def drop(self, node: TreeNode, tier: Tier) -> torch.Tensor:
        """Take `node`, unlocked and childless on `tier`, from that tier; returns its slots or pages, to be freed."""
        assert not node.locks[tier], "dropped a node that is needed"
        assert not any(child.holds(tier) for child in node.children.values()), "dropped a node with a child on the tier"
        value = self._lose(node, tier)
        if node.state is PageState.GONE:
            self._unlink(node)
        return value

    def check(self) -> None:
        """Raise `InvariantError` with every violation of the rules above."""
        found = structure_violations(self._roots, self.page_size, self.num_nodes)
        nodes = [node for root in self._roots.values() for node in nodes_below(root)]
        for tier, book in self._books.items():
            found.extend(account_violations(tier, book, [node for node in nodes if node.holds(tier)]))
        if found:
            raise InvariantError("tree", found)

    # Inside

    def _child_key(self, tokens: Tokens, pos: int) -> bytes:
        return tokens[pos : pos + self.page_size].tobytes()

    def _common_len(self, key: Tokens, tokens: Tokens, pos: int) -> int:
        """Equal tokens of `key` and `tokens[pos:]`, in whole pages."""
        length = min(len(key), len(tokens) - pos)
        same = key[:length] == tokens[pos : pos + length]
        if not same.all():
            length = int(same.argmin())
        return length - length % self.page_size

    def _link(self, node: TreeNode) -> TreeNode:
        assert node.parent is not None
        node.parent.children[self._child_key(node.key, 0)] = node
        self.num_nodes += 1
        return node

    def _unlink(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None and not node.children and not node.spans
        del parent.children[self._child_key(node.key, 0)]
        self.num_nodes -= 1
        if parent.is_root:
            self._prune_root(parent)

    def _prune_root(self, root: TreeNode) -> None:
        if not root.children and not any(root.locks):
            for namespace in [name for name, node in self._roots.items() if node is root]:
                del self._roots[namespace]

    @staticmethod
    def _root_of(node: TreeNode) -> TreeNode:
        while node.parent is not None:
            node = node.parent
        return node

    def _split(self, lower: TreeNode, at: int) -> TreeNode:
        """Cut `lower` after its first `at` tokens; returns the new node above it.

        lower.key: [0, at) goes to the upper node, [at, len) stays. Locks, state and flags hold for both halves.
        """
        upper = TreeNode(lower.key[:at].copy(), lower.parent)
        upper.locks = list(lower.locks)
        upper.state, upper.stored, upper.from_disk = lower.state, lower.stored, lower.from_disk
        upper.hit_count = lower.hit_count
        lower.key = lower.key[at:].copy()
        cut_pages = at // self.page_size
        if lower.page_keys is not None:
            upper.page_keys, lower.page_keys = lower.page_keys[:cut_pages], lower.page_keys[cut_pages:]
        if lower.pending_pages is not None:
            upper.pending_pages = lower.pending_pages[:cut_pages].clone()
            lower.pending_pages = lower.pending_pages[cut_pages:].clone()
        for tier, book in self._books.items():
            value = lower.values[tier]
            if value is not None:
                upper.values[tier] = value[: at // book.stride].clone()
                lower.values[tier] = value[at // book.stride :].clone()
            if lower in book.recency:
                book.recency.insert_after(upper, lower)
        for span in lower.spans:
            span.nodes.insert(span.nodes.index(lower), upper)
            upper.spans.append(span)
        self._link(upper)
        lower.parent = upper
        upper.children[self._child_key(lower.key, 0)] = lower
        return upper

    @staticmethod
    def _move(node: TreeNode, to: PageState) -> None:
        assert to in TRANSITIONS[node.state], f"no way from {node.state} to {to}"
        node.state = to

    def _gain(self, node: TreeNode, tier: Tier, value: torch.Tensor) -> None:
        self._move(node, _GAIN[node.state, tier])
        self._account(node, tier, value)

    def _account(self, node: TreeNode, tier: Tier, value: torch.Tensor) -> None:
        """Enter a value; an unlocked node becomes the newest, with its path, so that parents stay newer."""
        book = self._books[tier]
        assert len(value) * book.stride == len(node.key)
        node.values[tier] = value
        if node.locks[tier]:
            book.protected += len(node.key)
        else:
            book.evictable += len(node.key)
            book.recency.append(node)
            self.touch(node, tier)

    def _lose(self, node: TreeNode, tier: Tier) -> torch.Tensor:
        book = self._books[tier]
        value = node.value(tier)
        self._move(node, _LOSE[node.state, tier])
        node.values[tier] = None
        if node.locks[tier]:
            book.protected -= len(node.key)
        else:
            book.evictable -= len(node.key)
            book.recency.remove(node)
        return value
