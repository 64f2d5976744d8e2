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
from collections.abc import Callable
from typing import NamedTuple

from hicache.eviction.orders import EvictionPolicy, Record

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


class FadingFrequency(EvictionPolicy):
    """See the module: uses of what one order holds and has held. `tokens`: in the order now."""

    def __init__(self) -> None:
        self.tokens = 0
        self.half_life = _UNKNOWN_HALF_LIFE
        self.generation = 0  # of the half-life
        self._seen_tokens, self._capacity_tokens = 0, 1
        self._evicted: OrderedDict[int, _Uses] = OrderedDict()
        self._ages = [0.0] * _NUM_BUCKETS  # tokens by the age of their use
        self._observations = 0
        self._shadow, self._trust = _ShadowLru(), 1.0
        self._hit_tokens = self._judged_at = 0

    def rank(self, record: Record) -> float:
        """Higher stays longer. A level of priority counts as twice as many uses, and so fades in a half-life."""
        return math.log2(record.uses) + record.used_at / self.half_life + min(record.owner.priority, _MAX_LEVELS)

    def enter(self, record: Record) -> None:
        usage = record.owner
        self.tokens += usage.num_tokens
        if not record.uses or record.hits != usage.hit_count:
            self._count_in(record)

    def lock(self, record: Record) -> None:
        self.tokens -= record.owner.num_tokens

    def use(self, record: Record) -> None:
        """Count a use if requests used it since the last one."""
        usage = record.owner
        if record.hits != usage.hit_count:
            record.hits, num_tokens = usage.hit_count, usage.num_tokens
            self._see(usage.name, num_tokens)
            self._hit_tokens += num_tokens
            self._count(record, num_tokens)

    def uses_of(self, record: Record) -> float:
        """Its uses as of now, 1 at least."""
        if not record.uses:
            return 1.0
        return max(1.0, record.uses * math.pow(2.0, (record.used_at - self._seen_tokens) / self.half_life))

    def expect_uses(self, record: Record, num_uses: float) -> None:
        self._count_in(record)
        record.uses, record.used_at = max(record.uses, float(num_uses)), self._seen_tokens

    def split(self, upper: Record, lower: Record) -> None:
        self._shadow.split(upper.owner.name, lower.owner.name, upper.owner.num_tokens)

    def forget(self, record: Record) -> None:
        """It, or a part that was split off it, is held no more; its uses are remembered while they may matter."""
        usage, evicted = record.owner, self._evicted
        name, num_tokens = usage.name, usage.num_tokens
        self._capacity_tokens = max(1, self.tokens)
        self.tokens -= num_tokens
        evicted[name] = _Uses(record.uses, record.used_at, num_tokens)
        evicted.move_to_end(name)
        record.uses = 0.0
        matters_from = self._seen_tokens - _REMEMBERED * max(self.half_life, self._capacity_tokens)
        for _ in range(2):  # more than come, so that none stays for long
            oldest = next(iter(evicted.values()), None)
            if oldest is None or (len(evicted) <= _MAX_REMEMBERED and oldest.at >= matters_from):
                break
            evicted.popitem(last=False)

    def like_tokens(self, num_tokens: int, name_at: Callable[[int], int]) -> int:
        """How many of `num_tokens` tokens were used alike before they were evicted; all of them where nothing is
        remembered. `name_at(n)`: the name of what follows the first n of them."""
        first, end = None, 0
        while end < num_tokens:
            piece = self._evicted.get(name_at(end))
            if piece is None or (first is not None and abs(self._rank(piece) - self._rank(first)) > _ALIKE):
                break
            first, end = first or piece, end + piece.num_tokens
        return min(end, num_tokens) or num_tokens

    def _count_in(self, record: Record) -> None:
        """It is held. Its uses before it was evicted are remembered, if there were any."""
        if record.uses:
            self.use(record)
            return
        usage = record.owner
        name, num_tokens = usage.name, usage.num_tokens
        remembered = self._evicted.pop(name, None)
        self._see(name, num_tokens)
        if remembered is None:
            record.uses, record.used_at = 1.0, self._seen_tokens
        else:
            record.uses, record.used_at = remembered.uses, remembered.at
            self._count(record, num_tokens)
        record.hits = usage.hit_count

    def _rank(self, uses: _Uses) -> float:
        return math.log2(uses.uses) + uses.at / self.half_life

    def _see(self, name: int, num_tokens: int) -> None:
        self._seen_tokens += num_tokens
        if self._capacity_tokens > 1:  # something was evicted
            self._shadow.use(name, num_tokens, self._capacity_tokens)

    def _count(self, record: Record, num_tokens: int) -> None:
        age = self._seen_tokens - record.used_at
        if age <= _ONE_USE * min(self.half_life, self._capacity_tokens):
            return
        record.uses = 1.0 + record.uses * 2.0 ** (-age / self.half_life)
        record.used_at = self._seen_tokens
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
