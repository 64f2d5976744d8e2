"""How a copy is cut and which way it goes: groups of layers, chunks of pages, copy engine or kernel. Arithmetic only.

Four ways lead between host pages and the device:

    straight  up, where slots are runs: a 2-D copy by the copy engine for each buffer of a layer of a run, to its place
    strided   one 2-D copy by the copy engine for each run of contiguous pages, into a staging buffer
    batched   one call of the copy engine for a list of pages, wherever they are, into a staging buffer
    direct    a kernel with few blocks that reads or writes pinned memory itself: no staging, no calls a page

What each costs a piece (the part of one page that travels at once) and a byte is measured, by
`hicache.transfer.calibrate`, or assumed (`ASSUMED`). Narrow layers travel in groups, so that pieces are worth their
cost. Up, the first groups are small, and the last where that takes the host no calls a page: a forward starts when the
first layer is there, and computes the last when it is. A first copy waits for all of this, on a processor whose caches
are cold: what is decided again and again is remembered, and lists of pages see few operations. May import numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Method = Literal["straight", "strided", "batched", "direct"]

# What a piece may cost, as a share of the time of its bytes: on the device, either way, and of the host that issues it.
MAX_UP_SHARE = 0.015
MAX_DOWN_SHARE = 0.005  # nobody waits for the first layer on the way down
MAX_ISSUE_SHARE = 0.03  # of the host, for pieces and for steps
STEP_S = 100e-6  # of the host, for one group of one chunk: events, a kernel launch, a copy call
LAUNCH_S = 30e-6
CALL_S = 5e-6  # of the host, for one strided copy
STAGING_BYTES_PER_S = 1.9e12  # payload of a kernel between staging and slots: it takes memory from whatever computes
MIN_CHUNK_PAGES = 8
MIN_PIECE_BYTES = 128 << 10  # narrower rows take the link a third of its speed while the other direction is busy
WIDE_PIECE_BYTES = 256 << 10  # narrower ones still take it half a percent: only a first group is content with less
MAX_RAMP_BYTES = 1 << 20  # up, pieces stay below: a forward waits for a whole group


@dataclass(frozen=True)
class Way:
    """Seconds of a copy: bytes / `bytes_per_s` + pieces * `piece_s`; the host takes pieces * `issue_s` to issue it."""

    bytes_per_s: float
    piece_s: float = 0.0
    issue_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Direction:
    """The three ways in one direction. One is no other's equal: plans are remembered by it."""

    strided: Way
    batched: Way
    direct: Way


@dataclass(frozen=True)
class Rates:
    """What the link does."""

    up: Direction
    down: Direction

    def figures(self) -> dict[str, float]:
        """GB/s (1e9) and microseconds a piece, by dotted name."""
        found: dict[str, float] = {}
        for name, direction in (("up", self.up), ("down", self.down)):
            for kind, way in (
                ("strided", direction.strided),
                ("batched", direction.batched),
                ("direct", direction.direct),
            ):
                found[f"{name}.{kind}_gb_per_s"] = way.bytes_per_s / 1e9
                found[f"{name}.{kind}_piece_us"] = way.piece_s * 1e6
                found[f"{name}.{kind}_issue_us"] = way.issue_s * 1e6
        return found


# One H200 on PCIe 5 x16.
ASSUMED = Rates(
    up=Direction(Way(55.4e9, 0.03e-6), Way(55.3e9, 0.05e-6, 0.5e-6), Way(51.0e9)),
    down=Direction(Way(55.3e9, 0.4e-6), Way(55.2e9, 0.6e-6, 0.5e-6), Way(52.5e9)),
)


@dataclass(frozen=True)
class Plan:
    """`groups`: half-open intervals of layers that travel together, in order."""

    method: Method
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """What is moved. `layer_bytes`: of one layer of one page; `grouped`: whether layers may travel together.

    `slot_runs`: runs of pages whose slots are runs too, 0 where that is not so or not known; `num_parts`: buffers of
    all layers, `part_bytes`: of the smallest of them in one page.
    """

    layer_bytes: int
    num_layers: int
    num_pages: int
    num_runs: int
    grouped: bool = True
    slot_runs: int = 0
    num_parts: int = 0
    part_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.layer_bytes * self.num_layers * self.num_pages


@lru_cache(maxsize=1024)
def choose(direction: Direction, shape: Shape, buffer_bytes: int, *, ramp: bool) -> Plan:
    """The cheapest way for a copy. `buffer_bytes`: of a staging buffer; `ramp`: begin with small groups. Remembered."""
    strided_s = shape.num_runs * CALL_S + shape.num_pages * direction.strided.piece_s
    batched_s = shape.num_pages * max(direction.batched.issue_s, direction.batched.piece_s)
    method: Method = "strided" if strided_s <= batched_s else "batched"
    way = direction.strided if method == "strided" else direction.batched
    group = 1
    if shape.grouped:
        share = MAX_UP_SHARE if ramp else MAX_DOWN_SHARE
        group = fewer_steps(group_size(way, shape, buffer_bytes, share), way, shape, buffer_bytes)
        if ramp:
            group = min(group, max(1, MAX_RAMP_BYTES // shape.layer_bytes))
    first = min(group, -(-MIN_PIECE_BYTES // shape.layer_bytes))
    sizes = [group] * -(-shape.num_layers // group)
    if ramp:
        sizes = ramped(first, group, shape.num_layers, down=method == "strided")
    staged = Plan(method, _consecutive(sizes, shape.num_layers))
    layers = _consecutive([1] * shape.num_layers, shape.num_layers)
    direct = Plan("direct", ((0, shape.num_layers),) if shape.grouped else layers)
    costs = [(_staged_s(way, shape, staged.groups, buffer_bytes), staged), (_direct_s(direction.direct, shape), direct)]
    if shape.slot_runs and shape.part_bytes >= MIN_PIECE_BYTES:
        costs.append((_straight_s(direction.strided, shape), Plan("straight", layers)))
    return min(costs, key=lambda pair: pair[0])[1]


def group_size(way: Way, shape: Shape, buffer_bytes: int, share: float) -> int:
    """Layers that travel together: the smallest power of two whose pieces cost at most `share`, or all that fit."""
    most = max(1, min(shape.num_layers, buffer_bytes // (MIN_CHUNK_PAGES * shape.layer_bytes)))
    group = 1
    while group < most:
        piece_s = group * shape.layer_bytes / way.bytes_per_s
        wide = group * shape.layer_bytes >= WIDE_PIECE_BYTES
        if wide and way.piece_s <= share * piece_s and way.issue_s <= MAX_ISSUE_SHARE * piece_s:
            break
        group *= 2
    return min(group, most)


def fewer_steps(group: int, way: Way, shape: Shape, buffer_bytes: int) -> int:
    """`group`, doubled while the host would be too long at issuing steps and wider groups take fewer."""
    link_s = shape.num_layers * shape.num_pages * shape.layer_bytes / way.bytes_per_s

    def steps(group: int) -> int:
        return -(-shape.num_layers // group) * -(-shape.num_pages * group * shape.layer_bytes // buffer_bytes)

    while steps(group) * STEP_S > MAX_ISSUE_SHARE * link_s and steps(2 * group) < steps(group):
        group *= 2
    return min(group, shape.num_layers)


def ramped(first: int, group: int, num_layers: int, *, down: bool) -> list[int]:
    """Group sizes that double from `first` layers up to `group`, and with `down` halve again towards the end."""
    head, size, left, sides = [], first, num_layers, 2 if down else 1
    while size < group and left >= sides * size:
        head.append(size)
        left -= sides * size
        size = min(2 * size, group)
    tail = head[::-1] if down else []
    return head + [size] * (left // size) + ([left % size] if left % size else []) + tail


def power_of_two(count: int) -> int:
    """The least from `count` on; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """Half-open intervals of at most `step` that cover [0, total)."""
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def tapered(intervals: list[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """The intervals, the last one halved, and the half behind it again, until no more than `least` (or 1) remains."""
    if not intervals:
        return []
    *found, (start, stop) = intervals
    while stop - start > max(1, least):
        found.append((start, (start + stop + 1) // 2))
        start = found[-1][1]
    return [*found, (start, stop)]


@dataclass(frozen=True)
class Cut:
    """`pages` as runs of contiguous ids: `position` of the first page of each run among them."""

    pages: Ids
    position: Ids

    def __len__(self) -> int:
        return len(self.position)

    @cached_property
    def page(self) -> list[int]:
        """The first page of each run."""
        first: list[int] = self.pages[self.position].tolist()
        return first

    @cached_property
    def count(self) -> list[int]:
        """Pages of each run."""
        return [end - start for start, end in pairwise([*self.position.tolist(), len(self.pages)])]

    def within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """First page, pages and position of the runs of pages [start, stop), positions counted from `start`."""
        found = []
        first = int(np.searchsorted(self.position, start, side="right")) - 1
        for at in range(first, len(self)):
            position = int(self.position[at])
            if position >= stop:
                break
            skip = max(0, start - position)
            count = min(stop, position + self.count[at]) - position - skip
            found.append((self.page[at] + skip, count, position + skip - start))
        return found


def cut(pages: Ids, rows_per_chunk: int, also: npt.NDArray[np.bool_] | None = None) -> Cut:
    """Cut `pages` into runs: where the next id does not follow or lies in another pinned chunk.

    `also` [pages - 1]: where else, between a page and the next.
    """
    if not len(pages):
        return Cut(pages, pages)
    later = pages[1:]
    breaks = later - pages[:-1] != 1
    breaks |= later % rows_per_chunk == 0
    if also is not None:
        breaks |= also
    at = breaks.nonzero()[0]
    position = np.zeros(len(at) + 1, np.int64)
    np.add(at, 1, out=position[1:])
    return Cut(pages, position)


def _consecutive(sizes: list[int], num_layers: int) -> tuple[tuple[int, int], ...]:
    ends = np.minimum(np.cumsum(sizes), num_layers).tolist()
    return tuple((start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True) if start < end)


def _direct_s(way: Way, shape: Shape) -> float:
    launches = 1 if shape.grouped else shape.num_layers
    return shape.num_bytes / way.bytes_per_s + launches * LAUNCH_S


def _straight_s(way: Way, shape: Shape) -> float:
    """Link and host one after the other, for a forward is launched behind the calls."""
    pieces_s = shape.num_pages * shape.num_parts * way.piece_s
    return shape.num_bytes / way.bytes_per_s + pieces_s + shape.slot_runs * shape.num_parts * CALL_S


def _staged_s(way: Way, shape: Shape, groups: tuple[tuple[int, int], ...], buffer_bytes: int) -> float:
    """Until the last byte is there, and what others wait meanwhile: the slower of link and issuing host, a first step
    that nothing hides, and the device's memory."""
    link_s = host_s = 0.0
    for first, end in groups:
        width = (end - first) * shape.layer_bytes
        steps = -(-shape.num_pages * width // max(buffer_bytes, width))
        link_s += shape.num_pages * (width / way.bytes_per_s + way.piece_s)
        host_s += steps * STEP_S + shape.num_pages * way.issue_s
    return max(link_s, host_s) + STEP_S + shape.num_bytes / STAGING_BYTES_PER_S
