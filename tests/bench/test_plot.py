"""The figures of results: every case drawn at its ratio, beside its ceiling."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hicache.bench import plot
from hicache.bench.common import Case, Report
from hicache.cli import main

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def _report(machine: str = "toy-gpu") -> Report:
    report = Report("toy", machine, {}, "abcdef0123456789", "2026-01-01T00:00:00+00:00", "hicache bench run toy")
    report.add(Case.of("met", [8.0, 9.0, 10.0], "GB/s", ceiling=10.0, target=0.8))
    report.add(Case.of("free", [5.0], "GB/s", ceiling=10.0))
    report.add(Case.of("none", [5.0], "GB/s"))
    report.add(Case.of("missed", [30.0], "ms", better="lower", ceiling=20.0, target=1.2))
    return report


def test_every_ratio_is_drawn_with_its_spread_and_target() -> None:
    """A bar a case with a ceiling, at its ratio, its whisker from p10 to p90; a mark at the target; a line at 1."""
    (panel,) = plot.ratio_figure(_report()).axes
    bars = {round(bar.get_y() + bar.get_height() / 2, 2): bar.get_width() for bar in panel.patches}
    assert bars == {0: 0.9, 1: 0.5, 2: 1.5}
    assert [text.get_text() for text in panel.get_yticklabels()] == ["met", "free", "missed (lower is better)"]
    segments = [segment.tolist() for lines in panel.collections for segment in lines.get_segments()]
    assert {round(x, 3) for segment in segments for x, _ in segment} >= {0.8, 1.2}
    whiskers = [(round(s[0][0], 3), round(s[1][0], 3)) for s in segments if s[0][1] == s[1][1] == 0]
    assert whiskers == [(0.82, 0.98)]
    assert any(set(line.get_xdata()) == {1.0} for line in panel.lines)


def test_figures_are_written_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a result, the same to the byte when drawn again. With nothing to draw, a file that is missing, one name for
    two figures or no matplotlib there is one line, and no figure."""
    result, other, out = _report().write(tmp_path), _report("other").write(tmp_path), tmp_path / "deep" / "figures"
    empty, twin = Report("toy", "none", {}, "", "", "").write(tmp_path), _report().write(tmp_path / "twin")
    for wrong in (empty, tmp_path / "gone.json", twin):
        assert main(["bench", "plot", str(result), str(wrong), "--out", str(out)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(plot.importlib.util, "find_spec", lambda name: None)
        assert main(["bench", "plot", str(result), "--out", str(out)]) == 2
    assert not out.exists()
    drawn = []
    for _ in range(2):
        assert main(["bench", "plot", str(result), str(other), "--out", str(out)]) == 0
        drawn.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert drawn[0] == drawn[1] and sorted(drawn[0]) == ["toy-other-ratios.svg", "toy-toy-gpu-ratios.svg"]
    assert all(b"<svg" in content for content in drawn[0].values())
