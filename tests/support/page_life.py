"""The life of a page in the tree: the states that it goes through, and a record that refuses every other way."""

from __future__ import annotations

from hicache.tree import PageState, RadixTree, TreeNode

Edge = tuple[PageState, PageState]
GONE, DEVICE, BACKING_UP = PageState.GONE, PageState.DEVICE, PageState.BACKING_UP
BOTH, ON_HOST, LOADING = PageState.BOTH, PageState.HOST, PageState.LOADING

# The table of docs/invariants.md.
EDGES: frozenset[Edge] = frozenset(
    {
        (GONE, DEVICE),  # committed by a request
        (GONE, ON_HOST),  # prefetched
        (DEVICE, BACKING_UP),  # a copy to the host was submitted
        (DEVICE, BOTH),  # prefetched while on the device
        (DEVICE, GONE),  # evicted, with no copy on the host
        (BACKING_UP, BOTH),  # the copy was confirmed
        (BACKING_UP, DEVICE),  # the copy failed, or the parent left the host
        (BOTH, ON_HOST),  # evicted from the device
        (BOTH, DEVICE),  # evicted from the host
        (ON_HOST, LOADING),  # a copy to the device was submitted
        (ON_HOST, BOTH),  # computed again by a request that did not load it
        (ON_HOST, GONE),  # evicted from the host
        (LOADING, BOTH),  # the copy was confirmed
        (LOADING, ON_HOST),  # the copy failed
    }
)
# A leaf that no match can end in leaves both tiers in one call.
DROPPED = frozenset({(BOTH, GONE)})


class PageLives:
    """The state of every page of a tree, as of the last look. `seen`: the edges that were taken."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._states: dict[tuple[str, bytes], PageState] = {}
        self.seen: set[Edge] = set()

    def look(self, more: frozenset[Edge] = frozenset()) -> None:
        """Each page is in the state that it was in, or went along one edge of the table, or along one of `more`."""
        now = self._now()
        for page in self._states.keys() | now.keys():
            edge = self._states.get(page, GONE), now.get(page, GONE)
            if edge[0] is not edge[1]:
                assert edge in EDGES or edge in more, f"a page went from {edge[0].name} to {edge[1].name}"
                self.seen.add(edge)
        self._states = now

    def _now(self) -> dict[tuple[str, bytes], PageState]:
        """A page is known by all tokens up to its end, so it is the same page on either side of a split."""
        step = self._tree.page_size * 8
        path: dict[TreeNode | None, bytes] = {self._tree.root: b""}
        found: dict[tuple[str, bytes], PageState] = {}
        for node in self._tree.nodes():
            assert node.run is not None
            before = len(path[node.parent])
            path[node] = path[node.parent] + node.run.tokens.tobytes()
            for end in range(before + step, len(path[node]) + 1, step):
                found[node.namespace, path[node][:end]] = node.state
        return found
