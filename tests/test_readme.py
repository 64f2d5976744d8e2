"""README: its figures are those of the benchmarks, and it is short. The example of docs/library.md runs as printed."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import measured
import pytest

from hicache.bench.common import Report
from programs import output

README = Path(__file__).resolve().parent.parent / "README.md"
LIBRARY = README.parent / "docs/library.md"
RESULTS = README.parent / "bench/results"
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?: \d{3})*(?:\.\d+)?")
_ROW = re.compile(
    r"^\| \*\*([^*|]+)\*\* \| ([^|]+) \| ([^|]+) \| [^|]+<br>"
    r"\[<code>(.+)</code>\]\(bench/results/([\w.-]+\.json)\) \|$",
    re.MULTILINE,
)


class Row(NamedTuple):
    """A row of README's table of measurements: its ratio in words, its two sides, and the case from which they are."""

    ratio: str
    measured: str
    compared: str
    case: str
    file: str


def table_rows(text: str = "") -> list[Row]:
    return [Row(*cells) for cells in _ROW.findall((text or README.read_text()).replace("<wbr>", ""))]


def is_rounded(figure: str, value: float) -> bool:
    """Whether `figure` is `value`, rounded to the decimals of `figure`."""
    return figure.replace(" ", "") == f"{value:.{len(figure.partition('.')[2])}f}"


def test_the_example_of_the_library_runs_and_hits(tmp_path: Path) -> None:
    """Copied out of its page, except for the path of the store: the first request computes, the second hits the device,
    and in a second process the first hits the disk."""
    text = LIBRARY.read_text()
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
    """Within 40 lines; README has at most 120 lines and three tables. Before it are the intended users, the word alpha,
    and three gains with ratio and figures of rows of the table below."""
    lines = README.read_text().splitlines()
    command = lines[:40].index("    make demo")
    picture = next(line for line in lines[command:] if line.startswith("!["))
    assert picture.endswith("(docs/pictures/demo.svg)")
    assert ">identical: yes " in (README.parent / "docs/pictures/demo.svg").read_text()
    before = "\n".join(lines[:command])
    assert (
        "Use hicache if" in before
        and "hicache is alpha" in before
        and "downloads" in " ".join(lines[command : command + 5])
    )
    gains = re.findall(r"^- \*\*.*(?:\n  .*)*", before, re.MULTILINE)
    rows = {(row.ratio, _NUMBER.findall(row.measured)[0], _NUMBER.findall(row.compared)[0]) for row in table_rows()}
    assert len(gains) == 3
    for gain in gains:
        ratio = re.findall(r"\d\.\d times as fast", gain)
        pairs = itertools.combinations(_NUMBER.findall(gain), 2)
        assert rows & {(*ratio, *pair) for pair in pairs}, f"no row has these figures in this order: {gain}"
    assert len(lines) <= 120 and sum(line.startswith("|---") for line in lines) <= 3


def sides(case: dict[str, Any]) -> tuple[float, float]:
    """Value and ceiling of a case. For a share, value and ceiling are the time to the first token and the longer of
    loading and computing, from the note."""
    if case["unit"] != "share":
        return float(case["value"]), float(case["ceiling"])
    times = {word: float(number) for word, number in re.findall(r"(\w+) (\d+\.?\d*) ms", case["note"])}
    return times["token"], max(times["load"], times["compute"])


def is_ratio(words: str, value: float, ceiling: float) -> bool:
    """Whether words like "1.6 times as fast" or "31 % more" are the ratio of the two sides."""
    figure, unit, *_ = words.split()
    ratio = ceiling / value if re.search("as fast$|faster", words) else value / ceiling
    return is_rounded(figure, ratio if unit == "times" else 100 * (ratio - 1))


def wrong_rows(text: str) -> list[str]:
    """The cases of rows with a wrong figure. The first measured figure must be the case's value, and the first compared
    figure its ceiling. The ratio before these two figures must be their ratio. Any other figure must be a value, a
    ceiling or in a note of the file."""
    wrong = []
    for row in table_rows(text):
        cases = json.loads((RESULTS / row.file).read_text())["cases"]
        (case,) = (case for case in cases if case["name"] == row.case)
        value, ceiling = sides(case)
        known = [float(case[key]) for case in cases for key in ("value", "ceiling") if case.get(key) is not None]
        known += [float(number) for case in cases for number in re.findall(r"\d+\.?\d*", case.get("note") or "")]
        figures = [_NUMBER.findall(side) for side in (row.measured, row.compared)]
        further = [figure for side in figures for figure in side[1:]]
        if (
            not is_ratio(row.ratio, value, ceiling)
            or not is_rounded(figures[0][0], value)
            or not is_rounded(figures[1][0], ceiling)
            or not all(any(is_rounded(figure, number) for number in known) for figure in further)
        ):
            wrong.append(row.case)
    return wrong


def test_a_row_quotes_the_value_and_the_ceiling_of_its_case() -> None:
    """Each of the eight rows names a file of results and a case in it. The test finds exchanged sides, exchanged first
    figures, and a wrong ratio."""
    text, rows = README.read_text(), table_rows()
    assert len(rows) == text.count(".json) |\n") == 8
    assert wrong_rows(text) == []
    for row in rows:
        result = f"{row.ratio}** | {row.measured} | {row.compared}"
        figures = _NUMBER.findall(row.measured)[0], _NUMBER.findall(row.compared)[0]
        assert is_ratio(row.ratio, *(float(figure.replace(" ", "")) for figure in figures)), "too few digits"
        measured_side = row.measured.replace(figures[0], figures[1], 1)
        compared_side = row.compared.replace(figures[1], figures[0], 1)
        for exchanged in (
            f"{row.ratio}** | {row.compared} | {row.measured}",
            f"{row.ratio}** | {measured_side} | {row.compared}",
            f"{row.ratio}** | {row.measured} | {compared_side}",
            f"1{row.ratio}** | {row.measured} | {row.compared}",
        ):
            assert set(wrong_rows(text.replace(result, exchanged))) == {row.case}


def test_a_row_is_the_first_one_whose_file_has_all_its_cases(tmp_path: Path) -> None:
    """Each further figure has the words of its own case, whatever the order of the cases in the file. The row names the
    smallest number of runs on a side of its cases."""
    for name in {row.file for row in table_rows()}:
        (tmp_path / name).write_text((RESULTS / name).read_text())
    report = Report("servers", "nvidia-h200", {}, "", "", "")
    for side, (seconds, runs) in {"lazy": (165.25, 3), "cpu": (170.0, 2), "none": (172.0, 3)}.items():
        note = f"hicache, 119 to 121 in 3 runs, over {side}, 1 to 2 in {runs} runs"
        report.case(f"servers.vllm.agents.over_{side}.64", [120.0], "s", better="lower", ceiling=seconds, note=note)
    report.write(tmp_path)
    others = "165.2 s with vLLM's lazy CPU tier, 170.0 with vLLM's CPU tier, 172.0 without a tier"
    source = "</code>](bench/results/servers-nvidia-h200.json) |"
    row = measured.measured_table(tmp_path)[0]
    assert row.startswith(f"| **1.4 times as fast** | 120.0 s | {others} |")
    assert ", medians of 2 runs of each<br>[<code>servers.<wbr>vllm." in row and row.endswith(source)
    note = "hicache, 119 to 121 in 3 runs, over lmcache, 150 to 150 in 1 runs"
    name = "servers.vllm.agents.over_lmcache.64"
    report.case(name, [120.0], "s", better="lower", ceiling=150.0, note=note)
    report.write(tmp_path)
    row = measured.measured_table(tmp_path)[0]
    assert f"| {others}, 150.0 with LMCache |" in row and ", one run of each<br>" in row and row.endswith(source)
    (tmp_path / "serving-nvidia-h200.json").unlink()
    with pytest.raises(LookupError, match=r"serving\.ttft\.host"):
        measured.measured_table(tmp_path)


def test_a_ratio_is_in_words_that_say_which_side_is_better() -> None:
    report = Report("servers", "cpu", {}, "", "", "")
    report.case("faster", [2.0], "s", better="lower", ceiling=3.0)
    report.case("slower", [3.0], "s", better="lower", ceiling=2.0)
    report.case("more", [131.0], "tokens", better="higher", ceiling=100.0)
    words = [measured.conclusion(case) for case in report.cases]
    assert words == ["1.5 times as fast", "50 % slower", "31 % more"]
