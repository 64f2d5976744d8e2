"""The order of the policy `auto`: what is used often and lately stays, and evicted prefixes are remembered.

Uses fade: each counts half as much after a half-life, measured in tokens that the account has seen. A rank is the
logarithm of their sum, as in LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001):

    rank = log2(sum over uses of 2^(t / half_life)),  t: when, in tokens seen

so ranks fade without being touched. The uses of an evicted prefix count when it comes back, as those of ghosts do in
ARC and LIRS: where much more is used between two uses of a prefix than fits, nothing else tells a prefix that comes
back from one that does not.

The half-life follows from what is served:

    3 * median age of uses * share of uses that are older than what the account holds * trust

where recency suffices the share is small and the order nearly that of `lru`. `trust` falls while a shadow of `lru`,
which holds names alone, hits more. docs/decisions/035-the-default-policy.md has what was compared.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from hicache.tiers import Component, Tier
from hicache.tree.key import Tokens, bytes_of
from hicache.tree.node import ChildKey, Holding, TreeNode
from hicache.tree.orders import EvictionStrategy, IsEvictable, PriorityHeap, Usage

_HALF_LIVES = 3.0
_UNKNOWN_HALF_LIFE = float(1 << 40)  # until uses were seen, their number counts
# Uses that are closer than this share of the half-life are one: a request is matched several times while it waits.
_ONE_USE = 1 / 64
_BUCKETS_PER_OCTAVE, _NUM_BUCKETS = 2, 128
_OBSERVATIONS = 64  # between two looks at the ages
_FADE_AFTER = 64  # looks
_TOLERANCE = 0.5  # octaves that the half-life may be off: with another one all ranks are made anew
_ALIKE = 0.25  # ranks that differ by less are one: the parts of a prompt are evicted one by one
_REMEMBERED = 8.0  # half-lives or capacities, whichever is more
_MAX_REMEMBERED = 1 << 17  # 16 MiB
_MIN_TRUST = 1 / 64
_MAX_LEVELS = 32  # of priority: more would keep for ever what nobody asks for
_NO_USES = 2.0**-64


class _Uses(NamedTuple):
    """`uses`, faded to the time `at` in tokens seen, of `num_tokens` tokens."""

    uses: float
    at: int
    num_tokens: int


class _ShadowLru:
    """What `lru` would hold of `capacity_tokens`, by name, and how much of what is asked for it would hit."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0
        self.hit_tokens = 0

    def use(self, name: int, num_tokens: int, capacity_tokens: int) -> None:
        held_tokens = self._names.pop(name, 0)
        self.hit_tokens += min(held_tokens, num_tokens)
        self._names[name] = num_tokens
        self._tokens += num_tokens - held_tokens
        while self._tokens > capacity_tokens:
            self._tokens -= self._names.popitem(last=False)[1]

    def split(self, upper: int, lower: int, upper_tokens: int) -> None:
        """The first `upper_tokens` of what had the name of the upper part keep it."""
        num_tokens = self._names.get(upper, 0)
        if num_tokens > upper_tokens:
            self._tokens -= self._names.pop(lower, 0)
            self._names[upper], self._names[lower] = upper_tokens, num_tokens - upper_tokens


class UsageLog:
    """Uses of what one account holds and has held: shared by its orders. `tokens`: in the orders now."""

    def __init__(self, component: Component, tier: Tier) -> None:
        self._component, self._tier = component, tier
        self.tokens = 0
        self.half_life = _UNKNOWN_HALF_LIFE
        self.generation = 0  # of the half-life
        self._seen_tokens, self._capacity_tokens = 0, 1
        self._evicted: OrderedDict[int, _Uses] = OrderedDict()
        self._ages = [0.0] * _NUM_BUCKETS  # tokens by the age of their use
        self._observations = 0
        self._shadow, self._trust = _ShadowLru(), 1.0
        self._hit_tokens = self._judged_at = 0

    def holding(self, node: TreeNode) -> Holding:
        return node.holdings[self._component][self._tier]

    def rank(self, node: TreeNode) -> float:
        """Higher stays longer. A level of priority counts as twice as many uses, and so fades in a half-life."""
        holding = self.holding(node)
        return math.log2(holding.uses) + holding.used_at / self.half_life + min(node.priority, _MAX_LEVELS)

    def enter(self, node: TreeNode) -> None:
        """`node` gained its value; its uses before it was evicted are remembered, if there were any."""
        remembered, holding = self._evicted.pop(_name_of(node), None), self.holding(node)
        self._see(node)
        if remembered is None:
            holding.uses, holding.used_at = 1.0, self._seen_tokens
        else:
            holding.uses, holding.used_at = remembered.uses, remembered.at
            self._count(holding, node.num_tokens)
        holding.hits = node.hit_count

    def use(self, node: TreeNode) -> None:
        """Count a use of `node` if requests used it since the last one."""
        holding = self.holding(node)
        if holding.hits != node.hit_count:
            holding.hits = node.hit_count
            self._see(node)
            self._hit_tokens += node.num_tokens
            self._count(holding, node.num_tokens)

    def expect(self, node: TreeNode, num_uses: int) -> None:
        """`node` will be used `num_uses` times; 0: its uses so far say nothing."""
        holding = self.holding(node)
        holding.uses = max(holding.uses, float(num_uses)) if num_uses else _NO_USES
        holding.used_at = self._seen_tokens if num_uses else holding.used_at

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._shadow.split(_name_of(upper), _name_of(lower), upper.num_tokens)

    def forget(self, node: TreeNode) -> None:
        """`node` lost its value; its uses are remembered for the time that they may matter."""
        holding, evicted, name = self.holding(node), self._evicted, _name_of(node)
        self._capacity_tokens = max(1, self.tokens)
        evicted[name] = _Uses(holding.uses, holding.used_at, node.num_tokens)
        evicted.move_to_end(name)
        holding.uses = 0.0
        matters_from = self._seen_tokens - _REMEMBERED * max(self.half_life, self._capacity_tokens)
        for _ in range(2):  # more than come, so that none stays for long
            oldest = next(iter(evicted.values()), None)
            if oldest is not None and (len(evicted) > _MAX_REMEMBERED or oldest.at < matters_from):
                evicted.popitem(last=False)

    def like_tokens(self, namespace: str, start: int, tokens: Tokens, page_size: int) -> int:
        """How many of `tokens`, which follow `start` others, were used alike before they were evicted; all of them
        where nothing is remembered."""
        raw, first, end = bytes_of(tokens), None, 0
        while end < len(tokens):
            page = raw[end * tokens.itemsize : (end + page_size) * tokens.itemsize].tobytes()
            piece = self._evicted.get(_name(namespace, start + end, page if start + end else (namespace, page)))
            if piece is None or (first is not None and abs(self._rank(piece) - self._rank(first)) > _ALIKE):
                break
            first, end = first or piece, end + piece.num_tokens
        return min(end, len(tokens)) or len(tokens)

    def _rank(self, uses: _Uses) -> float:
        return math.log2(uses.uses) + uses.at / self.half_life

    def _see(self, node: TreeNode) -> None:
        self._seen_tokens += node.num_tokens
        if self._capacity_tokens > 1:  # something was evicted
            self._shadow.use(_name_of(node), node.num_tokens, self._capacity_tokens)

    def _count(self, holding: Holding, num_tokens: int) -> None:
        age = self._seen_tokens - holding.used_at
        if age <= _ONE_USE * min(self.half_life, self._capacity_tokens):
            return
        holding.uses = 1.0 + holding.uses * 2.0 ** (-age / self.half_life)
        holding.used_at = self._seen_tokens
        self._ages[_bucket(age)] += num_tokens
        self._observations += 1
        if self._observations % _OBSERVATIONS == 0:
            self._adapt()

    def _adapt(self) -> None:
        if self._seen_tokens - self._judged_at > 2 * self._capacity_tokens:
            is_behind = self._shadow.hit_tokens > 1.01 * self._hit_tokens
            self._trust = max(_MIN_TRUST, self._trust / 4) if is_behind else min(1.0, self._trust * 2**0.25)
            self._shadow.hit_tokens = self._hit_tokens = 0
            self._judged_at = self._seen_tokens
        wanted = max(1.0, _HALF_LIVES * self._median() * self._late_share() * self._trust)
        if abs(math.log2(wanted / self.half_life)) > _TOLERANCE:
            self.half_life = wanted
            self.generation += 1
        if self._observations >= _OBSERVATIONS * _FADE_AFTER:
            self._ages = [tokens / 2 for tokens in self._ages]
            self._observations = 0

    def _median(self) -> float:
        """Of the ages of uses, by tokens."""
        half, below = sum(self._ages) / 2, 0.0
        for bucket, tokens in enumerate(self._ages):
            below += tokens
            if below >= half:
                return math.pow(2.0, (bucket + 0.5) / _BUCKETS_PER_OCTAVE)
        return 1.0

    def _late_share(self) -> float:
        """Of uses that come after more tokens than the account holds."""
        return sum(self._ages[_bucket(self._capacity_tokens) + 1 :]) / sum(self._ages)


def _bucket(age: int) -> int:
    return min(int(math.log2(max(age, 1)) * _BUCKETS_PER_OCTAVE), _NUM_BUCKETS - 1)


def _name_of(node: TreeNode) -> int:
    return _name(node.namespace, node.depth_tokens - node.num_tokens, node.child_key)


def _name(namespace: str, start: int, first_page: ChildKey) -> int:
    """Of what goes on with a page behind `start` tokens. Equal names of different prefixes are rare, and misjudge only
    these."""
    return hash((namespace, start, first_page))


class _ByUses(EvictionStrategy):
    def __init__(self, log: UsageLog) -> None:
        self._log = log

    def get_priority(self, node: Usage) -> float:
        assert isinstance(node, TreeNode)
        return self._log.rank(node)


class FadingFrequency:
    """See the module. Orders of one account share its `log`."""

    def __init__(self, log: UsageLog, is_evictable: IsEvictable) -> None:
        self.log, self._heap = log, PriorityHeap[TreeNode](_ByUses(log), is_evictable)
        self._is_evictable, self._generation = is_evictable, log.generation

    def sibling(self) -> FadingFrequency:
        """Another order of the same account."""
        return FadingFrequency(self.log, self._is_evictable)

    def insert(self, node: TreeNode) -> None:
        self.log.tokens += node.num_tokens
        if not self.log.holding(node).uses:  # else it comes from the sibling
            self.log.enter(node)
        self._heap.insert(node)

    def hit(self, node: TreeNode) -> None:
        if node in self._heap:
            self.log.use(node)
            self._heap.hit(node)

    def lock(self, node: TreeNode) -> None:
        self.log.tokens -= node.num_tokens
        self._heap.lock(node)

    def unlock(self, node: TreeNode) -> None:
        self.log.tokens += node.num_tokens
        if self.log.holding(node).uses:
            self.log.use(node)
        else:  # it gained its value while it was locked
            self.log.enter(node)
        self._heap.unlock(node)

    def on_leaf(self, node: TreeNode) -> None:
        self._heap.on_leaf(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self.log.split(upper, lower)
        self._heap.split(upper, lower)

    def evict(self, node: TreeNode) -> None:
        self._heap.evict(node)
        if self.log.holding(node).value is None:  # else it goes to the sibling
            self.log.forget(node)
        self.log.tokens -= node.num_tokens

    def victim(self) -> TreeNode | None:
        if self._generation != self.log.generation:
            self._generation = self.log.generation
            self._heap.rank_again()
        return self._heap.victim()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._heap

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
