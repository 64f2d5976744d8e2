"""A real SGLang on the CPU, with a tiny model, under the benchmark `servers`. Its Triton kernels are interpreted; torch
stands in for its compiled ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.bench import servers
from hicache.bench.command import run_one
from hicache.bench.common import read_report
from hicache.bench.servers import sglang

pytestmark = pytest.mark.timeout(2400)  # a start of SGLang takes a minute on a busy machine

SUPPORT = Path(__file__).resolve().parents[2] / "support"


def test_the_benchmark_compares_a_restart_with_files_and_with_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five processes: no HiCache, SGLang's files, ours, and both after a restart. Five documents, asked twice in each,
    have the same tokens, computed or loaded; from the disk comes all that was stored."""
    paths = [str(SUPPORT / "sglang_site"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = read_report(run_one(servers, ["--server", "sglang", "--device", "cpu", "--out", str(tmp_path)]))
    cases = {case.name.removeprefix("servers.sglang."): case for case in report.cases}
    timed = {"first", "first.file", "restart.over_file", "restart.over_computing"}
    moved = {f"bytes.{run}" for run in sglang.RUNS if run != "none"}
    assert cases.keys() == {*timed, *moved, "tokens"}
    assert all(cases[name].ratio for name in timed)
    assert cases["tokens"].value == 4 * 5 * 2
    cached = [cases[name].note.split()[2::9] for name in ("first", "restart.over_file", "restart.over_computing")]
    assert cached == [["0", "0"], ["1024", "1024"], ["1024", "0"]]
