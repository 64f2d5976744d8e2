"""The radix tree: the prefixes on the device, with their locks and their eviction.

A node has rows of the page table. All other properties of its pages are columns: one `DevicePages` per component. The
tree calls no other part of the engine: an insertion returns the slots that the tree already had, an eviction returns
the slots and states that the caller frees. Scheduler thread only.

Invariants after every call, which `check()` verifies: the device has all pages of all nodes, so the device has a prefix
of every path. A page with a window or state also has its full slots, and the full slots are locked if the window or
state is locked. For each component, evictable + protected = size on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import InvariantError
from hicache.pages.components import FullComponent, TreeComponent, last_end
from hicache.pages.device import DevicePages
from hicache.pages.events import EventLog
from hicache.pages.key import PageHasher, PromptPages, TokenRun, Tokens, bytes_of
from hicache.pages.node import ChildKey, Inserted, Match, Released, TreeNode
from hicache.pages.order import rank_policy
from hicache.pages.states import TierPages
from hicache.pages.table import NO_ROW, NO_ROWS, Columns, PageTable, Rows
from hicache.tiers import FULL, SWA, Component

_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_NAME_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)

Expectation = Mapping[Component, Rows]
"""The pages that a queued request needs, by component."""


class RadixTree(Columns):
    """The prefix tree of the device; the module's docstring has its invariants. `page_size`: tokens of a page. Prompts
    of different namespaces share no pages.

    `components`: all components except FULL. `policy`: the eviction order of every component. `events`: a log of the
    pages that the tree adds and removes; with events, each page has a key. `is_below`: returns whether a tier below has
    the window or state that the last page of a leaf lacks, so that a match may end in the leaf. `has_lower_tier`:
    evicted pages go to a tier below, so that a match may continue on that tier after any leaf. `below`: the full pages
    of the tier below; both tiers use its table, with one row for a page. None: the tree has its own table, and computes
    keys only on demand.

    `node`: for each row, the number of the node with this row; -1 for a row that the device lacks. `pages`: the pages
    of each component on the device.
    """

    fields: ClassVar = {"node": (np.int64, -1)}
    unclean: ClassVar = frozenset({"node"})
    node: npt.NDArray[np.int64]

    def __init__(
        self,
        page_size: int,
        hasher: PageHasher,
        components: Sequence[TreeComponent] = (),
        policy: str = "lru",
        events: EventLog | None = None,
        node_type: type[TreeNode] = TreeNode,
        is_below: Callable[[TreeNode, Component], bool] | None = None,
        has_lower_tier: bool = False,
        below: TierPages | None = None,
    ) -> None:
        self.page_size, self.events, self._hasher = page_size, events, hasher
        self.components: tuple[TreeComponent, ...] = (FullComponent(), *components)
        self._below = below
        self.table = PageTable() if below is None else below.table
        self._is_keyed = below is not None or events is not None
        self.table.add_columns(self)
        self.pages = dict[Component, DevicePages]()
        for component in self.components:
            size = 1 if component.at_node_end else page_size
            self.pages[component.name] = DevicePages(
                self.table,
                rank_policy(policy),
                size,
                self.pages.get(FULL),
                shares_slots=component.shares_full_slots,
            )
        self._full, self._windows = self.pages[FULL], self.pages.get(SWA)
        self._others = tuple(zip(components, [*self.pages.values()][1:], strict=True))
        self._by_name = {component.name: component for component in self.components}
        self._reads_names = self._full.order.policy.reads_names
        self._new_node, self._is_below, self._has_lower_tier = node_type, is_below, has_lower_tier
        self.root = self._new_node(run=TokenRun(np.empty(0, np.int64)))
        self._nodes = dict[int, TreeNode]()
        self._path = self.root, 0, NO_ROWS  # the path that was joined last: its last node, its tokens and its rows

    # Questions

    @property
    def num_nodes(self) -> int:
        """The number of nodes, without the root."""
        return len(self._nodes)

    def node_of(self, row: int) -> TreeNode:
        """Return the node that has a row of the device."""
        return self._nodes[int(self.node[row])]

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return the longest prefix of `tokens` whose full pages are on the device. Changes nothing, not even
        recency."""
        nodes, pieces, pos = list[TreeNode](), list[Rows](), 0
        raw, page, num_tokens = bytes_of(tokens), self.page_size, len(tokens)
        node: TreeNode | None = self.root
        while node is not None and pos < num_tokens:
            first = raw[pos * 8 : (pos + page) * 8].tobytes()
            node = node.children.get((namespace, first) if node.parent is None else first)
            if node is None or node.run is None:
                break
            length = node.run.common_len(tokens, raw, pos)
            length -= length % page
            nodes.append(node)
            pieces.append(node.rows[: length // page])
            pos += length
            if length < node.num_tokens:
                break
        return Match(namespace, tuple(nodes), _joined(pieces), pos)

    def usable_len(self, match: Match) -> int:
        """Return the length of the longest prefix of a match that all components can use."""
        if len(self.components) == 1:
            return match.full_len
        page, held = self.page_size, {name: pages.has(match.rows) for name, pages in self.pages.items()}
        # For each page: the index of the last page, up to and including this page, that the device has.
        last = {name: np.maximum.accumulate(np.where(has, np.arange(len(has)), -1)) for name, has in held.items()}

        def gap(component: TreeComponent, start: int, end: int) -> int | None:
            """Return the start of the last gap among the pages of tokens [start, end); None if there is no gap."""
            lacking = np.flatnonzero(~held[component.name][start // page : end // page])
            return None if not len(lacking) else (int(last[component.name][start // page + lacking[-1]]) + 1) * page

        return last_end(self.components[1:], match.full_len, 0, gap)

    def to_protect(self, name: Component, match: Match, end: int, length: int) -> int:
        """Return the tokens or states in evictable pages of a component that would be locked by a lock at token `end`
        of a match, for a prefix of `length` tokens."""
        component, pages = self._by_name[name], self.pages[name]
        rows = match.rows[component.first_required(length) // self.page_size : end // self.page_size]
        return int(np.count_nonzero(pages.order.is_held[rows] & (pages.order.locks[rows] == 0))) * pages.size

    def path_rows(self, node: TreeNode, start: int = 0) -> Rows:
        """Return the pages of the prefix that ends with `node`, from the page of token `start` on. The caller must not
        change the array."""
        end, num_tokens, rows = self._path
        if end is node and num_tokens == node.depth_tokens:
            return rows[start // self.page_size :] if start else rows
        if start or end is not node.parent or num_tokens + node.num_tokens != node.depth_tokens:
            rows = _joined(self._pieces(node, start))
        else:
            rows = np.concatenate((rows, node.rows)) if num_tokens else node.rows
        if not start:  # a split of a node does not change the rows of a path
            self._path = node, node.depth_tokens, rows
        return rows

    def required_rows(self, name: Component, node: TreeNode) -> Rows:
        """Return the pages whose values of a component are needed by the prefix that ends with `node`."""
        return self.path_rows(node, self._by_name[name].required_from(node))

    def alone_rows(self, node: TreeNode, start: int = 0) -> Rows:
        """Return the pages of the path to `node`, after `start` tokens, that only this prompt has; none if another
        prompt continues after `node`."""
        pieces = list[Rows]()
        while node.parent is not None and node.depth_tokens > start and len(node.children) <= bool(pieces):
            pieces.append(node.rows)
            node = node.parent
        return _joined(pieces[::-1])

    def nodes(self) -> list[TreeNode]:
        """Return all nodes without the root, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def nodes_of(self, rows: Rows) -> dict[TreeNode, int]:
        """Return the nodes of `rows`, in the order of their first rows, with the number of rows in each node."""
        if len(rows) == 1:
            return {self.node_of(rows[0]): 1}
        if not len(rows):
            return {}
        numbers = self.node[self.table.span(rows)]
        ends = [*((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        found, start = dict[TreeNode, int](), 0
        for end, number in zip(ends, numbers[[end - 1 for end in ends]].tolist(), strict=True):
            node = self._nodes[number]
            found[node] = found.get(node, 0) + end - start
            start = end
        return found

    def by_node(self, rows: Rows) -> list[Rows]:
        """Group rows by node, in the order of their first rows; each group is in the order of the prompt."""
        parts = [rows[self.node[rows] == node.id] for node in self.nodes_of(rows)]
        return [part[np.argsort(self.table.index[part])] for part in parts]

    def event_pages(self, rows: Rows) -> PromptPages:
        """Return consecutive pages of a prompt as events report them."""
        page, index, pieces = self.page_size, self.table.index, list[Tokens]()
        before, start, end = int(self.table.previous[rows[0]]), int(index[rows[0]]), int(index[rows[-1]]) + 1
        for node in self.nodes_of(rows):
            assert node.run is not None
            first = int(index[node.rows[0]])
            pieces.append(node.run.tokens[max(0, start - first) * page : (end - first) * page])
            namespace = node.namespace
        previous_key = None if before == NO_ROW else self.table.keys[before]
        return PromptPages(self.table.keys_of(rows), previous_key, np.concatenate(pieces), namespace)

    def keys_of(self, node: TreeNode) -> list[bytes]:
        """Return the page keys of a node. Each key is computed on demand, and only once."""
        unnamed, keys = [], self.table.keys
        above: TreeNode | None = node
        while above is not None and len(above.rows) and keys[above.rows[-1]] is None:
            unnamed.append(above)
            above = above.parent
        for below in reversed(unnamed):
            assert below.run is not None and below.parent is not None
            self.table.set_keys(below.rows, self._following(below.parent, below.namespace, below.run.tokens))
        return self.table.keys_of(node.rows)

    def prompt_keys(self, match: Match, tokens: Tokens) -> list[bytes]:
        """Return the keys of the complete pages of a prompt. `match`: the match of the prompt in the tree."""
        if match.nodes and not self._is_keyed:
            self.keys_of(match.nodes[-1])
        keys = self.table.keys_of(match.rows)
        previous = keys[-1] if keys else self._hasher.seed(match.namespace)
        return keys + self._hasher.chain(previous, tokens[len(keys) * self.page_size :])

    def values(self, name: Component) -> torch.Tensor:
        """Return all values of a component on the device, in no order."""
        return self.pages[name].value(self.pages[name].rows_held())

    def evictable(self, name: Component) -> int:
        return self.pages[name].evictable

    def protected(self, name: Component) -> int:
        return self.pages[name].protected

    # Growing

    def node_at(self, match: Match, length: int) -> TreeNode:
        """Return the node that ends after the first `length` tokens of the match, split if necessary."""
        node, pos = self.root, 0
        for below in match.nodes:
            if pos == length:
                break
            take = min(below.num_tokens, length - pos)
            node = below if take == below.num_tokens else self.split(below, take)
            pos += take
        assert pos == length, f"asked for {length} tokens of a match of {pos}"
        return node

    def insert(
        self,
        parent: TreeNode,
        tokens: Tokens,
        value: torch.Tensor,
        namespace: str = "",
        window_from: int | None = None,
        end_values: Mapping[Component, torch.Tensor] | None = None,
        keys: Sequence[bytes] = (),
        rows: Rows | None = None,
    ) -> Inserted:
        """Add complete pages `tokens` after `parent`, without locks. `value`: the slots of the tokens; the tree copies
        this tensor.

        Stops before a page that a load in flight writes, because the load may fail (`Inserted.accepted_len`).
        `window_from`: tokens from this position on have window slots mapped to their slots; nodes end at this position.
        `end_values`: values at the end of `tokens`, like a recurrent state, see `attach`. `keys`: known keys of the
        first pages. `rows`: the rows of the pages, if the table has a row for each page.
        """
        page, raw, node, pos = self.page_size, bytes_of(tokens), parent, 0
        existing, gained, adopted = list[Rows](), list[Rows](), list[tuple[int, int]]()
        namespace = namespace if parent.parent is None else parent.namespace
        while pos < len(tokens):
            has_windows = window_from is not None and pos >= window_from
            limit = len(tokens) if window_from is None or has_windows else window_from
            first = raw[pos * 8 : (pos + page) * 8].tobytes()
            child_key = (namespace, first) if node.parent is None else first
            child = node.children.get(child_key)
            if child is None:
                span, last = slice(pos // page, limit // page), NO_ROW if node is self.root else int(node.rows[-1])
                if rows is None:
                    new_rows = self._add_rows(node, last, tokens[pos:limit], namespace, keys[span])
                else:
                    new_rows = rows[span]
                    self.table.link(new_rows, last)
                node = self._grow(node, child_key, tokens[pos:limit], value[pos:limit], namespace, new_rows)
                gained.append(node.rows)
                if has_windows and self._windows is not None:
                    self._windows.enter(node.rows)
                pos = limit
                continue
            assert child.run is not None
            common = min(child.run.common_len(tokens, raw, pos) // page * page, limit - pos)
            child = child if common == child.num_tokens else self.split(child, common)
            if self._is_loading(child):
                break
            existing.append(child.rows)
            if has_windows:
                adopted += [(pos + start * page, pos + end * page) for start, end in self._adopt(child.rows)]
            node, pos = child, pos + child.num_tokens
        if gained:
            before = self.path_rows(node)[: -sum(map(len, gained))]
            before = before[self._full.order.locks[before] == 0]  # a lease uses locked pages when it ends
            if len(before):
                self._full.use(before)
        attached = frozenset[Component]()
        if end_values and pos == len(tokens):
            attached = frozenset(name for name, given in end_values.items() if self.attach(node, name, given))
        slots = self._full.value(_joined(existing)) if existing else _NO_SLOTS
        return Inserted(node, _joined(gained), slots, tuple(adopted), pos, attached)

    def withdraw(self, inserted: Inserted) -> None:
        """Undo an insertion whose pages are not locked yet. The inserted values belong to the caller again. Nodes that
        were split stay split."""
        rows = self.path_rows(inserted.node, inserted.node.depth_tokens - inserted.accepted_len)
        for name in inserted.attached:
            self.pages[name].leave(rows[-1:])
        for start, end in inserted.adopted:
            self.pages[SWA].leave(rows[start // self.page_size : end // self.page_size])
        self.remove(inserted.gained)

    def attach(self, node: TreeNode, name: Component, value: torch.Tensor) -> bool:
        """Attach a value `[1]` of a component to the end of `node`, for example a state that has consumed exactly the
        tokens up to this end. Returns False if the node has a value already; `value` then still belongs to the
        caller."""
        pages, end = self.pages[name], node.rows[-1:]
        if pages.has(end).all():
            return False
        pages.enter(end, value.reshape(-1))
        return True

    def split(self, lower: TreeNode, at: int) -> TreeNode:
        """Divide the node `lower` after its first `at` tokens. Returns the new node above `lower`.

        [0, at)    the upper node
        [at, end)  `lower`: a reference to the end of a node stays valid
        """
        assert lower.run is not None and lower.parent is not None
        tokens, parent, num_pages = lower.run.tokens, lower.parent, at // self.page_size
        upper = self._add_node(parent, lower.child_key, tokens[:at], lower.namespace, lower.rows[:num_pages])
        lower.rows, lower.run, lower.num_tokens = lower.rows[num_pages:], TokenRun(tokens[at:]), lower.num_tokens - at
        lower.parent, lower.child_key = upper, tokens[at : at + self.page_size].tobytes()
        upper.children[lower.child_key] = lower
        return upper

    # Locks and uses

    def lock(self, node: TreeNode, ahead: int = 0) -> None:
        """Lock the prefix up to `node`, with its windows and states, for a prefix that ends `ahead` tokens after
        `node`."""
        if node.parent is None:
            return
        self._full.lock(self.path_rows(node))
        for component, pages in self._others:
            pages.lock(self.path_rows(node, component.lock_from(node, ahead)))

    def unlock(self, node: TreeNode, ahead: int = 0) -> None:
        """Release one lock of the prefix up to `node`. This does not count as a use, see `touch`."""
        if node.parent is None:
            return
        for component, pages in reversed(self._others):
            pages.unlock(self.path_rows(node, component.unlock_from(node, ahead)))
        self._full.unlock(self.path_rows(node))

    def move_lock(self, old: TreeNode, new: TreeNode, ahead: int = 0) -> None:
        """Move a lock from `old`, with `ahead`, to `new`, which continues the prefix. Only the locks of pages between
        the two nodes change."""
        left = max(0, ahead + old.depth_tokens - new.depth_tokens)
        if old.parent is None or new.parent is None:
            self.lock(new, left)
            self.unlock(old, ahead)
            return
        self._full.lock(self.path_rows(new, old.depth_tokens))
        for component, pages in self._others:
            pages.lock(self.path_rows(new, component.lock_from(new, left)))
            pages.unlock(self.path_rows(old, component.unlock_from(old, ahead)))

    def locked_rows(self, name: Component, node: TreeNode, ahead: int = 0) -> Rows:
        """Return the pages of a component that a lock covers."""
        start = self._by_name[name].lock_from(node, ahead)
        return self.path_rows(node, start) if node.parent is not None else NO_ROWS

    def required(self, rows: Rows, length: int) -> Expectation:
        """Return the pages that the first `length` tokens of the prefix `rows` need, by component."""
        page = self.page_size
        found = {FULL: rows[: length // page]}
        for component, _ in self._others:
            found[component.name] = rows[component.first_required(length) // page : length // page]
        return found

    def expect(self, expectation: Expectation) -> None:
        """Evict these pages only after all pages that no queued request needs, until `forget`. The pages are not
        locked."""
        for name, rows in expectation.items():
            self.table.hold(rows)
            self.pages[name].order.expect(rows, 1)

    def forget(self, expectation: Expectation) -> None:
        """Undo one call of `expect` with the same pages."""
        for name, rows in expectation.items():
            self.pages[name].order.expect(rows, -1)
            self.table.drop(rows)

    def expect_uses(self, node: TreeNode, num_uses: int) -> None:
        """Announce `num_uses` requests for the prefix that ends with `node`. Only the policy `auto` counts announced
        requests."""
        rows = self.path_rows(node)
        for pages in self.pages.values():
            pages.order.expect_uses(pages.held(rows), num_uses)

    def end_session(self, rows: Rows) -> None:
        """Evict the pages `rows` of an ended session first, until a request uses them."""
        for pages in self.pages.values():
            pages.order.end_session(pages.held(rows))

    def keep(self, node: TreeNode, until_s: float, limits: Mapping[Component, float]) -> None:
        """Until the deadline `until_s`, evict the values of the prefix that ends with `node` after values without a
        hint. The values are not locked. `limits`: the maximum tokens or states that each component keeps, see
        `EvictionOrder.keep_until`."""
        for name, pages in self.pages.items():
            rows = pages.held(self.required_rows(name, node))
            pages.order.keep_until(rows, until_s, limits[name] / pages.size)

    def expire(self, now_s: float) -> None:
        """End the hints whose deadline has passed."""
        for pages in self.pages.values():
            pages.order.expire(now_s)

    def begin_use(self, rows: Rows, *, is_new: bool = True) -> None:
        """Record that a request, which has locked the pages `rows`, begins to use them. A session that had ended is
        open again. `is_new`: the request was not counted before."""
        self.table.hits[rows] += is_new
        for pages in self.pages.values():
            if pages.order.has_ended[rows].any():
                pages.order.go_on(rows)

    def touch(self, node: TreeNode) -> None:
        """Record in the eviction orders that a request used the prefix that ends with `node`. The first windows of a
        node are evicted first, because a match at the end of the node does not need them."""
        self._full.use(self.path_rows(node))
        for component, pages in self._others:
            pieces = self._pieces(node, component.required_from(node))
            pages.use(_joined([piece[::-1] for piece in pieces]))

    def raise_priority(self, node: TreeNode, priority: int) -> None:
        """Raise the priority of the prefix that ends with `node` to `priority`, the priority of a request that uses the
        prefix."""
        rows = self.path_rows(node)
        lower = rows[self.table.priority[rows] < priority]
        if len(lower):
            self.table.priority[lower] = priority
            for pages in self.pages.values():
                pages.order.rank_again(pages.held(lower))

    # Eviction

    def evict(self, rows: Rows, name: Component) -> list[Released]:
        """Evict unlocked pages of a component from the device. Returns all evicted values, which the caller frees.

        Pages of FULL must be at the ends of leaves, the last page first; these pages lose the values of all components.
        If no match can end in the last page of a leaf any more, this page is removed. The same rule then applies to the
        page before it.
        """
        assert not self.pages[name].order.locks[rows].any(), "evicted a locked page"
        released, nodes = list[Released](), self.nodes_of(rows)
        if name == FULL:
            for node, num_pages in nodes.items():
                self._cut(node, num_pages, released)
        else:
            released.append(self.detach(rows, name))
        for node in nodes:
            self._prune(node, released)
        return released

    def detach(self, rows: Rows, name: Component) -> Released:
        """Remove the values of one component from the pages `rows`, which may be locked, and return the values."""
        pages = self.pages[name]
        released = Released(name, pages.value(rows), len(rows) * pages.size)
        pages.leave(rows)
        return released

    def remove(self, rows: Rows) -> list[Released]:
        """Remove the nodes of pages `rows`, which may be locked. No other nodes follow these nodes. Their locks are
        released as usual, because a removed node keeps its parent and its rows."""
        released = list[Released]()
        for node in reversed(self.nodes_of(rows)):
            self._cut(node, len(node.rows), released)
        return released

    def check(self) -> None:
        """Raise `InvariantError` with every violation of the invariants in the module's docstring."""
        found = list[str]()
        for node in self.nodes():
            found += self._violations(node)
        named = [node.rows for node in self.nodes()]
        if len(named) != self.num_nodes:
            found.append(f"{len(named)} nodes are linked, {self.num_nodes} were counted")
        if not np.array_equal(np.sort(_joined(named)), self._full.rows_held()):
            found.append("the device has other pages than the nodes name")
        full = self._full.order
        if not np.array_equal(np.flatnonzero(self.node >= 0), self._full.rows_held()):
            found.append("a row names a node that is not in the tree")
        for name, pages in self.pages.items():
            found += [f"{name}: {violation}" for violation in pages.order.violations()]
            if pages.num_held != np.count_nonzero(pages.order.is_held):
                found.append(f"{name}: {pages.num_held} pages were counted, {len(pages.rows_held())} are held")
            if (pages.order.is_held & ~full.is_held).any():
                found.append(f"{name}: a page has a value but no full slots")
            if (pages.order.locks > full.locks)[full.is_held].any():
                found.append(f"{name}: a page has more locks than its slots have")
        if found:
            raise InvariantError("tree", found)

    # Inside

    def _pieces(self, node: TreeNode, start: int) -> list[Rows]:
        """Return the rows of each node of the path to `node`, from the root on, from the page of token `start` on."""
        pieces = list[Rows]()
        while node.parent is not None and node.depth_tokens > start:
            pieces.append(node.rows)
            node = node.parent
        if pieces and node.depth_tokens < start:
            pieces[-1] = pieces[-1][(start - node.depth_tokens) // self.page_size :]
        return pieces[::-1]

    def _following(self, node: TreeNode, namespace: str, tokens: Tokens, known: Sequence[bytes] = ()) -> list[bytes]:
        """Return the keys of the complete pages in `tokens`, after `node`. `known`: keys of the first pages."""
        if known:
            previous = known[-1]
        else:
            previous = self.keys_of(node)[-1] if node.parent is not None else self._hasher.seed(namespace)
        return [*known, *self._hasher.chain(previous, tokens[len(known) * self.page_size :])]

    def _add_rows(self, parent: TreeNode, before: int, tokens: Tokens, namespace: str, known: Sequence[bytes]) -> Rows:
        """Return the rows of pages `tokens` after `parent`, and add missing rows. `before`: the last row of `parent`;
        `known`: keys of the first pages."""
        page, index = self.page_size, parent.depth_tokens // self.page_size
        if self._is_keyed:
            keys = known if len(known) * page == len(tokens) else self._following(parent, namespace, tokens, known)
            return self.table.add(keys, index, previous=before)
        rows = self.table.add_unnamed(len(tokens) // page, index)
        if self._reads_names:
            first = hash(namespace) & (1 << 64) - 1 if before == NO_ROW else int(self.table.name[before])
            self.table.name[rows] = _names(tokens[::page], np.uint64(first), index)
        self.table.link_new(rows, before)
        return rows

    def _grow(
        self,
        parent: TreeNode,
        child_key: ChildKey,
        tokens: Tokens,
        value: torch.Tensor,
        namespace: str,
        rows: Rows,
    ) -> TreeNode:
        """Make a new node of pages `tokens` with slots `value` and rows `rows` after `parent`."""
        self.table.hold(rows)
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        self.table.hits[at] = 1 if self._below is None else np.where(self._below.state[at], self.table.hits[at], 1)
        node = self._add_node(parent, child_key, tokens, namespace, rows)
        self._full.enter(rows, value)
        if self.events is not None:
            self.events.stored(self.event_pages(rows), "GPU")
        return node

    def _add_node(self, parent: TreeNode, child_key: ChildKey, tokens: Tokens, namespace: str, rows: Rows) -> TreeNode:
        node = self._new_node(run=TokenRun(tokens), parent=parent, namespace=namespace)
        node.rows, node.child_key = rows, child_key
        parent.children[child_key] = self._nodes[node.id] = node
        self.node[self.table.span(rows) if len(rows) >= self.table.many else rows] = node.id
        return node

    def _adopt(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """Give a window to each page of `rows` that has none. Yields these pages as intervals of indices in `rows`."""
        assert self._windows is not None
        lacks = np.concatenate(([False], ~self._windows.has(rows), [False]))
        bounds = np.flatnonzero(lacks[1:] != lacks[:-1]).tolist()
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            self._windows.enter(rows[start:end])
            yield start, end

    def _is_loading(self, node: TreeNode) -> bool:
        found, rows = False, node.rows
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        for pages in self.pages.values():
            found |= bool(pages.load[at].any())
        return found

    def _cut(self, node: TreeNode, num_pages: int, released: list[Released]) -> None:
        """Remove the last pages of a leaf with all their values, the full slots last. A removed node keeps its rows and
        its parent."""
        assert not node.children and node.parent is not None, "cut a node with a child"
        start = len(node.rows) - num_pages
        rows = node.rows[start:]
        for name, pages in reversed(self.pages.items()):
            held = pages.held(rows)
            if name == FULL and self.events is not None:
                self.events.removed(self.table.keys_of(rows), "GPU")
            if len(held):
                released.append(self.detach(held, name))
        self.node[self.table.span(rows) if len(rows) >= self.table.many else rows] = -1
        if start:
            assert node.run is not None
            num_tokens = start * self.page_size
            node.run, node.rows = TokenRun(node.run.tokens[:num_tokens]), node.rows[:start]
            node.depth_tokens -= node.num_tokens - num_tokens
            node.num_tokens = num_tokens
        else:
            del node.parent.children[node.child_key]
            del self._nodes[node.id]
            if self._path[0] is node:
                self._path = self.root, 0, NO_ROWS
        self.table.drop(rows)

    def _prune(self, node: TreeNode | None, released: list[Released]) -> None:
        """Remove the end of `node` if the node is an unlocked leaf in which no match can end. Then do the same for its
        parents."""
        if self._has_lower_tier or len(self.components) == 1:
            return
        while node is not None and node.parent is not None and not node.children:
            above = node.parent
            if above.children.get(node.child_key) is node:
                num_dead, num_pages = self._num_dead(node), len(node.rows)
                if not num_dead:
                    return
                self._cut(node, num_dead, released)
                above = above if num_dead == num_pages else node
            node = above

    def _num_dead(self, leaf: TreeNode) -> int:
        """Return the number of unlocked pages at the end of a leaf in which no match can end or continue.

        If the host lacks capacity for a backup of a complete leaf, the backup locks only the first pages of the leaf.
        """
        num_unlocked = len(leaf.rows) - int(np.count_nonzero(self._full.order.locks[leaf.rows]))
        if not num_unlocked:
            return 0
        most = 0
        for component, pages in self._others:
            has = pages.has(leaf.rows)
            is_needed = not has[-1] and component.first_required(leaf.depth_tokens) < leaf.depth_tokens
            if is_needed and not (self._is_below is not None and self._is_below(leaf, component.name)):
                most = max(most, int(has[::-1].argmax()) if has.any() else len(has))
        return min(most, num_unlocked)

    def _violations(self, node: TreeNode) -> list[str]:
        """Return the violations of links, tokens and rows of one node."""
        found, parent, page = list[str](), node.parent, self.page_size
        assert parent is not None
        where = f"node {node.id} at depth {node.depth_tokens}"
        if parent.children.get(node.child_key) is not node:
            found.append(f"{where}: its parent has another node under its key")
        if node.run is None or len(node.run) != node.num_tokens or not node.num_tokens:
            return [*found, f"{where}: {node.num_tokens} tokens are not those of its run"]
        if len(node.rows) * page != node.num_tokens:
            return [*found, f"{where}: {len(node.rows)} pages of {page} for {node.num_tokens} tokens"]
        if node.depth_tokens != parent.depth_tokens + node.num_tokens:
            found.append(f"{where}: {node.num_tokens} tokens below depth {parent.depth_tokens}")
        first = node.run.tokens[:page].tobytes()
        if node.child_key != ((node.namespace, first) if parent.is_root else first):
            found.append(f"{where}: is filed under another first page")
        if not parent.is_root and parent.namespace != node.namespace:
            found.append(f"{where}: namespace {node.namespace!r} below {parent.namespace!r}")
        if (self.node[node.rows] != node.id).any() or self._nodes.get(node.id) is not node:
            found.append(f"{where}: a row says that it lies in another node")
        before = [NO_ROW if parent.is_root else int(parent.rows[-1]), *node.rows.tolist()]
        if any(self.table.previous[row] != previous for previous, row in pairwise(before)):
            found.append(f"{where}: a row says that it follows another row")
        locks = self._full.order.locks[node.rows]
        if (np.diff(locks) > 0).any() or (not parent.is_root and self._full.order.locks[parent.rows[-1]] < locks[0]):
            found.append(f"{where}: a page has more locks than the one before it")
        return found


def _joined(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else NO_ROWS


def _names(tokens: Tokens, first: np.uint64, index: int) -> npt.NDArray[np.uint64]:
    """Return names of pages, computed from the first token of each page. The first page has the index `index` and
    follows a page named `first`. Equal names of different prefixes are rare; the uses of these prefixes are then added
    up."""
    mixed = tokens.astype(np.uint64) + np.arange(index, index + len(tokens), dtype=np.uint64) * _NAME_FACTORS[0]
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _NAME_FACTORS[1]
    names: npt.NDArray[np.uint64] = first + np.cumsum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64)
    return names
