"""Plans a copy: its groups of layers and its method. "Up" means host to device, "down" device to host.

Four methods copy between host pages and the device:

    unstaged   up, for consecutive slots: a 2-D copy by the copy engine to the slots, per run and buffer of a layer;
    strided    a 2-D copy by the copy engine into a staging buffer, per run of contiguous pages;
    batched    one call of the copy engine for a list of scattered pages, into a staging buffer;
    zero_copy  a kernel with few blocks that reads or writes pinned memory directly, without staging or a call per page.

The costs of these methods per byte and per piece (the part of one page that is copied at once) are measured by
`hicache.transfer.calibrate`, or assumed (`ASSUMED`). Layers that are too narrow are copied in groups. For copies to the
device, the first groups are small, because a forward pass starts when its first layer has arrived. A copy waits until
its plan is computed, so plans are cached, and lists of pages are processed in few numpy operations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Method = Literal["unstaged", "strided", "batched", "zero_copy"]

# The maximum cost of the pieces of a copy, as a share of the time of the bytes: on the device for each direction, and
# on the host.
MAX_UP_SHARE = 0.015
MAX_DOWN_SHARE = 0.005  # lower than MAX_UP_SHARE, because no forward pass waits for the first layer of a store
MAX_ISSUE_SHARE = 0.03  # share of host time, for pieces and steps of a store
# share of host time for a load: loads are queued in steps, so a forward pass waits more for the link than for the host
MAX_UP_ISSUE_SHARE = 0.25
STEP_S = 100e-6  # host time of one group of one chunk: events, a kernel launch, a copy call
LAUNCH_S = 30e-6
CALL_S = 5e-6  # host time for one strided copy
# rate of a kernel between staging and slots, which takes memory bandwidth from the forward pass
STAGING_BYTES_PER_S = 1.9e12
ZERO_COPY_SHARE = 0.05  # share of the kernel's time that a concurrent forward pass loses; 8 blocks slow matmuls by 9 %
MIN_CHUNK_PAGES = 8
MIN_PIECE_BYTES = 128 << 10  # narrower rows lose a third of the bandwidth while the other direction is busy
# narrower rows lose half a percent of the bandwidth, which is accepted only for the first group
WIDE_PIECE_BYTES = 256 << 10
MAX_UP_GROUP_BYTES = 1 << 20  # maximum bytes of a page in a group, because a forward pass waits for complete groups


@dataclass(frozen=True)
class CopyCost:
    """The time of a copy in seconds: bytes / `bytes_per_s` + pieces * `piece_s`. To issue the copy, the host needs
    pieces * `issue_s`."""

    bytes_per_s: float
    piece_s: float = 0.0
    issue_s: float = 0.0


@dataclass(frozen=True, eq=False)
class LinkDirection:
    """The costs of copies in one direction. Instances are compared by identity, because they are part of the key of
    cached plans."""

    strided: CopyCost
    batched: CopyCost
    zero_copy: CopyCost


@dataclass(frozen=True)
class Rates:
    """The costs of copies over the link."""

    up: LinkDirection
    down: LinkDirection

    def stats(self) -> dict[str, float]:
        """Return the costs by direction, method and unit, under names like `up_strided_bytes_per_second`."""
        found: dict[str, float] = {}
        for name, direction in (("up", self.up), ("down", self.down)):
            for method, cost in vars(direction).items():
                found[f"{name}_{method}_bytes_per_second"] = cost.bytes_per_s
                found[f"{name}_{method}_piece_seconds"] = cost.piece_s
                found[f"{name}_{method}_issue_seconds"] = cost.issue_s
        return found


# Measured on one H200 on PCIe 5 x16.
ASSUMED = Rates(
    up=LinkDirection(CopyCost(55.4e9, 0.03e-6), CopyCost(55.3e9, 0.05e-6, 0.5e-6), CopyCost(51.0e9)),
    down=LinkDirection(CopyCost(55.3e9, 0.4e-6), CopyCost(55.2e9, 0.6e-6, 0.5e-6), CopyCost(52.5e9)),
)


@dataclass(frozen=True)
class Plan:
    """Method and groups of a copy. `groups`: half-open intervals of layers that are copied together, in order."""

    method: Method
    groups: tuple[tuple[int, int], ...]

    @property
    def is_staged(self) -> bool:
        """Return whether the copy uses a staging buffer. A kernel then moves the rows between the staging buffer and
        the slots."""
        return self.method in ("strided", "batched")


@dataclass(frozen=True)
class Shape:
    """Sizes of a copy. `layer_bytes`: bytes of one layer of one page. `grouped`: layers may be copied together.

    `slot_runs`: number of runs of pages with consecutive slots, 0 if unknown or if the slots of some page are not
    consecutive. `num_buffers`: buffers of all layers. `piece_bytes`: bytes of the smallest buffer in one page.
    `is_packed`: pages are packed between staging and slots, so copying without staging is impossible.
    """

    layer_bytes: int
    num_layers: int
    num_pages: int
    num_runs: int
    grouped: bool = True
    slot_runs: int = 0
    num_buffers: int = 0
    piece_bytes: int = 0
    is_packed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.layer_bytes * self.num_layers * self.num_pages


@lru_cache(maxsize=1024)
def choose(direction: LinkDirection, shape: Shape, buffer_bytes: int, *, up: bool) -> Plan:
    """Choose the cheapest plan. `buffer_bytes`: size of a staging buffer. `up`: the copy is a load, so a forward pass
    waits for the layers in order."""
    strided_s = shape.num_runs * CALL_S + shape.num_pages * direction.strided.piece_s
    batched_s = shape.num_pages * max(direction.batched.issue_s, direction.batched.piece_s)
    method: Method = "strided" if strided_s <= batched_s else "batched"
    cost = direction.strided if method == "strided" else direction.batched
    group = 1
    if shape.grouped:
        shares = (MAX_UP_SHARE, MAX_UP_ISSUE_SHARE) if up else (MAX_DOWN_SHARE, MAX_ISSUE_SHARE)
        group = fewer_steps(group_size(cost, shape, buffer_bytes, *shares), cost, shape, buffer_bytes, shares[1])
        if up:
            group = min(group, max(1, MAX_UP_GROUP_BYTES // shape.layer_bytes))
    sizes = [group] * -(-shape.num_layers // group)
    if up:
        first = min(group, -(-MIN_PIECE_BYTES // shape.layer_bytes))
        sizes = growing(first, group, shape.num_layers, shrink=method == "strided")
    staged = Plan(method, _consecutive(sizes, shape.num_layers))
    layers = _consecutive([1] * shape.num_layers, shape.num_layers)
    zero_copy = Plan("zero_copy", ((0, shape.num_layers),) if shape.grouped else layers)
    plans = [(_staged_s(cost, shape, staged.groups, buffer_bytes), staged)]
    if not shape.is_packed:
        plans.append((_zero_copy_s(direction.zero_copy, shape), zero_copy))
    if shape.slot_runs and shape.piece_bytes >= MIN_PIECE_BYTES:
        plans.append((_unstaged_s(direction.strided, shape), Plan("unstaged", layers)))
    return min(plans, key=lambda pair: pair[0])[1]


def group_size(cost: CopyCost, shape: Shape, buffer_bytes: int, share: float, issue_share: float) -> int:
    """Return the number of layers in a group: the smallest power of two whose pieces cost at most `share` of the time
    of their bytes on the device and `issue_share` on the host, limited by the staging buffer."""
    max_group = max(1, min(shape.num_layers, buffer_bytes // (MIN_CHUNK_PAGES * shape.layer_bytes)))
    group = 1
    while group < max_group:
        bytes_s = group * shape.layer_bytes / cost.bytes_per_s
        wide = group * shape.layer_bytes >= WIDE_PIECE_BYTES
        if wide and cost.piece_s <= share * bytes_s and cost.issue_s <= issue_share * bytes_s:
            break
        group *= 2
    return min(group, max_group)


def fewer_steps(group: int, cost: CopyCost, shape: Shape, buffer_bytes: int, issue_share: float) -> int:
    """Double `group` while issuing the steps takes too much host time, a wider group needs fewer steps, and a page of
    the group fits a buffer."""
    link_s = shape.num_layers * shape.num_pages * shape.layer_bytes / cost.bytes_per_s

    def steps(group: int) -> int:
        pages_at_once = buffer_bytes // (group * shape.layer_bytes)
        return -(-shape.num_layers // group) * -(-shape.num_pages // pages_at_once) if pages_at_once else sys.maxsize

    while steps(group) * STEP_S > issue_share * link_s and steps(2 * group) < steps(group):
        group *= 2
    return min(group, shape.num_layers)


def growing(first: int, group: int, num_layers: int, *, shrink: bool) -> list[int]:
    """Return group sizes that double from `first` layers to `group` layers. With `shrink`, the sizes are halved again
    towards the end."""
    prefix, size, left, ends = [], first, num_layers, 2 if shrink else 1
    while size < group and left >= ends * size:
        prefix.append(size)
        left -= ends * size
        size = min(2 * size, group)
    suffix = prefix[::-1] if shrink else []
    return prefix + [size] * (left // size) + ([left % size] if left % size else []) + suffix


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`; 0 if `count` is 0."""
    return 1 << (count - 1).bit_length() if count else 0


def intervals(total: int, step: int) -> list[tuple[int, int]]:
    """Return half-open intervals of at most `step` that cover [0, total)."""
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def tapered(chunks: list[tuple[int, int]], max_last: int) -> list[tuple[int, int]]:
    """Divide the last interval in halves, again and again, until the last part has at most `max_last` pages, or one
    page."""
    if not chunks:
        return []
    *found, (start, stop) = chunks
    while stop - start > max(1, max_last):
        found.append((start, (start + stop + 1) // 2))
        start = found[-1][1]
    return [*found, (start, stop)]


@dataclass(frozen=True)
class PageRuns:
    """Runs of contiguous ids in `pages`; run i begins at index `position[i]` of `pages`."""

    pages: Ids
    position: Ids

    def __len__(self) -> int:
        return len(self.position)

    @cached_property
    def first_pages(self) -> list[int]:
        first: list[int] = self.pages[self.position].tolist()
        return first

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of pages of each run."""
        return [end - start for start, end in pairwise([*self.position.tolist(), len(self.pages)])]

    def within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the runs of pages [start, stop): first page, number of pages, and position counted from `start`."""
        found = []
        first = int(np.searchsorted(self.position, start, side="right")) - 1
        for run in range(first, len(self)):
            position = int(self.position[run])
            if position >= stop:
                break
            skip = max(0, start - position)
            length = min(stop, position + self.lengths[run]) - position - skip
            found.append((self.first_pages[run] + skip, length, position + skip - start))
        return found


def page_runs(pages: Ids, rows_per_chunk: int, also: npt.NDArray[np.bool_] | None = None) -> PageRuns:
    """Split `pages` into runs of consecutive ids within one pinned chunk. `also`, bool [pages - 1]: if also[i] is True,
    a run begins at page i + 1 as well."""
    if not len(pages):
        return PageRuns(pages, pages)
    later = pages[1:]
    breaks = later - pages[:-1] != 1
    breaks |= later % rows_per_chunk == 0
    if also is not None:
        breaks |= also
    last_pages = breaks.nonzero()[0]
    position = np.zeros(len(last_pages) + 1, np.int64)
    np.add(last_pages, 1, out=position[1:])
    return PageRuns(pages, position)


def _consecutive(sizes: list[int], num_layers: int) -> tuple[tuple[int, int], ...]:
    ends = np.minimum(np.cumsum(sizes), num_layers).tolist()
    return tuple((start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True) if start < end)


def _zero_copy_s(cost: CopyCost, shape: Shape) -> float:
    """Return the seconds until the last byte has arrived, plus the time that a forward pass loses."""
    launches = 1 if shape.grouped else shape.num_layers
    return (1 + ZERO_COPY_SHARE) * shape.num_bytes / cost.bytes_per_s + launches * LAUNCH_S


def _unstaged_s(cost: CopyCost, shape: Shape) -> float:
    """Return the seconds on the link plus the seconds on the host, because a forward pass is launched after the copy
    calls."""
    pieces_s = shape.num_pages * shape.num_buffers * cost.piece_s
    return shape.num_bytes / cost.bytes_per_s + pieces_s + shape.slot_runs * shape.num_buffers * CALL_S


def _staged_s(cost: CopyCost, shape: Shape, groups: tuple[tuple[int, int], ...], buffer_bytes: int) -> float:
    """Return the seconds until the last byte has arrived. The result is the maximum of link and host time, plus the
    first step, which overlaps no copy, plus the time that a forward pass loses to the staging kernel."""
    link_s = host_s = 0.0
    for first, end in groups:
        width = (end - first) * shape.layer_bytes
        steps = -(-shape.num_pages * width // max(buffer_bytes, width))
        link_s += shape.num_pages * (width / cost.bytes_per_s + cost.piece_s)
        host_s += steps * STEP_S + shape.num_pages * cost.issue_s
    return max(link_s, host_s) + STEP_S + shape.num_bytes / STAGING_BYTES_PER_S
