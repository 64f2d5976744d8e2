"""Commit: the tree gets the pages that a request computed. Release: a request ends, and its hints take effect.

The tree gets the slots of complete pages in chunks. If another request committed a page first, the tree keeps the slots
of that request, and the slots of this request are freed. If the model has recurrent states, the tree also gets the
state after the last token of these pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from hicache.errors import InvalidTokens, TokensMismatch, TransferError
from hicache.flow.components.base import CacheComponent
from hicache.flow.components.state import RecurrentState
from hicache.flow.components.window import SlidingWindow
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies
from hicache.flow.lease import Lease
from hicache.flow.writes import Writes
from hicache.pages.key import TokenRun, Tokens, bytes_of, component_keys
from hicache.pages.order import KEPT_SHARE, deadline_s
from hicache.pages.table import Rows
from hicache.tiers import FULL, SWA, Component


class Commit:
    """Commits and ends leases. Owned by the scheduler thread.

    `had_hints`: True after the first request that ended with `next_turn_within_s`. `CacheEngine.poll` then calls
    `expire_hints`."""

    def __init__(self, context: EngineContext, copies: Copies, writes: Sequence[Writes]) -> None:
        self._context, self._copies, self._writes = context, copies, tuple(writes)
        self._ending, self._others, self._windows = context.ending, context.others, context.by_name.get(SWA)
        self.had_hints = False
        self._skipped_states = context.metrics.counter(
            "commit.skipped_states",
            "recurrent states that were not cached because all states of the device tier were in use",
        )
        order, page = context.full.resident.order, context.tree.page_size
        context.metrics.gauge(
            "evict.kept_tokens",
            "tokens on the device that are kept for the next turn of their session",
            lambda: order.num_kept * page,
        )

    def commit(self, lease: Lease, tokens: Tokens) -> None:
        """See `CacheEngine.commit`."""
        _require_sequence(lease, tokens)
        if len(tokens) <= lease.tree_len:
            return
        # Tokens computed on a prefix that failed to load must not be shared.
        if lease.loads and (error := self._copies.error_of(lease)) is not None:
            raise TransferError(f"{lease.request_id}: its prefix could not be loaded: {error}")
        for length in self._ending.commit_points(lease, len(tokens)):
            if length > lease.tree_len and (components := self._components_with_values(lease, length)) is not None:
                self._insert(lease, tokens, length, components)

    def track(self, leases: Sequence[Lease]) -> None:
        """See `CacheEngine.track`."""
        for component in self._context.components:
            if isinstance(component, RecurrentState):
                make_available = partial(self._copies.make_available, component)
                self._skipped_states.value += component.track(leases, make_available)

    def release(self, lease: Lease, *, continues: bool) -> None:
        """See `CacheEngine.release`."""
        tree = self._context.tree
        rows = tree.path_rows(lease.node)
        tree.table.hold(rows)  # after a failed load, only the lock of the lease keeps these rows
        lease.released = True
        with ExitStack() as steps:  # runs all callbacks, the last first, even if one raises
            steps.callback(tree.table.drop, rows)
            steps.callback(self._copies.free, lease)
            steps.callback(self._use_below, lease, continues=continues)
            steps.callback(tree.unlock, lease.node)
            steps.callback(tree.touch, lease.node)

    def _use_below(self, lease: Lease, *, continues: bool) -> None:
        """Count a use of a lease's prefix on the host, and in the stores a use of the part of the prefix that may be
        used again."""
        context, tree = self._context, self._context.tree
        rows = tree.required(tree.path_rows(lease.node), lease.node.depth_tokens)
        on_host = dict[Component, Rows]()
        for component in context.components if context.has_host else ():
            pages = component.pages
            on_host[component.name] = of_component = component.host_rows(rows[component.name])
            held = of_component[pages.has(of_component)]
            pages.use(held)
            pages.order.raise_priority(held, lease.priority)
        num_shared = lease.node.depth_tokens // tree.page_size if continues else self._enter_hints(lease, on_host)
        if self._writes and num_shared:
            used = tree.required(rows[FULL], num_shared * tree.page_size)
            keys = {name: component_keys(name, tree.table.keys_of(each)) for name, each in used.items()}
            for writes in self._writes:
                writes.used(keys)

    def _components_with_values(self, lease: Lease, length: int) -> list[CacheComponent] | None:
        """Return the components with capacity for the values that the tree stores after the first `length` tokens.
        Returns None if a component that ends matches has no capacity for its value; nothing is then inserted."""
        components: list[CacheComponent] = []
        for component in self._others:  # full attention has no such value
            need = component.needed_to_hand_over(lease, length)
            if not need or self._copies.make_available(component, need):
                components.append(component)
                continue
            self._skipped_states.value += 1
            if component.tree_component.ends_matches:
                return None
        return components

    def _insert(self, lease: Lease, tokens: Tokens, end: int, components: Sequence[CacheComponent]) -> None:
        """Insert positions [tree_len, end) into the tree, with the values that `components` have after `end` tokens.
        If an error is raised, nothing was inserted.

        [tree_len, tree_len + len(existing))   the tree's slots replace the lease's, which are freed
        [.., tree_len + accepted_len)          the lease's slots become the tree's
        [.., end)                              another request is loading these pages: a later commit inserts them
        """
        context, tree, start = self._context, self._context.tree, lease.tree_len
        slots = lease.held_slots(start, end)
        window_from, end_values = None if self._windows is None else 0, dict[Component, torch.Tensor]()
        with ExitStack() as undo:
            for component in components:
                value = component.hand_over(lease, end)
                if value is not None:
                    end_values[component.name] = value
                    undo.callback(component.free, value)
            keys = lease.keys[start // tree.page_size :]
            inserted = tree.insert(
                lease.node, tokens[start:end], slots, lease.namespace, window_from, end_values=end_values, keys=keys
            )
            undo.callback(tree.withdraw, inserted)
            existing, replaced = inserted.existing, slots[: len(inserted.existing)]
            if len(existing):
                lease.write(start, existing)
                undo.callback(lease.write, start, replaced)
                if isinstance(self._windows, SlidingWindow):
                    for first, last in inserted.adopted:
                        self._windows.adopt(replaced[first:last], existing[first:last])
                        undo.callback(self._windows.adopt, existing[first:last], replaced[first:last])
            tree.move_lock(lease.node, inserted.node)
            undo.pop_all()
        lease.node, lease.tree_len = inserted.node, start + inserted.accepted_len
        with ExitStack() as steps:
            for name in end_values.keys() - inserted.attached:
                steps.callback(context.by_name[name].free, end_values[name])
            if len(existing):
                steps.callback(context.full.free, replaced)
            if lease.tree_len > lease.tokens.num_tokens:
                lease.tokens = TokenRun(tokens[: lease.tree_len])
        if lease.priority:
            tree.raise_priority(inserted.node, lease.priority)
        if context.exclusive is not None:
            context.exclusive.came_above(inserted.gained)  # pages that were computed although the host has them
        if not lease.request.session_end:
            self._copies.backup_selected(inserted.node, len(inserted.gained))

    # Hints

    def expire_hints(self) -> None:
        """End the hints whose deadline has passed."""
        now_s = self._context.clock()
        self._context.tree.expire(now_s)
        for component in self._context.components if self._context.has_host else ():
            component.pages.order.expire(now_s)

    def _enter_hints(self, lease: Lease, on_host: Mapping[Component, Rows]) -> int:
        """Apply the hints of a request that ends. The prompt was unlocked and counted as used before. `on_host`: the
        rows of the prompt on the host, empty without a host tier. Returns the number of prompt pages that may be used
        again."""
        num_pages = lease.node.depth_tokens // self._context.tree.page_size
        if lease.request.session_end:
            return num_pages - self._end_session(lease)
        if lease.request.expected_uses is not None:
            self._context.tree.expect_uses(lease.node, lease.request.expected_uses)
            for name, rows in on_host.items():
                self._context.by_name[name].pages.expect_uses(rows, lease.request.expected_uses)
        if lease.request.next_turn_within_s is not None:
            self._keep(lease, on_host, lease.request.next_turn_within_s)
        return num_pages

    def _end_session(self, lease: Lease) -> int:
        """End the session of the pages at the end of the prompt that no other prompt shares. Returns the number of
        these pages."""
        context, tree = self._context, self._context.tree
        rows = tree.alone_rows(lease.node, max(lease.request.branch_points, default=0))
        tree.end_session(rows)
        for component in context.components if context.has_host else ():
            component.pages.end_session(component.host_rows(rows))
        return len(rows)

    def _keep(self, lease: Lease, on_host: Mapping[Component, Rows], within_s: float) -> None:
        self.had_hints = True
        context, until_s = self._context, deadline_s(self._context.clock(), within_s)
        context.tree.keep(lease.node, until_s, {each.name: KEPT_SHARE * each.capacity for each in context.components})
        for name, rows in on_host.items():
            component = context.by_name[name]
            component.pages.keep_until(rows, until_s, KEPT_SHARE * component.host.num_pages)


def _require_sequence(lease: Lease, tokens: Tokens) -> None:
    """Raise InvalidTokens if a token has no slot yet, and TokensMismatch if a token differs from the lease's token."""
    if len(tokens) > lease.length:
        raise InvalidTokens(
            f"{lease.request_id}: {len(tokens)} tokens were committed, the lease has slots for {lease.length}; "
            f"extend it before the forward"
        )
    same_len = lease.tokens.common_len(tokens, bytes_of(tokens), 0)
    if same_len < min(len(tokens), lease.tokens.num_tokens):
        raise TokensMismatch(lease.request_id, same_len, int(tokens[same_len]), int(lease.tokens.tokens[same_len]))
