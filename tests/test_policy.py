"""Eviction orders against naive ones, and what a policy of one's own takes."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.tree import PageHasher, RadixTree, Tier
from hicache.tree.node import TreeNode
from hicache.tree.orders import EvictionOrder, EvictionStrategy, MayGo, PriorityHeap
from hicache.tree.policy import ORDERS, SLRUStrategy, get_eviction_strategy, make_order

NAMES = ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
PLACE = 3
# What goes first under each policy: the lowest.
RANKS: dict[str, Callable[[TreeNode], tuple[int, ...]]] = {
    "lru": lambda n: (n.last_access_time,),
    "lfu": lambda n: (n.hit_count, n.last_access_time),
    "fifo": lambda n: (n.creation_time,),
    "mru": lambda n: (-n.last_access_time,),
    "filo": lambda n: (-n.creation_time,),
    "priority": lambda n: (n.priority, n.last_access_time),
    "slru": lambda n: (1 if n.hit_count >= 2 else 0, n.last_access_time),
}


class SortedOracle:
    """Sorts all nodes whenever it is asked: by their rank when their last event was told, then by when it was told."""

    def __init__(self, name: str) -> None:
        self.rank = RANKS[name]
        self.told: dict[TreeNode, tuple[tuple[int, ...], int]] = {}
        self.events = 0

    def enter(self, node: TreeNode) -> None:
        self.events += 1
        self.told[node] = (self.rank(node), self.events)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.enter(upper)

    def expose(self, node: TreeNode) -> None:
        self.enter(node)

    def leave(self, node: TreeNode) -> None:
        del self.told[node]

    def by_rank(self) -> list[TreeNode]:
        return sorted(self.told, key=lambda node: self.told[node])


class ListOracle:
    """Least recently used first, as a plain list."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []

    def enter(self, node: TreeNode) -> None:
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes.append(node)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.nodes.insert(self.nodes.index(lower) + 1, upper)

    def expose(self, node: TreeNode) -> None:
        assert node in self.nodes

    def leave(self, node: TreeNode) -> None:
        self.nodes.remove(node)

    def by_rank(self) -> list[TreeNode]:
        return list(self.nodes)


class World:
    """Nodes at one place, with the rules by which a tree tells an order and, at the same time, an oracle of them."""

    def __init__(self, name: str, leaves_only: bool) -> None:
        self.leaves_only = leaves_only
        self.order = make_order(name, PLACE, self._may_go)
        self.oracle = ListOracle() if name == "lru" else SortedOracle(name)
        self.root = TreeNode()
        self.held: list[TreeNode] = []
        self.lock_ends: list[TreeNode] = []
        self.keys = 0

    def grow(self, at: int, priority: int) -> None:
        parent = self._pick([self.root, *self.held], at)
        child = self._link(parent)
        child.hit_count, child.priority = 1, priority % 3
        self.order.insert(child)
        self.oracle.enter(child)
        self.touch_path(parent)

    def touch(self, at: int, _: int) -> None:
        if self.held:
            node = self._pick(self.held, at)
            for above in node.path():
                above.hit_count += 1
            self.touch_path(node)

    def touch_path(self, node: TreeNode) -> None:
        """The order is told of locked nodes too: it has to ignore them."""
        for at in node.path():
            at.used()
            self.order.hit(at)
            if not at.locks[PLACE]:
                self.oracle.enter(at)

    def lock(self, at: int, _: int) -> None:
        if self.held:
            end = self._pick(self.held, at)
            self.lock_ends.append(end)
            for node in end.path():
                node.locks[PLACE] += 1
                if node.locks[PLACE] == 1:
                    self.order.lock(node)
                    self.oracle.leave(node)

    def unlock(self, at: int, _: int) -> None:
        if self.lock_ends:
            end = self.lock_ends.pop(at % len(self.lock_ends))
            for node in end.path():
                node.locks[PLACE] -= 1
                if not node.locks[PLACE]:
                    node.used()
                    self.order.unlock(node)
                    self.oracle.enter(node)

    def split(self, at: int, _: int) -> None:
        if not self.held:
            return
        lower = self._pick(self.held, at)
        assert lower.parent is not None
        key = next(key for key, node in lower.parent.children.items() if node is lower)
        upper = self._link(lower.parent, key)
        upper.hit_count, upper.priority, upper.locks = lower.hit_count, lower.priority, list(lower.locks)
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        lower.parent = upper
        if not lower.locks[PLACE]:
            self.order.split(upper, lower)
            self.oracle.beside(upper, lower)
        upper.children[b"lower"] = lower

    def use_elsewhere(self, at: int, _: int) -> None:
        """Another place shares the fields, and this one is told nothing."""
        if self.held:
            node = self._pick(self.held, at)
            node.used()
            node.hit_count += 1
            node.priority += 1

    def evict(self, _: int, __: int) -> None:
        node = self.expected()
        if node is not None:
            self._drop(node)

    def drop_any(self, at: int, _: int) -> None:
        """What goes need not be the victim: a request may be aborted."""
        free = [node for node in self.held if not node.locks[PLACE] and not node.children]
        if free:
            self._drop(self._pick(free, at))

    def expected(self) -> TreeNode | None:
        """The first that may go of all that are in order, found the slow way."""
        allowed = (node for node in self.oracle.by_rank() if not (self.leaves_only and node.children))
        return next(allowed, None)

    def _drop(self, node: TreeNode) -> None:
        """An inner node that goes stays as a link: only its value has left this place."""
        parent = node.parent
        self.order.evict(node)
        self.oracle.leave(node)
        self.held.remove(node)
        if node.children:  # taken out of the middle: the children move up
            assert parent is not None
            for child in node.children.values():
                child.parent = parent
                parent.children[self._new_key()] = child
        assert parent is not None
        parent.children = {key: child for key, child in parent.children.items() if child is not node}
        if not parent.children and parent in self.order:
            self.order.expose(parent)
            self.oracle.expose(parent)

    def _link(self, parent: TreeNode, key: bytes | tuple[str, bytes] | None = None) -> TreeNode:
        node = TreeNode(parent=parent)
        parent.children[key or self._new_key()] = node
        self.held.append(node)
        return node

    def _new_key(self) -> bytes:
        self.keys += 1
        return self.keys.to_bytes(4, "little")

    def _may_go(self, node: TreeNode) -> bool:
        return not (self.leaves_only and node.children)

    @staticmethod
    def _pick(nodes: list[TreeNode], at: int) -> TreeNode:
        return nodes[at % len(nodes)]


EVENTS = ["grow", "grow", "touch", "lock", "unlock", "split", "use_elsewhere", "evict", "drop_any"]
Event = tuple[str, int, int]


def play(name: str, leaves_only: bool, events: list[Event]) -> World:
    """Run the events; after each, the order must agree with the oracle."""
    world = World(name, leaves_only)
    for event, at, more in events:
        getattr(world, event)(at, more)
        victim = world.order.victim()
        assert victim is world.expected()
        assert world.order.victim() is victim, "asking changes nothing"
        expected = world.oracle.by_rank()
        assert len(world.order) == len(expected)
        assert sorted(node.id for node in world.order) == sorted(node.id for node in expected)
        assert all((node in world.order) == (not node.locks[PLACE]) for node in world.held)
    return world


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", NAMES)
@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000), st.integers(0, 1000)), max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_every_victim_is_the_one_that_sorting_all_nodes_finds(
    name: str, leaves_only: bool, events: list[Event]
) -> None:
    """After any events the victim is the first of all unlocked nodes that may go, and the order holds exactly those."""
    play(name, leaves_only, events)


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_long_histories_agree_with_sorting(name: str, leaves_only: bool) -> None:
    """The same over a history long enough for the heap to be compacted many times, until everything has gone."""
    dice = random.Random(f"{name}{leaves_only}")
    events = [(dice.choice(EVENTS), dice.randrange(1000), dice.randrange(1000)) for _ in range(700)]
    world = play(name, leaves_only, events)
    play_out: list[TreeNode] = []
    while world.lock_ends:
        world.unlock(0, 0)
    while (victim := world.order.victim()) is not None:
        assert victim is world.expected()
        world.evict(0, 0)
        play_out.append(victim)
    assert len(world.order) == 0 and not world.held and len(play_out) > 20
    assert len(set(play_out)) == len(play_out)


def test_the_recency_list_reads_oldest_first() -> None:
    """Iteration gives the order in which the nodes would go."""
    dice = random.Random(5)
    world = World("lru", True)
    for _ in range(300):
        getattr(world, dice.choice(EVENTS))(dice.randrange(1000), 0)
        assert list(world.order) == world.oracle.by_rank()


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_names_the_lowest_of_what_may_go(name: str) -> None:
    """In a real tree the victim is, before each eviction, a node of lowest priority among the unlocked leaves."""
    dice, tree = random.Random(name), RadixTree(1, PageHasher(b"identity", 1), policy=name)
    rank, locked, evictions = get_eviction_strategy(name.upper()), [], 0
    for _ in range(600):
        tokens = np.array([dice.randrange(3) for _ in range(dice.randrange(1, 9))])
        match = tree.match(tokens)
        node = tree.node_at(match, match.device_len)
        for at in node.path():
            at.hit_count += 1
        tree.lock(node, Tier.DEVICE)
        rest = tokens[match.device_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64), Tier.DEVICE).node
        tree.move_lock(node, new, Tier.DEVICE)
        new.priority = dice.randrange(3)
        locked.append(new)
        while len(locked) > dice.randrange(6):
            tree.unlock(locked.pop(dice.randrange(len(locked))), Tier.DEVICE)
        while tree.evictable(Tier.DEVICE) > 40:
            free = [at for at in tree.nodes() if not at.locks[0] and not at.children]
            victim = tree.victim(Tier.DEVICE)
            assert victim in free
            assert rank.get_priority(victim) == min(map(rank.get_priority, free))
            if victim.num_tokens > 1:
                victim = tree.cut_tail(victim, 1)
            tree.drop(victim, Tier.DEVICE)
            evictions += 1
        tree.check()
    assert evictions > 100


class CountedRank(EvictionStrategy):
    """Ranks by the last use, and counts how often ranks are compared."""

    def __init__(self) -> None:
        self.comparisons = 0

    def get_priority(self, node: TreeNode) -> float:
        strategy = self

        class Rank(int):
            def __lt__(self, other: int) -> bool:
                strategy.comparisons += 1
                return int(self) < int(other)

            __hash__ = int.__hash__

        return Rank(node.last_access_time)


def test_a_heap_stays_as_small_as_what_it_holds() -> None:
    """Whatever is locked, unlocked and used without an eviction in between, entries stay at most two a node."""
    order = PriorityHeap(CountedRank(), lambda node: True)
    nodes = [TreeNode() for _ in range(200)]
    for node in nodes:
        order.insert(node)
    for turn in range(50):
        for node in nodes[turn % 7 :]:
            node.used()
            if turn % 2:
                order.hit(node)
            else:
                order.lock(node)
                order.unlock(node)
            assert order.num_entries <= 2 * len(order) + 20
    for node in nodes:
        order.lock(node)
        assert order.num_entries <= 2 * len(order) + 20
    assert len(order) == 0 and order.victim() is None and order.num_entries == 0


def test_a_heap_stays_small_where_nodes_keep_growing_and_losing_children() -> None:
    """The bound holds though most nodes are left out of the heap again and again, and come back by an exposure."""
    inner: set[TreeNode] = set()
    order = PriorityHeap(get_eviction_strategy("lru"), lambda node: node not in inner)
    nodes = [TreeNode() for _ in range(100)]
    for node in nodes:
        order.insert(node)
    for _ in range(20):
        inner.update(nodes[:99])
        assert order.victim() is nodes[99]
        inner.clear()
        for node in nodes[:99]:
            order.expose(node)
        for node in nodes * 3:
            node.used()
            order.hit(node)
            assert order.num_entries <= 2 * len(order) + 20


@pytest.mark.parametrize("num_nodes", [64, 512, 4096])
def test_the_cost_of_an_event_grows_with_the_logarithm_of_the_nodes(num_nodes: int) -> None:
    """Locks, uses and victims take at most 4 log2(n) comparisons each on average, at every size."""
    rank = CountedRank()
    order, dice = PriorityHeap(rank, lambda node: True), random.Random(num_nodes)
    nodes = [TreeNode() for _ in range(num_nodes)]
    for node in nodes:
        order.insert(node)
    rank.comparisons, events = 0, 8 * num_nodes
    for at in range(events):
        node = nodes[dice.randrange(num_nodes)]
        node.used()
        if at % 4 == 0:
            order.hit(node)
        elif at % 4 == 1:
            order.lock(node)
            order.unlock(node)
        else:
            victim = order.victim()
            assert victim is not None
            order.evict(victim)
            victim.used()
            order.insert(victim)
    assert rank.comparisons <= 4 * events * np.log2(num_nodes)


def test_what_may_not_go_is_looked_at_once() -> None:
    """A node that may not go costs one look until it is exposed, however often the victim is asked for."""
    looks: list[TreeNode] = []
    inner: set[TreeNode] = set()

    def may_go(node: TreeNode) -> bool:
        looks.append(node)
        return node not in inner

    order, nodes = PriorityHeap(get_eviction_strategy("fifo"), may_go), [TreeNode() for _ in range(100)]
    for node in nodes:
        order.insert(node)
    inner.update(nodes[:99])
    for _ in range(50):
        assert order.victim() is nodes[99]
    assert len(looks) == 100 + 99 + 50
    inner.discard(nodes[40])
    assert order.victim() is nodes[99]
    order.expose(nodes[40])
    assert order.victim() is nodes[40] and len(order) == 100


@pytest.mark.parametrize("name", NAMES)
def test_names_are_known_in_any_case(name: str) -> None:
    """A name finds the same policy however it is written."""
    for written in (name, name.upper(), name.title()):
        node = TreeNode()
        assert type(get_eviction_strategy(written)) is type(get_eviction_strategy(name))
        assert np.array_equal(get_eviction_strategy(written).get_priority(node), np.squeeze(RANKS[name](node)))
        assert type(make_order(written, 0, lambda node: True)) is type(make_order(name, 0, lambda node: True))


@pytest.mark.parametrize("ask", [get_eviction_strategy, lambda name: make_order(name, 0, lambda node: True)])
def test_an_unknown_name_is_refused_with_the_names_there_are(ask: Callable[[str], object]) -> None:
    """ConfigError, which is a ValueError, names what was asked for and every policy."""
    with pytest.raises(ConfigError) as refused:
        ask("arc")
    assert isinstance(refused.value, ValueError)
    assert "'arc'" in str(refused.value) and "fifo, filo, lfu, lru, mru, priority, slru" in str(refused.value)


def test_the_protected_segment_starts_where_it_is_told_to() -> None:
    """With a threshold of 3, what was used twice still goes before what was used three times, however recently."""
    order = PriorityHeap(SLRUStrategy(protected_threshold=3), lambda node: True)
    nodes = [TreeNode() for _ in range(3)]
    for node, hits in zip(nodes, (3, 2, 1), strict=True):
        node.hit_count = hits
        node.used()
        order.insert(node)
    went = []
    while (victim := order.victim()) is not None:
        order.evict(victim)
        went.append(victim)
    assert went == [nodes[1], nodes[2], nodes[0]]


# A policy of one's own: this class could be a file beside orders.py; its line in ORDERS is `"aged": AgedFrequency`.


class AgedFrequency(EvictionStrategy):
    """Uses count half as much after every `HALF_LIFE` events; what was evicted is remembered with its count.

    A node's rank is log2 of the sum of 2^(t / HALF_LIFE) over its uses at times t, so ranks age without being touched.
    """

    HALF_LIFE, MAX_GHOSTS = 20.0, 32

    def __init__(self, place: int, may_go: MayGo) -> None:
        self._heap = PriorityHeap(self, may_go)
        self._ranks: dict[TreeNode, float] = {}
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._now = 0

    def get_priority(self, node: TreeNode) -> float:
        return self._ranks[node]

    def insert(self, node: TreeNode) -> None:
        self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.insert(node)

    def hit(self, node: TreeNode) -> None:
        if node in self._heap:
            self._use(node)
            self._heap.hit(node)

    def lock(self, node: TreeNode) -> None:
        self._heap.lock(node)

    def unlock(self, node: TreeNode) -> None:
        if node not in self._ranks:  # it gained its value while it was locked
            self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.unlock(node)

    def expose(self, node: TreeNode) -> None:
        self._heap.expose(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._ranks[upper] = self._ranks[lower]
        self._heap.split(upper, lower)

    def evict(self, node: TreeNode) -> None:
        self._heap.evict(node)
        self._ghosts[self._name(node)] = self._ranks.pop(node)
        if len(self._ghosts) > self.MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def victim(self) -> TreeNode | None:
        return self._heap.victim()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._heap

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def _use(self, node: TreeNode) -> None:
        self._now += 1
        self._ranks[node] = float(np.logaddexp2(self._ranks[node], self._now / self.HALF_LIFE))

    @staticmethod
    def _name(node: TreeNode) -> bytes:
        return b"".join(at.run.tokens.tobytes() for at in node.path() if at.run is not None)


class Cache:
    """A tree of one-page prompts of its own policy, that holds a fixed number of them."""

    def __init__(self, policy: str, room: int) -> None:
        self.tree, self.room = RadixTree(1, PageHasher(b"identity", 1), policy=policy), room

    def ask(self, prompt: int) -> bool:
        """Whether the prompt was there; it is afterwards."""
        tokens = np.array([prompt])
        match = self.tree.match(tokens)
        if match.device_len:
            for node in match.nodes:
                node.hit_count += 1
            self.tree.touch(match.nodes[-1], Tier.DEVICE)
        else:
            if self.tree.evictable(Tier.DEVICE) == self.room:
                victim = self.tree.victim(Tier.DEVICE)
                assert victim is not None
                self.tree.drop(victim, Tier.DEVICE)
            self.tree.insert(self.tree.root, tokens, torch.zeros(1, dtype=torch.int64), Tier.DEVICE)
        self.tree.check()
        return bool(match.device_len)


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> Cache:
    order: Callable[[int, MayGo], EvictionOrder] = AgedFrequency
    monkeypatch.setitem(ORDERS, "aged", order)
    return Cache("Aged", room=4)


def test_a_policy_of_ones_own_resists_what_recency_does_not(aged: Cache) -> None:
    """Prompts seen once do not drive out what was used often under the registered policy; under lru they do."""
    for cache, survives in ((aged, True), (Cache("lru", room=4), False)):
        for prompt in (1, 2, 1, 2, 1, 2, *range(100, 110)):
            cache.ask(prompt)
        assert (cache.ask(1), cache.ask(2)) == (survives, survives)


def test_a_policy_of_ones_own_forgets_what_has_aged(aged: Cache) -> None:
    """What was used often long ago goes before what is used now: a plain count would keep it."""
    for cache, forgets in ((aged, True), (Cache("lfu", room=4), False)):
        for prompt in (1,) * 20 + (2, 3, 4) * 18 + (5,):
            cache.ask(prompt)
        assert cache.ask(1) is not forgets


def test_a_policy_of_ones_own_remembers_what_it_evicted(aged: Cache) -> None:
    """A prompt that returns after its eviction has its uses again, so it outlives newcomers seen more often since."""
    for prompt in (1, 1, 1, 1, 10, 11, 12):
        aged.ask(prompt)
    victim = aged.tree.match(np.array([1])).nodes[0]
    aged.tree.drop(victim, Tier.DEVICE)
    for prompt in (1, 20, 20, 21, 21, 22, 22, 23, 23):
        aged.ask(prompt)
    assert aged.ask(1)
