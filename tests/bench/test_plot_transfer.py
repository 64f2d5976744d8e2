"""The figure of the transfer bench: every case drawn at its value, beside its own ceiling."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import plot_transfer
from bench.common import BenchUnavailable, Case, Report

pytest.importorskip("matplotlib")


def _report(machine: str = "toy-gpu") -> Report:
    report = Report("transfer", machine, {}, "abcdef0123456789", "2026-01-01T00:00:00+00:00", "python -m bench")
    for at, (page, order) in enumerate([(64, "contiguous"), (64, "random"), (1, "random"), (16, "contiguous")]):
        for way, value in (("up", 50.0 + at), ("down", 40.0 + at)):
            name = f"{way}.page{page}.{order}.toy"
            report.add(Case.of(name, [value - 1, value, value + 2], "GB/s", ceiling=60.0 + at))
    report.add(Case.of("both.total.page64.random.toy", [90.0], "GB/s", ceiling=100.0))
    return report


def test_every_case_stands_at_its_page_with_its_value_and_ceiling() -> None:
    """Bars have the medians by page size, contiguous left of random; lines the ceilings; labels the ratios."""
    figure = plot_transfer.plot(_report())
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


def test_the_same_result_gives_the_same_figure(tmp_path: Path) -> None:
    """A file a result, named after the machine; written again, it is the same to the byte."""
    results = [_report(name).write(tmp_path) for name in ("gpu-a", "gpu-b")]
    out = tmp_path / "deep" / "figures"
    assert plot_transfer.main([*map(str, results), "--out", str(out)]) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(first) == ["transfer-gpu-a.svg", "transfer-gpu-b.svg"] and b"<svg" in first["transfer-gpu-a.svg"]
    assert plot_transfer.main([*map(str, results), "--out", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transfers in the result, no such file, no matplotlib: one line says so, exit code 2, no figure."""
    empty = Report("transfer", "none", {}, "", "", "").write(tmp_path)
    out = tmp_path / "figures"
    assert plot_transfer.main([str(empty), "--out", str(out)]) == 2
    assert plot_transfer.main([str(tmp_path / "gone.json"), "--out", str(out)]) == 2
    result = _report().write(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_transfer.main([str(result), "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "no transfers" in lines[0] and "gone.json" in lines[1] and "hicache[plot]" in lines[2]
    assert not out.exists()
    with pytest.raises(BenchUnavailable):
        plot_transfer.plot(_report())
