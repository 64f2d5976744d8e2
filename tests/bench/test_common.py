"""The harness of the benchmarks: its arithmetic, the order of runs, its files and its command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache.bench import command, common, machine
from hicache.bench.common import Case, Report
from hicache.cli import main

CPU = torch.device("cpu")


class FakeBench:
    """A benchmark that measures one given number."""

    NAME = "toy"
    DESCRIPTION = "the number it is told"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=float, default=1.0)
        parser.add_argument("--part", default="number")

    @staticmethod
    def run(args: argparse.Namespace, report: Report) -> None:
        if args.number < 0:
            raise common.BenchUnavailable("needs a number of at least 0")
        report.add(Case.of(f"toy.{args.part}", [args.number], "GB/s", ceiling=2.0, target=0.9))


def _report() -> Report:
    report = Report("toy", "cpu-2core", {"python": "3.11"}, "abc+dirty", "2026-01-01T00:00:00+00:00", "python -m bench")
    report.add(Case.of("up.page64.contiguous", [50.0, 54.0, 52.0], "GB/s", ceiling=55.0, target=0.9))
    report.add(Case.of("up.submit", [1.5e-3], "s", better="lower", note="one call"))
    return report


def test_rates_and_times_are_shown_with_their_bounds() -> None:
    """1 GB/s is 1e9 bytes in one second, counting the bytes that each side moved. A time is shown in the requested
    unit."""
    report = _report()
    rate = report.rate(
        "r", 3_000_000_000, [1.0, 2.0, 3.0], ceiling_seconds=[0.5], ceiling_bytes=1_000_000_000, target=0.9
    )
    assert (rate.value, rate.ceiling, rate.unit, rate.better, rate.met) == (1.5, 2.0, "GB/s", "higher", False)
    assert (
        report.rate("alone", 10, [1.0]).ceiling is None
        and report.rate("same", 10, [1.0], ceiling_seconds=[2.0]).ratio == 2.0
    )
    time = report.time("t", [0.002, 0.004], "ms", ceiling_seconds=[0.006], target=1.0)
    assert (time.value, time.ceiling, time.better, time.met) == (3.0, 6.0, "lower", True)
    assert report.cases[-1] == time and len(report.cases) == 6


@pytest.mark.parametrize("ratio", [0.94, 0.95, 1.2])
def test_the_target_bounds_the_ratio_from_the_better_side(ratio: float) -> None:
    """If higher is better, the ratio must reach the target; if lower is better, it must not exceed it. A case that
    misses its target is kept, and its note begins with that fact."""
    report = _report()
    for better, met in (("higher", ratio >= 0.95), ("lower", ratio <= 0.95)):
        case = report.case(better, [ratio], "share", better=better, ceiling=1.0, target=0.95, note="page 16")
        assert case.met is met and report.cases[-1] == case
        assert case.note.endswith("page 16") and case.note.startswith("page 16" if met else "target missed: ratio")


def test_cases_that_say_nothing_are_refused() -> None:
    """Not-a-number, a target without a ratio, a case without samples, and a repeated name raise and leave the report
    unchanged."""
    report = _report()
    wrong: list[tuple[str, list[float], dict[str, float]]] = [
        ("a", [float("nan")], {}), ("a", [1.0], {"target": 0.9}), ("a", [], {}), ("up.submit", [1.0], {})
    ]  # fmt: skip
    for name, values, about in wrong:
        with pytest.raises(ValueError):
            report.case(name, values, "s", **about)
    assert len(report.cases) == 2


def test_a_result_file_holds_the_schema_and_reads_back(tmp_path: Path) -> None:
    """A written report reads back equal, under the documented keys. The new file replaces an earlier one."""
    report = _report()
    path = report.write(tmp_path / "deep")
    assert path == tmp_path / "deep" / "toy-cpu-2core.json"
    values = json.loads(path.read_text())
    fields = {"schema", "bench", "machine", "software", "commit", "date", "command", "cases", "trees", "runs"}
    assert set(values) == fields
    assert values["schema"] == 1
    fields_of_a_case = [
        "name",
        "value",
        "unit",
        "ceiling",
        "ratio",
        "better",
        "target",
        "samples",
        "p10",
        "p50",
        "p90",
        "note",
    ]
    assert list(values["cases"][0]) == fields_of_a_case
    assert common.read_report(path) == report
    report.add(Case.of("more", [1.0], "s"))
    assert report.write(tmp_path / "deep") == path
    assert common.read_report(path) == report
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_variants_run_in_turns() -> None:
    """Warm-up and measured rounds run in the order a b c a b c. The seconds are those of the timer, in order, without
    the warm-up."""
    order: list[str] = []
    ticks = iter(range(100))

    def timer(run: Callable[[], object]) -> float:
        run()
        return float(next(ticks))

    runs = {n: (lambda n=n: order.append(n)) for n in "abc"}
    seconds = common.interleave(runs, samples=2, warmup=1, timer=timer)
    assert order == list("abc") * 3 and seconds == {"a": [3.0, 6.0], "b": [4.0, 7.0], "c": [5.0, 8.0]}


def test_raw_copies_move_every_byte_they_claim(device: str) -> None:
    """Each raw copy overwrites the zeros of its targets with ones. In each run a raw copy writes exactly the bytes that
    it counts."""
    num_bytes = (1 << 16) + 7
    copies = common.raw_copies(torch.device(device), num_bytes)
    assert {n: c.num_bytes for n, c in copies.items()} == {n: num_bytes * (1 + (n == "both")) for n in copies}
    for copy in copies.values():
        for target in copy.targets:
            target.zero_()
        common.timer_for(torch.device(device))(copy.run)
        assert sum(int(target.sum(dtype=torch.int64)) for target in copy.targets) == copy.num_bytes


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_benches", lambda: ({"toy": FakeBench()}, {"gone": "No module named 'x'"}))


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nix"], "nix"),
        (["gone"], "No module named 'x'"),
        (["toy", "--nix"], "--nix"),
        (["toy", "--number", "-1"], "0"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An unknown, broken or unsuitable benchmark prints one line, exits with 2 and writes nothing."""
    assert main(["bench", "run", *arguments, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("name", ["toy", "all"])
def test_a_run_writes_what_it_measured(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file of a run has its case, its command and its machine. The last printed line is the path of this file."""
    extra = [] if name == "all" else ["--number", "1.5"]
    assert main(["bench", "run", name, "--device", "cpu", "--commit", "abc", "--out", str(tmp_path), *extra]) == 0
    (path,) = tmp_path.iterdir()
    report = common.read_report(path)
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert path.name == f"toy-{machine.machine_name(CPU)}.json"
    assert [c.value for c in report.cases] == ([1.0] if name == "all" else [1.5])
    assert report.commit == "abc"
    assert report.command == " ".join(["hicache bench run toy --device cpu --commit abc", *extra])


def test_every_module_of_the_folder_is_a_bench_or_a_helper() -> None:
    """Each benchmark that is found has the name of its module, and none has an incomplete interface. For each member of
    the small set, its parser accepts the arguments of the set."""
    benches, broken = command.find_benches()
    assert not set(benches) & {"common", "__main__", "all", *broken}
    assert all(module.DESCRIPTION and name == module.NAME for name, module in benches.items())
    for name, arguments in [*command.SETS["small"].items(), *((name, own) for name, own, _ in command.RELEASE)]:
        command.bench_parser(benches[name]).parse_args(arguments)


@pytest.mark.usefixtures("runner")
def test_a_release_is_made_in_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Parts of one benchmark are in one file. A later command only runs the parts that the file lacks, and begins no
    part that takes more than the remaining minutes."""
    monkeypatch.setattr(command, "find_benches", lambda: ({"toy": FakeBench(), "steps": FakeBench()}, {}))
    release = [("toy", ["--part", "a"], 1.0), ("toy", ["--part", "b", "--number", "2"], 3.0)]
    monkeypatch.setattr(command, "RELEASE", release)
    command_line = ["bench", "run", "release", "--device", "cpu", "--resume", str(tmp_path)]
    assert main([*command_line, "--minutes", "2"]) == 0
    (path,) = tmp_path.iterdir()
    assert [case.name for case in common.read_report(path).cases] == ["toy.a"]
    assert "toy --part b --number 2: left out, it takes 3 minutes" in capsys.readouterr().out
    release[0] = ("toy", ["--part", "a"], 1e9)  # this part is not run again
    assert main([*command_line, "--minutes", "4"]) == 0
    report = common.read_report(path)
    assert [(case.name, case.value) for case in report.cases] == [("toy.a", 1.0), ("toy.b", 2.0)]
    assert len(report.commands) == 2 and "left out" not in capsys.readouterr().out


def test_words_do_not_change_the_digest_of_source_code(tmp_path: Path) -> None:
    """A benchmark can be continued after a change of comments and docstrings, and not after another change."""
    source_file = tmp_path / "module.py"
    digests = []
    for source in ('"""A."""\nX = 1  # one\n', '"""B."""\n\nX = 1\n', "X = 2\n"):
        source_file.write_text(source)
        digests.append(machine.source_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]
