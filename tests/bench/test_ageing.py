"""The bench of ageing: how it counts runs, and a replay whose runs are known."""

from __future__ import annotations

import numpy as np

from hicache.bench.ageing import num_runs, replay
from hicache.bench.policy import synthetic_trace


def test_runs_are_counted_where_ids_do_not_follow() -> None:
    """A run ends where the next id is not one more."""
    for ids, expected in (([], 0), ([7], 1), ([1, 2, 3], 1), ([1, 2, 4, 3], 3), ([3, 2, 1], 3)):
        assert num_runs(np.array(ids, dtype=np.int64)) == expected


def test_a_cache_that_fits_keeps_every_prompt_in_one_run() -> None:
    """Where nothing is ever evicted from the host, a prompt that nobody shares comes back as one run on both tiers."""
    prompts = [np.arange(at * 100, at * 100 + 8) for at in range(6)]
    (window,) = [w for w in replay([*prompts, *prompts[:1]], 2, 16, 200) if w.pages]
    assert window.end == 7 and window.host_runs == [1] and window.device_runs == [1] and window.pages == [15]


def test_a_full_cache_ages() -> None:
    """Over a trace that does not fit, prompts come back in more and shorter runs than at first; no run is empty."""
    windows = replay(synthetic_trace(400), 1, 300, 900)
    for window in windows:
        runs = zip(window.pages, window.host_runs, window.device_runs, strict=True)
        assert all(pages >= max(on_host, on_device) >= 1 for pages, on_host, on_device in runs)
    first, last = (sum(window.pages) / sum(window.host_runs) for window in (windows[0], windows[-1]))
    assert last < first
