"""README: its example runs as it is printed, its figures are those of the benchmarks, and it is short."""

from __future__ import annotations

import json
import re
from pathlib import Path

from programs import output

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = README.parent / "bench/results"
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?: \d{3})*(?:\.\d+)?")


def test_the_ten_lines_run_and_hit(tmp_path: Path) -> None:
    """Copied out of README, but for the place of the store: the first request computes, the second hits the device, and
    in a second process the first hits the disk."""
    text = README.read_text()
    code = text.split("```python\n")[1].split("```\n")[0]
    assert code.count("/tmp/pages") == 1
    code = code.replace("/tmp/pages", str(tmp_path / "pages"))
    told = [output(code).splitlines() for _ in range(2)]
    whole = "960 of 1000 tokens need no computing"
    assert told[0] == [
        "first: 0 of 1000 tokens need no computing, Hit(device=0, host=0, disk=0, remote=0)",
        f"second: {whole}, Hit(device=960, host=0, disk=0, remote=0)",
    ]
    assert told[1] == [f"first: {whole}, Hit(device=0, host=0, disk=960, remote=0)", told[0][1]]
    assert "finds 960 of them, 15 whole pages" in text


def test_the_first_screen_has_the_first_command_and_what_it_prints() -> None:
    """Within 40 lines, and README has at most three tables. Before it stand for whom it is, that it is alpha, and three
    gains, whose figures are those of the table further down."""
    lines = README.read_text().splitlines()
    command = lines[:40].index("    make demo")
    assert any(line.startswith("    identical: yes") for line in lines[:40])
    before = "\n".join(lines[:command])
    assert (
        "It is for you if" in before
        and "It is alpha" in before
        and "downloads" in " ".join(lines[command : command + 5])
    )
    gains = re.findall(r"^- \*\*.*", before, re.MULTILINE)
    table = " ".join(line for line in lines if line.startswith("| "))
    assert len(gains) == 3 and {*_NUMBER.findall(" ".join(gains))} <= {*_NUMBER.findall(table)}
    assert sum(line.startswith("|---") for line in lines) <= 3


def test_every_figure_of_the_table_is_in_its_file() -> None:
    """A row names a file of results, and its figures are values, ceilings or of notes there, rounded."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \| `([\w.-]+\.json)` \|$", README.read_text(), re.MULTILINE)
    assert len(rows) > 5
    for *cells, name in rows:
        cases = json.loads((RESULTS / name).read_text())["cases"]
        known = [float(case[key]) for case in cases for key in ("value", "ceiling") if case.get(key) is not None]
        known += [float(number) for case in cases for number in re.findall(r"\d+\.?\d*", case.get("note") or "")]
        for figure in _NUMBER.findall(" ".join(cells)):
            decimals = len(figure.partition(".")[2])
            assert figure.replace(" ", "") in {f"{value:.{decimals}f}" for value in known}, (name, figure)
