"""Random histories of the scheduler: every account is proved after every step, and every answer is that of no cache.

See `tests/support/serving_fuzz.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from serving_fuzz import MODELS, run


def _assert_everything_happened(counts: Counter[str]) -> None:
    """The histories went through what they are about."""
    ends = ("length", "stop", "abort", "timeout", "preemptions", "admitted again", "interrupts")
    for what in (*ends, "device", "host", "restore.failures"):
        assert counts[what] > 0, f"no {what} in {dict(counts)}"


def test_random_histories() -> None:
    """Requests over full attention, windows and states, and of a transformer in float32, on tiny tiers that fail: all
    answers that ended are those of no cache, the others are prefixes of them, and afterwards nobody holds anything.
    Histories without a disk, those of even seeds, follow from their seeds and go through all that they are about."""
    _assert_everything_happened(run("window", 0, 24) + run("hybrid", 0, 24))
    for kind in ("full", "model"):
        run(kind, 1, 24)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MODELS)
def test_ten_thousand_requests(kind: str) -> None:
    """A third of ten thousand requests, in histories of 60."""
    counts: Counter[str] = Counter()
    for seed in range(100, 156):
        counts += run(kind, seed, 60)
    _assert_everything_happened(counts)
    for what in ("disk", "backup.failures", "prefetch.beside_loaded_tokens", "persist.failed_pages"):
        assert counts[what] > 0, f"no {what} in {dict(counts)}"
