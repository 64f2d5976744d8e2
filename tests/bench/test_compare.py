"""Comparisons of two results: regressions, and results that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.bench.common import Better, Case, Report
from hicache.bench.compare import Change
from hicache.cli import main


def _report(cases: dict[str, list[float]]) -> Report:
    report = Report("toy", "toy-1core", {}, "abc", "2026-01-01T00:00:00+00:00", "hicache bench run toy")
    for name, values in cases.items():
        report.add(Case.of(name, values, "GB/s"))
    return report


def _change(before: list[float], after: list[float], better: Better) -> Change:
    old, new = (Case.of("a", values, "GB/s", better=better) for values in (before, after))
    return Change("a", old, new, 0.05)


@pytest.mark.parametrize(
    ("before", "after", "better", "verdict"),
    [
        ([100, 101, 102], [90, 91, 92], "higher", "regressed"),
        ([100, 101, 102], [90, 91, 92], "lower", "improved"),
        ([90, 91, 92], [100, 101, 102], "higher", "improved"),
        ([90, 91, 92], [100, 101, 102], "lower", "regressed"),
        ([80, 100, 102], [79, 91, 92], "higher", "noise"),
        ([100, 101, 102], [97, 98, 99], "higher", "same"),
        ([100], [94], "higher", "regressed"),  # with one sample, the threshold alone decides
        ([100], [96], "higher", "same"),
        ([80, 100, 102], [91], "higher", "regressed"),
        ([0.0], [0.0], "lower", "same"),
        ([0.0, 0.0], [1.0, 1.0], "lower", "regressed"),
        ([0.0, 0.0], [-1.0, -1.0], "lower", "improved"),
        ([-10.0], [-20.0], "higher", "regressed"),
    ],
)
def test_a_regression_is_worse_beyond_threshold_and_noise(
    before: list[float], after: list[float], better: Better, verdict: str
) -> None:
    """The verdict depends on medians, direction, threshold, and whether the intervals p10 to p90 overlap."""
    assert _change(before, after, better).verdict == verdict


def test_the_exit_status_tells_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 0 if no case is worse, and 1 if one is. The table has both values, the change and the
    verdict."""
    before = _report({"up": [100, 101, 102], "down": [50, 51, 52]}).write(tmp_path / "a")
    after = _report({"up": [90, 91, 92], "new": [1.0]}).write(tmp_path / "b")
    assert main(["bench", "compare", str(before), str(before)]) == 0
    assert main(["bench", "compare", str(after), str(before)]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(before), str(after)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.split()[:1] == ["up"]]
    assert row == ["up", "101", "GB/s", "91", "GB/s", "-9.9", "%", "apart", "higher", "regressed"]
    assert lines[-1] == "3 cases, threshold 5 %: 1 regressed, 1 only before, 1 only after"
    assert main(["bench", "compare", str(before), str(after), "--threshold", "10"]) == 0


def test_what_is_no_result_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with another schema, with other or wrong fields, or without a result, is named in one line."""
    good, bad = _report({"up": [1.0]}).write(tmp_path), tmp_path / "bad.json"
    values = json.loads(good.read_text())
    damages: list[dict[str, object]] = [
        *({"schema": 2}, {"colour": "red"}, {"bench": 3}, {"machine": []}),
        *({"cases": cases} for cases in (None, [3], {"a": 1}, [{"name": "a"}])),
    ]
    texts = ["", "[]", "3", '"a"', "{}", "[" * 20_000, "\xff", *(json.dumps(values | damage) for damage in damages)]
    for text in texts:
        bad.write_bytes(text.encode("latin-1"))
        assert main(["bench", "compare", str(good), str(bad)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(bad) in line
