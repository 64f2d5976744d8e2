"""The radix tree: which prefixes are held, by which tier, who needs them, and which is evicted next.

Owns the nodes. It never calls anyone: insertion returns what was already there, dropping returns the slots, pages and
states that became free, and the caller acts on them. One thread, the scheduler's, may use it.

What holds after every call (`check()` proves it):
    nodes that hold FULL on the device form a prefix of every path, and so do nodes that hold FULL on the host;
    every node holds FULL in at least one tier, and other components only on tiers where it holds FULL;
    a recurrent state is at the end of the tokens that it has consumed;
    for each component on each tier, evictable + protected is what is held, and the eviction order contains exactly the
    unlocked holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.tiers import DEVICE, FULL, HOST, SWA, Component, Tier, own
from hicache.tree.accounts import Accounts
from hicache.tree.audit import account_violations, structure_violations
from hicache.tree.base import Duplicate, Inserted, Match, Released
from hicache.tree.components import FullComponent, TreeComponent
from hicache.tree.events import EventLog, Medium
from hicache.tree.key import PageHasher, TokenRun, Tokens, bytes_of
from hicache.tree.names import PageNames
from hicache.tree.node import ChildKey, TreeNode

_MEDIUM: dict[Tier, Medium] = {DEVICE: "GPU", HOST: "CPU"}


class RadixTree(Accounts):
    """See the module. `page_size`: tokens of a tree page. Prefixes never meet across namespaces.

    `components`: those beside FULL. `policy`: the eviction order of every component and tier. With `events`, pages that
    come and go are reported to that log, which costs their keys at once.
    """

    def __init__(
        self,
        page_size: int,
        hasher: PageHasher,
        components: Sequence[TreeComponent] = (),
        policy: str = "lru",
        events: EventLog | None = None,
        node_type: type[TreeNode] = TreeNode,
    ) -> None:
        super().__init__((FullComponent(), *components), policy)
        self.page_size = page_size
        self._names = tuple(component.name for component in self.components)
        self._sharing_names = tuple(component.name for component in self.components if component.shares_full_slots)
        self._ends_matches = any(component.ends_matches for component in self.components)
        self._new_node = node_type
        self.root = self._new_node(run=TokenRun(np.empty(0, np.int64)), components=self._names)
        self.num_nodes = 0
        self.names, self.events = PageNames(hasher), events

    # Looking

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest prefix of `tokens` whose full pages are held. Changes nothing, recency included."""
        nodes: list[TreeNode] = []
        last_len = device_len = pos = 0
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
            if node.full[DEVICE].value is not None:
                device_len = pos
            if last_len < node.num_tokens:
                break
        return Match(namespace, tuple(nodes), last_len, device_len, pos)

    def usable_len(self, match: Match, limit: int, on_host: bool) -> int:
        """The longest part of the first `limit` tokens of a match that all components can use.

        `on_host`: window pages and states that only the host holds count, for they can be loaded.
        """
        if len(self.components) == 1:
            return min(limit, match.full_len)
        walks, best, pos = [component.new_walk() for component in self.components[1:]], 0, 0
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
            device = node.full[DEVICE]
            if device.value is not None and not device.locks:
                tokens += used
            pos += used
        return tokens

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def values(self, component: Component, tier: Tier) -> list[torch.Tensor]:
        """What every node holds there: for audits, in no order."""
        return [node.held(component, tier) for node in self.nodes() if node.holds(component, tier)]

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
        device: tokens from there on have window slots mapped to their slots; a split is made there. A recurrent state
        is attached to `Inserted.node` by `attach`.
        """
        gained: list[TreeNode] = []
        duplicates: list[Duplicate] = []
        raw, stride = bytes_of(tokens), 1 if tier is DEVICE else self.page_size
        node, pos, account = parent, 0, self.account(FULL, tier)
        namespace = namespace if parent.parent is None else parent.namespace
        while pos < len(tokens):
            if tier is HOST and not (node.is_root or node.holds(FULL, HOST)):
                break
            limit = len(tokens) if window_from is None or pos >= window_from else window_from
            if account.log is not None:
                run = raw[8 * pos : 8 * limit]
                limit = pos + account.like_tokens(account.log, namespace, node.depth_tokens, run, self.page_size)
            child = self._child(node, tokens, raw, pos, limit, namespace)
            end = pos + child.num_tokens
            windows = window_from is not None and pos >= window_from
            if (tier is DEVICE and child.is_loading) or (tier is HOST and child.pending(FULL) is not None):
                break
            held = child.full[tier].value
            if held is not None:
                adopts = windows and not child.holds(SWA, DEVICE)
                duplicates.append(Duplicate(pos, end, held, adopts))
            else:
                adopts = windows
                child.hit_count = max(1, child.hit_count)
                part = value if not pos and end == len(tokens) else value[pos // stride : end // stride]
                self._gain(child, FULL, tier, own(part))
                gained.append(child)
            if adopts:
                self._enter(child, SWA, DEVICE, child.held(FULL, DEVICE))
            node, pos = child, end
        return Inserted(node, tuple(gained), tuple(duplicates), pos)

    def withdraw(self, inserted: Inserted, attached: Iterable[Component]) -> list[Released]:
        """Undo an insertion on the device, and what was `attached` to its end: what it gave is the caller's again. Only
        before anybody has locked it. Splits stay; returns what other tiers held of nodes that go, to be freed."""
        for component in attached:
            self.detach(inserted.node, component, DEVICE)
        released: list[Released] = []
        start = inserted.node.depth_tokens - inserted.accepted_len
        for node in inserted.node.path():
            end = node.depth_tokens - start
            if end <= 0:
                break
            duplicate = next((at for at in inserted.duplicates if at.start < end <= at.end), None)
            if duplicate is None:
                self._drop_tier(node, DEVICE, [])
                self._prune(node, released)
            elif duplicate.adopts_window:
                self._take_out(node, SWA, DEVICE)
        return released

    def attach(self, node: TreeNode, component: Component, tier: Tier, value: torch.Tensor) -> bool:
        """Give `node` what it may lack of a component; False where it has it, and `value` stays the caller's.

        What a backup in flight brings to the host counts as there.
        A state has consumed exactly the tokens up to the end of `node`. Of windows on the device `value` is not kept:
        the full slots of the node are, whose window slots are mapped.
        """
        assert node.holds(FULL, tier), "no component is held where FULL is not"
        holding = node.holdings[component][tier]
        if holding.value is not None or holding.pending is not None:
            return False
        account = self.account(component, tier)
        shares = account.component.shares_full_slots and tier is DEVICE
        self._enter(node, component, tier, node.held(FULL, DEVICE) if shares else own(value.reshape(-1)))
        return True

    def detach(self, node: TreeNode, component: Component, tier: Tier) -> Released:
        """Undo `attach`, whatever the locks: what was to be copied there was not."""
        return self._lose(node, component, tier)

    def split_suffix(self, node: TreeNode, num_kept: int) -> TreeNode:
        """Split `node` after its first `num_kept` tokens; returns the part after them."""
        self._split(node, num_kept)
        return node

    def split_prefix(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Split `node` after its first `num_tokens` tokens; returns those."""
        return self._split(node, num_tokens)

    # Copies in flight

    def begin_backup(self, node: TreeNode, component: Component, pages: torch.Tensor) -> None:
        """A copy of what `component` holds of `node` to host `pages` was submitted."""
        holding = node.holdings[component][HOST]
        assert holding.pending is None and holding.value is None
        holding.pending = own(pages)

    def end_backup(self, node: TreeNode, component: Component, confirmed: bool) -> torch.Tensor | None:
        """The copy ended. Confirmed: the host holds it too. Else the pages come back, to be freed. FULL ends first."""
        holding = node.holdings[component][HOST]
        pages, holding.pending = holding.pending, None
        assert pages is not None and node.parent is not None
        above = node.parent if component == FULL else node
        if confirmed and (above.parent is None or above.holds(FULL, HOST)):
            self._gain(node, component, HOST, pages)
            return None
        return pages

    def begin_load(self, node: TreeNode, slots: torch.Tensor) -> None:
        """A copy of `node` to device `slots` was submitted; matches see it on the device from now on."""
        self._gain(node, FULL, DEVICE, own(slots))

    def fail_load(self, node: TreeNode) -> torch.Tensor:
        """The copy failed: the node is on the host only again, and its slots come back (windows and all)."""
        self._lose_shared(node)
        return self._lose(node, FULL, DEVICE).value

    # Locks and eviction

    def victim(self, component: Component, tier: Tier, num_tokens: int | None = None) -> TreeNode | None:
        """The node that should lose `component` on `tier` next, if any may.

        With `num_tokens`, split down to its last pages where fewer than all are needed: the front of a long prefix
        outlives its end. It is not split where that would help nobody: a value at its end cannot be divided, and where
        matches end at values only, the front could end none.
        """
        account = self.account(component, tier)
        holding = account.order.victim()
        node = None if holding is None else holding.owner
        if node is None or num_tokens is None or self._ends_matches or account.component.at_node_end:
            return node
        num_evicted = -(-num_tokens // self.page_size) * self.page_size
        return node if node.num_tokens <= num_evicted else self.split_suffix(node, node.num_tokens - num_evicted)

    def drop(self, node: TreeNode, component: Component, tier: Tier) -> list[Released]:
        """Take what nobody has locked from `node`; returns all that left the tree, to be freed.

        With FULL go the other components on that tier. A leaf that no match can end in any more is removed, and so is
        its parent where the same holds then.
        """
        assert not node.locks(component, tier), "dropped what is locked"
        released: list[Released] = []
        if component == FULL:
            assert not node.children_on[tier], "dropped a node with a child on the tier"
            self._drop_tier(node, tier, released)
        else:
            released.append(self._lose(node, component, tier))
        self._prune(node, released)
        return released

    def check(self) -> None:
        """Raise `InvariantError` with every violation of the rules above."""
        found = structure_violations(self.root, self.components, self.page_size, self.num_nodes)
        nodes = self.nodes()
        for pair in self._by_component.values():
            for account in pair:
                holders = [node for node in nodes if node.holds(account.name, account.tier)]
                found.extend(account_violations(account, holders))
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
        upper.source, upper.hit_count, upper.priority = lower.source, lower.hit_count, lower.priority
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        cut_pages = at // self.page_size
        if lower.page_keys is not None:
            upper.page_keys, lower.page_keys = lower.page_keys[:cut_pages], lower.page_keys[cut_pages:]
        lower.run, lower.num_tokens = TokenRun(tokens[at:]), lower.num_tokens - at
        self._link(upper, lower, self._child_key(upper, bytes_of(tokens), at, lower.namespace))
        self._divide(upper, lower, self.page_size)
        self.num_nodes += 1
        return upper

    def _gain(self, node: TreeNode, component: Component, tier: Tier, value: torch.Tensor) -> None:
        self._enter(node, component, tier, value)
        if self.events is not None and component == FULL:
            self.events.stored(node, self.names, _MEDIUM[tier])

    def _lose(self, node: TreeNode, component: Component, tier: Tier) -> Released:
        if self.events is not None and component == FULL:
            self.events.removed(self.names.of(node), _MEDIUM[tier])
        return self._take_out(node, component, tier)

    def _lose_shared(self, node: TreeNode) -> None:
        """Take out what shares the device's full slots and leaves with them."""
        for name in self._sharing_names:
            if node.holds(name, DEVICE):
                self._take_out(node, name, DEVICE)

    def _drop_tier(self, node: TreeNode, tier: Tier, released: list[Released]) -> None:
        """Take all that `node` holds on `tier`."""
        if tier is DEVICE:
            self._lose_shared(node)
        for name in reversed(self._names):
            if node.holds(name, tier):
                released.append(self._lose(node, name, tier))

    def _prune(self, node: TreeNode, released: list[Released]) -> None:
        """Unlink `node` where it holds nothing, or is an unlocked leaf that no match can end in; then its parents.

        A lock on a tier where a node holds nothing does not keep it; it is undone as ever, for the path stays.
        """
        while not node.children and (parent := node.parent) is not None:
            if node.full[DEVICE].value is not None or node.full[HOST].value is not None:
                # FULL is held: only another component can be missing.
                if not any(component.is_dead(node) for component in self.components[1:]) or node.is_locked:
                    break
                for tier in Tier:
                    self._drop_tier(node, tier, released)
            assert not node.runs
            del parent.children[node.child_key]
            self.num_nodes -= 1
            node = parent
