"""The cost model: observed rates, and the estimates computed from them."""

from __future__ import annotations

import math

import pytest

from disk_case import Clock
from hicache.flow.cost import CostModel, PrefillCost
from hicache.metrics import Metrics
from hicache.tiers import DISK

CHUNK = 8192


def model(tokens_per_s: float | str = "auto", num_readers: int = 4, clock: Clock | None = None) -> CostModel:
    return CostModel(tokens_per_s, {DISK: num_readers}, Metrics(), clock or Clock())  # type: ignore[arg-type]


def true_s(start: int, end: int, token_s: float = 1e-4, pair_s: float = 2e-9) -> float:
    """Seconds of a prefill on a machine on which each token has one cost, and each pair of tokens another."""
    return sum(token_s + pair_s * (at + 0.5) for at in range(start, end))


def test_prefill_slows_down_with_its_context() -> None:
    """The chunks of one prompt of 32k tokens are enough to estimate prompts of 1k and of 128k correctly."""
    cost = PrefillCost()
    assert not cost.is_known
    for start in range(0, 4 * CHUNK, CHUNK):
        cost.observe(CHUNK, true_s(start, start + CHUNK), start + CHUNK / 2)
    for start, end in ((0, 1024), (0, 16 * CHUNK), (15 * CHUNK, 16 * CHUNK)):
        assert cost.seconds(start, end) == pytest.approx(true_s(start, end), rel=1e-3)
    assert cost.seconds(15 * CHUNK, 16 * CHUNK) > 2 * cost.seconds(0, CHUNK)


def test_passes_at_one_position_give_one_speed() -> None:
    """Passes that differ only in length, or hardly in position, show no cost of attention. The estimate then stays
    proportional to the length, and never falls below 0."""
    cost = PrefillCost()
    for num_tokens, seconds in ((100, 1.0), (100, 1.2), (101, 0.8)):
        cost.observe(num_tokens, seconds, 50.0)
    assert cost.seconds(0, 10_000) == pytest.approx(100.0, rel=0.05)
    for seconds in (9.0, 1.0, 5.0):  # a longer context that took less time
        cost.observe(100, seconds, 1000.0 / seconds)
    assert all(cost.seconds(start, start + 1000) > 0 for start in (0, 1000, 100_000))


@pytest.mark.parametrize("positions", [(100.0, 1000.0), (1000.0, 100.0)])
def test_no_part_of_a_prompt_has_a_negative_cost(positions: tuple[float, float]) -> None:
    """The first tokens have no negative cost if passes at late positions took much longer than their positions explain.
    The last tokens have none if these passes took less."""
    cost = PrefillCost()
    for position, seconds in zip(positions, (0.01, 10.0), strict=True):
        cost.observe(100, seconds, position)
    assert min(cost.terms) == 0.0 < max(cost.terms)
    assert cost.seconds(0, 50) > 0.0
    assert cost.seconds(100_000, 100_050) > 0.0


def test_short_passes_weigh_little_and_old_ones_fade() -> None:
    """A slow first pass, which compiles kernels, does not hide the speed of long passes. The estimate follows a machine
    that has slowed down."""
    cost = PrefillCost()
    cost.observe(16, 30.0, 8.0)
    for _ in range(4):
        cost.observe(CHUNK, 1.0, CHUNK / 2)
    assert cost.seconds(0, CHUNK) == pytest.approx(1.0, rel=0.05)
    for _ in range(100):
        cost.observe(CHUNK, 3.0, CHUNK / 2)
    assert cost.seconds(0, CHUNK) == pytest.approx(3.0, rel=0.05)


def test_a_read_counts_the_readers_that_it_occupies() -> None:
    """A read of one job has the rate of one reader, a read of many jobs the rate of four."""
    cost = model()
    assert cost.read_s(1000, 1) is None
    cost.observe_reads([(500, 1.0)])
    for num_jobs, expected in ((1, 2.0), (2, 1.0), (4, 0.5), (100, 0.5)):
        assert cost.read_s(1000, num_jobs) == pytest.approx(expected)


def test_rates_are_recent_and_grow_stale() -> None:
    """A rate follows the last operations. When the last operation is old, the rate is unknown until the next one. A
    speed of prefill does not grow old."""
    clock = Clock()
    cost = model(clock=clock)
    cost.observe_prefill(100, 1.0, 50.0)
    for num_bytes in [100] * 50 + [10_000] * 50:
        cost.observe_load(num_bytes, 1.0)
    assert cost.load_s(10_000) == pytest.approx(1.0, rel=0.01)
    clock.now_s += 61
    assert cost.load_s(10_000) is None and cost.prefill_s(0, 100) == pytest.approx(1.0)
    cost.observe_load(10, 5.0)
    assert cost.load_s(10_000) == pytest.approx(5000.0)


def test_a_configured_speed_replaces_the_measured_one() -> None:
    """A configured speed is used whatever was measured. With 0, computing never pays. With auto the speed is unknown at
    first; until the speed is measured, a low assumed speed bounds waits."""
    given, never, measured = model(50.0), model(0.0), model()
    assert measured.prefill_s(0, 100) is None and measured.longest_wait_s(0, 100) == pytest.approx(0.1)
    for cost in (given, never, measured):
        cost.observe_prefill(100, 1.0, 50.0)
    assert given.prefill_s(100, 200) == pytest.approx(2.0) == given.longest_wait_s(100, 200)
    assert never.prefill_s(0, 1) == never.longest_wait_s(0, 1) == math.inf
    assert measured.prefill_s(0, 100) == measured.longest_wait_s(0, 100) == pytest.approx(1.0)
