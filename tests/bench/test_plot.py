"""The figures of results: every case drawn at its value or ratio, beside its own ceiling."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.bench import plot
from hicache.bench.common import Case, Report
from hicache.bench.plot_transfer import transfer_figure
from hicache.cli import main

pytest.importorskip("matplotlib")


def _report(machine: str = "toy-gpu") -> Report:
    report = Report(
        "transfer", machine, {}, "abcdef0123456789", "2026-01-01T00:00:00+00:00", "hicache bench run transfer"
    )
    for at, (page, order) in enumerate([(64, "contiguous"), (64, "random"), (1, "random"), (16, "contiguous")]):
        for way, value in (("up", 50.0 + at), ("down", 40.0 + at)):
            name = f"{way}.page{page}.{order}.toy"
            report.add(Case.of(name, [value - 1, value, value + 2], "GB/s", ceiling=60.0 + at))
    report.add(Case.of("both.total.page64.random.toy", [90.0], "GB/s", ceiling=100.0))
    return report


def test_every_case_stands_at_its_page_with_its_value_and_ceiling() -> None:
    """Bars have the medians by page size, contiguous left of random; lines the ceilings; labels the ratios."""
    figure = transfer_figure(_report())
    up, down = figure.axes
    assert [text.get_text() for text in up.get_xticklabels()] == ["1 / 64", "16 / 16", "64 / 64"]
    for panel, base in ((up, 50.0), (down, 40.0)):
        bars = sorted((round(bar.get_x() + bar.get_width() / 2, 2), bar.get_height()) for bar in panel.patches)
        assert bars == [(0.18, base + 2), (0.82, base + 3), (1.82, base), (2.18, base + 1)]
        lines = [tuple(segment[:, 1]) for lines in panel.collections for segment in lines.get_segments()]
        assert {(60.0 + at,) * 2 for at in range(4)} <= set(lines)
        ratios = [f"{(base + at) / (60 + at):.2f}" for at in (0, 3, 1, 2)]
        assert [text.get_text() for text in panel.texts] == ratios
    assert "up" in up.get_title() and "down" in down.get_title() and "toy" in up.get_title()


def test_every_ratio_is_drawn_with_its_spread_and_target() -> None:
    """A bar a case with a ceiling, at its ratio, its whisker from p10 to p90; a mark at the target; a line at 1."""
    report = Report("toy", "toy-gpu", {}, "abcdef0123456789", "2026-01-01T00:00:00+00:00", "hicache bench run toy")
    report.add(Case.of("met", [8.0, 9.0, 10.0], "GB/s", ceiling=10.0, target=0.8))
    report.add(Case.of("free", [5.0], "GB/s", ceiling=10.0))
    report.add(Case.of("none", [5.0], "GB/s"))
    report.add(Case.of("missed", [30.0], "ms", better="lower", ceiling=20.0, target=1.2))
    figure = plot.ratio_figure(report)
    (panel,) = figure.axes
    bars = {round(bar.get_y() + bar.get_height() / 2, 2): bar.get_width() for bar in panel.patches}
    assert bars == {0: 0.9, 1: 0.5, 2: 1.5}
    labels = [text.get_text() for text in panel.get_yticklabels()]
    assert labels == ["met", "free", "missed (lower is better)"]
    segments = [segment.tolist() for lines in panel.collections for segment in lines.get_segments()]
    at_target = [[x, y] for segment in segments for x, y in segment if x in (0.8, 1.2)]
    assert {round(x, 3) for x, _ in at_target} == {0.8, 1.2}
    whiskers = [(round(s[0][0], 3), round(s[1][0], 3)) for s in segments if s[0][1] == s[1][1] == 0]
    assert whiskers == [(0.82, 0.98)]
    assert any(set(line.get_xdata()) == {1.0} for line in panel.lines)
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"ceiling", "target", "meets its target", "misses its target", "without a target"} == legend
    assert "1 cases without a ceiling" in str(figure.get_suptitle())


def test_the_same_result_gives_the_same_figures(tmp_path: Path) -> None:
    """Files named after the results, written whole; drawn again, they are the same to the byte."""
    results = [_report(name).write(tmp_path) for name in ("gpu-a", "gpu-b")]
    out = tmp_path / "deep" / "figures"
    command = ["bench", "plot", *map(str, results), "--out", str(out)]
    assert main(command) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    names = [f"transfer-gpu-{x}{kind}.svg" for x in "ab" for kind in ("", "-ratios")]
    assert sorted(first) == sorted(names) and all(b"<svg" in content for content in first.values())
    assert main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to draw, no such file, one name for two figures, no matplotlib: one line, exit 2, no figure at all."""
    result, out = _report().write(tmp_path), tmp_path / "figures"
    empty = Report("transfer", "none", {}, "", "", "").write(tmp_path)
    other = _report().write(tmp_path / "other")
    expected = {
        (result, empty): "no case of transfer on none",
        (result, tmp_path / "gone.json"): "gone.json",
        (result, other): "into two folders",
    }
    for results, words in expected.items():
        assert main(["bench", "plot", *map(str, results), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "plot", str(result), "--out", str(out)]) == 2
    assert "hicache[plot]" in capsys.readouterr().err
    assert not out.exists()
