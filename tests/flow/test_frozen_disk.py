"""A disk that really stalls under a store process: a file system that is frozen, or a device that answers no reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozen_disk import KINDS, Unavailable, observe

NUM_REQUESTS = 100


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_serving_goes_on_while_the_disk_stalls(kind: str, tmp_path: Path) -> None:
    """While the disk answers no write, or no read, requests are served to their end, jobs keep their pages, flush and
    close return and the engine's process ends; when it answers again, everything that was stored is there."""
    try:
        served = observe(kind, tmp_path, NUM_REQUESTS)
    except Unavailable as missing:
        pytest.skip(str(missing))
    assert served["requests"] >= NUM_REQUESTS and served["quarantined"]
