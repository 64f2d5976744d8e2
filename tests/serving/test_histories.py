"""Random histories of the scheduler (tests/support/serving_fuzz.py): all accounts hold after every step, and every
answer equals the answer without a cache."""

from __future__ import annotations

from collections import Counter

import pytest

from serving_fuzz import KINDS, run


def _assert_everything_happened(counts: Counter[str]) -> None:
    """Assert that each kind of event occurred."""
    ends = ("length", "stop", "abort", "timeout", "preemptions", "admitted again", "interrupts")
    for what in (*ends, "device", "host", "restore.failures"):
        assert counts[what] > 0, f"no {what} in {dict(counts)}"


@pytest.mark.parametrize("kind", ["full", "latent", "model"])
def test_random_histories_with_stores(kind: str) -> None:
    """The histories of the next test, with a disk and a remote store."""
    run(kind, 1, 24)


def test_random_histories() -> None:
    """Requests of toy models, and of a transformer in float32, on tiny tiers that fail. Each complete answer equals the
    answer without a cache, each incomplete one is a prefix of it, and at the end no request holds anything. Histories
    of even seeds have no stores, so the seed determines them; each kind of event occurs in them."""
    _assert_everything_happened(run("window", 0, 24) + run("hybrid", 0, 24))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_requests(kind: str) -> None:
    """A thousand requests of each kind of model, in histories of 60 requests. Half of the histories have a disk. How
    fast the disk works decides whether computing overlaps with reading, and whether a write meets a fault of the disk,
    so these may occur in no history."""
    counts: Counter[str] = Counter()
    for seed in range(100, 117):
        counts += run(kind, seed, 60)
    _assert_everything_happened(counts)
    for what in ("disk", "backup.failures"):
        assert counts[what] > 0, f"no {what} in {dict(counts)}"
