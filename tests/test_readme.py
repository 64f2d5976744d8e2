"""README: its example runs as it is printed, its figures are those of the benchmarks, and it is short."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

from programs import output

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = README.parent / "bench/results"
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?: \d{3})*(?:\.\d+)?")
_ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \| `([\w.]+)` \| `([\w.-]+\.json)` \|$", re.MULTILINE)


class Row(NamedTuple):
    """A row of README's table of measurements: its two cells of figures, and the case that they quote."""

    measured: str
    compared: str
    case: str
    file: str


def table_rows() -> list[Row]:
    return [Row(*cells) for cells in _ROW.findall(README.read_text())]


def is_rounded(figure: str, value: float) -> bool:
    """Whether `figure` is `value`, rounded to as many decimals as `figure` has."""
    return figure.replace(" ", "") == f"{value:.{len(figure.partition('.')[2])}f}"


def test_the_ten_lines_run_and_hit(tmp_path: Path) -> None:
    """Copied out of README, but for the place of the store: the first request computes, the second hits the device, and
    in a second process the first hits the disk."""
    text = README.read_text()
    code = text.split("```python\n")[1].split("```\n")[0]
    assert code.count("/tmp/pages") == 1
    code = code.replace("/tmp/pages", str(tmp_path / "pages"))
    reported = [output(code).splitlines() for _ in range(2)]
    complete = "960 of 1000 tokens need no computing"
    assert reported[0] == [
        "first: 0 of 1000 tokens need no computing, Hit(device=0, host=0, disk=0, remote=0)",
        f"second: {complete}, Hit(device=960, host=0, disk=0, remote=0)",
    ]
    assert reported[1] == [f"first: {complete}, Hit(device=0, host=0, disk=960, remote=0)", reported[0][1]]
    assert "finds 960 of them (15 full pages of 64 tokens)" in " ".join(text.split())


def test_the_first_screen_has_the_first_command_and_what_it_prints() -> None:
    """Within 40 lines, and README has at most three tables. Before it stand for whom it is, that it is alpha, and three
    gains, whose figures are those of the table further down."""
    lines = README.read_text().splitlines()
    command = lines[:40].index("    make demo")
    assert any(line.startswith("    identical: yes") for line in lines[:40])
    before = "\n".join(lines[:command])
    assert (
        "Use hicache if" in before
        and "hicache is alpha" in before
        and "downloads" in " ".join(lines[command : command + 5])
    )
    gains = re.findall(r"^- \*\*.*", before, re.MULTILINE)
    pairs = {(_NUMBER.findall(row.measured)[0], _NUMBER.findall(row.compared)[0]) for row in table_rows()}
    assert len(gains) == 3
    for gain in gains:
        assert pairs & {*itertools.combinations(_NUMBER.findall(gain), 2)}, (
            f"no row has these figures in this order: {gain}"
        )
    assert sum(line.startswith("|---") for line in lines) <= 3


def test_a_row_quotes_the_value_and_the_ceiling_of_its_case() -> None:
    """A row names a file of results and a case there. Its first measured figure is the case's value, and its first
    compared figure the case's ceiling. Each further figure is a value, a ceiling or in a note of that file."""
    rows = table_rows()
    assert len(rows) == README.read_text().count(".json` |\n") > 5
    for row in rows:
        cases = json.loads((RESULTS / row.file).read_text())["cases"]
        (case,) = (case for case in cases if case["name"] == row.case)
        known = [float(case[key]) for case in cases for key in ("value", "ceiling") if case.get(key) is not None]
        known += [float(number) for case in cases for number in re.findall(r"\d+\.?\d*", case.get("note") or "")]
        for cell, key in ((row.measured, "value"), (row.compared, "ceiling")):
            first, *others = _NUMBER.findall(cell)
            assert is_rounded(first, float(case[key])), (row, key, case[key])
            assert all(any(is_rounded(figure, value) for value in known) for figure in others), (row, others)
