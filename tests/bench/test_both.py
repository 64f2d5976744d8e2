"""The bench of computing and loading at once, in miniature: both meet in the middle of a prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.bench import both
from hicache.bench.common import read_report
from hicache.cli import main


@pytest.mark.long
def test_a_small_run_has_every_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stores as fast as computing, slower, faster and frozen, each is compared with the better of the two."""
    sizes = replace(both.ASLEEP, short=4096, long=8192, chunk=1024, num_at_once=2)
    monkeypatch.setattr(both, "ASLEEP", sizes)
    assert main(["bench", "run", "both", "--only", "rates eight", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    cases = {case.name: case for case in read_report(path).cases}
    assert cases.keys() == {f"both.{rate.name}" for rate in both.RATES} | {"both.eight"}
    assert all(case.ratio for case in cases.values())
