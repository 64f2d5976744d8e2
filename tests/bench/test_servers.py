"""The benchmark `servers`: its prompts, the order of its runs, the contents of a file of results, and its cases."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from charts import makespan_chart, makespans

import bench_server
from hicache.bench import common, servers
from hicache.bench.common import BenchUnavailable, Report, ResultError
from hicache.bench.servers.cases import add_cases
from hicache.bench.servers.lmcache import lmcache_server
from hicache.bench.servers.runs import Run, Setting, missing_runs, plan
from hicache.bench.servers.workload import Workload
from hicache.cli import main

SUPPORT = Path(bench_server.__file__).parent
AGENTS = Workload(name="agents", sessions=4, turns=3, growth=100, common=40, longest=600, seed=23)


def setting(mode: str, cpu_gib: float = 64.0, **sizes: object) -> Setting:
    about = {"clients": 16, "gpu_tokens": 0, "files": "", "variant": ""} | sizes
    return Setting("vllm", mode, "agents", "40x8x6000", cpu_gib=0.0 if mode == "none" else cpu_gib, **about)


def run_of(of: Setting, makespan_s: float, answers: str = "0000 1111") -> Run:
    first = {"mean": 10 * makespan_s, "p50": 1.0, "p90": 1.0, "p99": 20 * makespan_s}
    return Run(of, "2 prompts", "1", "now", 1, makespan_s / 2, makespan_s, first, {"all": 0.75}, {}, {}, answers)


def test_a_turn_extends_the_prompt_of_its_session() -> None:
    """All sessions begin with the same tokens. Each session has all its turns, and each turn has the tokens of the last
    one and 64 to 4 x 100 new ones, up to the longest prompt. Equal seeds give equal prompts; a tiny vocabulary only
    changes the tokens."""
    prompts = AGENTS.prompts()
    last: dict[str, list[int]] = {}
    for session, tokens in ((request.session, request.tokens) for request in prompts):
        before = last.get(session, prompts[0].tokens[:40])
        assert tokens[: len(before)] == before
        assert 64 <= len(tokens) - len(before) <= 400 or len(tokens) == 600
        last[session] = tokens
    assert len(prompts) == 12 and len(last) == 4
    tiny = dataclasses.replace(AGENTS, is_tiny=True).prompts()
    assert [(r.session, len(r.tokens)) for r in tiny] == [(r.session, len(r.tokens)) for r in prompts]
    assert max(max(request.tokens) for request in tiny) < 250
    assert AGENTS.prompts() == prompts != dataclasses.replace(AGENTS, seed=24).prompts()


def test_a_trace_gives_equal_tokens_for_equal_blocks(tmp_path: Path) -> None:
    """The first prompts of the trace that are short enough are used. Without a trace, prompts are generated."""
    rows = [
        {"timestamp": n, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate([[1, 2], [1, 2, 3, 4], [1, 5], [6]])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = Workload(name="conversation", requests=2, block_tokens=8, longest=24, seed=0, trace=str(path))
    one, two = (request.tokens for request in about.prompts())
    assert len(one) == len(two) == 16 and one[:8] == two[:8] and one[8:] != two[8:]
    with pytest.raises(BenchUnavailable, match="no prompt of at most 4 tokens"):
        dataclasses.replace(about, longest=4).prompts()
    generated = dataclasses.replace(about, trace="", requests=9, longest=800).prompts()
    assert len(generated) == 9 and all(len(request.tokens) <= 800 for request in generated)


def test_samples_alternate_and_a_file_has_the_rest_made() -> None:
    """Samples alternate as A B B A A B, or A B A B A B. The missing runs of a plan are those that a file does not have,
    wherever the benchmark was stopped."""
    a, b = setting("none"), setting("hicache")
    balanced = plan([a, b], 3, "balanced")
    assert balanced == [a, b, b, a, a, b] and plan([a, b], 2, "rounds") == [a, b, a, b]
    for number in range(7):
        made = [run_of(one, 1.0) for one in balanced[:number]]
        assert missing_runs(balanced, made) == balanced[number:]
    assert missing_runs([b, b], [run_of(a, 1.0), run_of(b, 1.0)]) == [b]


def cases_of(*runs: Run, small: bool = False) -> dict[str, common.Case]:
    report = Report("servers", "gpu", {}, "", "", "")
    add_cases(report, runs, small=small)
    return {case.name: case for case in report.cases}


def test_a_case_compares_medians_under_the_same_sizes() -> None:
    """The value and the ceiling of a case are medians. Only `none` is compared with runs of every size. The ratio of
    first tokens uses the best of the other modes. A mode without its partner has no row. A variant and a tiny model
    have no target."""
    runs = [run_of(setting("none"), s) for s in (50.0, 70.0, 60.0)]
    runs += [run_of(setting("lazy", 32), 55.0), run_of(setting("lazy"), 40.0), run_of(setting("cpu", 96), 80.0)]
    runs += [run_of(setting("hicache", 32), 50.0), run_of(setting("hicache", 96), 20.0)]
    runs += [run_of(setting("hicache"), s, "0000 2222") for s in (33.0, 30.0, 39.0)]
    runs += [run_of(setting("hicache", clients=8, variant="c8"), 44.0)]
    runs += [run_of(setting("lazy", clients=8, variant="c8"), 88.0)]
    cases = cases_of(*runs)
    row = cases["servers.vllm.agents.over_none.64"]
    assert (row.value, row.ceiling, row.target, row.samples) == (33.0, 60.0, 0.65, 3)
    assert "30 to 39 in 3 runs" in row.note and "0.500 of the answers differ" in row.note
    ratios = {name: cases[f"servers.vllm.agents.over_lazy.{name}"].ratio for name in ("32", "64", "64.c8")}
    assert ratios == {"32": 50 / 55, "64": 33 / 40, "64.c8": 0.5}
    assert (cases["servers.vllm.agents.start.96"].ratio, cases["servers.vllm.agents.start.96"].target) == (0.25, 1.1)
    assert cases["servers.vllm.agents.ttft_mean.64"].ceiling == 400.0
    assert cases["servers.vllm.agents.share.64"].target == 0.80 and cases["servers.vllm.agents.share.64"].value == 0.75
    assert cases["servers.vllm.agents.over_lazy.64.c8"].target is None
    assert not {"servers.vllm.agents.over_cpu.64", "servers.vllm.agents.over_lazy.96"} & cases.keys()
    assert {case.target for case in cases_of(*runs, small=True).values()} == {None}


def test_a_disk_is_compared_on_its_file_system_and_a_mode_with_itself() -> None:
    """The row `gate` needs both other modes on the same file system. The row `control` compares the slowest with the
    fastest run of one mode."""
    on_disk = {"gpu_tokens": 180_000, "files": "ext4"}
    runs = [run_of(setting(mode, 16, **on_disk), s) for mode, s in (("disk", 9.0), ("disk-always", 12.0), ("fs", 10.0))]
    runs += [run_of(setting("fs", 16, **{**on_disk, "files": "tmpfs", "variant": "tmpfs"}), 1.0)]
    runs += [run_of(setting("cpu"), s, answers) for s, answers in ((10.0, "1 2"), (8.0, "1 3"))]
    cases = cases_of(*runs)
    assert cases["servers.vllm.agents.disk.over_fs"].ratio == 0.9
    assert "servers.vllm.agents.disk.gate" not in cases
    control = cases["servers.vllm.agents.control.64"]
    assert control.ratio == 1.25 and "0.500 of the answers differ" in control.note
    runs += [run_of(setting("disk-never", 16, **on_disk), 6.0)]
    assert cases_of(*runs)["servers.vllm.agents.disk.gate"].ratio == 1.5


def test_the_chart_of_makespans_has_the_median_of_each_mode_and_size() -> None:
    """The chart leaves out variants and other modes. A mode and size of a later report is only used if no earlier
    report has it."""
    runs = [run_of(setting("none"), 60.0)]
    runs += [run_of(setting(mode, gib), s) for mode in ("lazy", "hicache") for gib, s in ((96, 30.0), (32, 50.0))]
    runs += [run_of(setting("hicache", 32), 44.5), run_of(setting("hicache", 64, variant="c8"), 44.0)]
    later = [run_of(setting("none"), 70.0), run_of(setting("cpu", 32), 55.0)]
    reports = [Report("servers", "gpu", {}, "", "", "", runs=[*map(dataclasses.asdict, of)]) for of in (runs, later)]
    expected = {(0, "none"): [60.0], (32, "cpu"): [55.0], (32, "lazy"): [50.0], (32, "hicache"): [50.0, 44.5]}
    expected |= {(96, "lazy"): [30.0], (96, "hicache"): [30.0]}
    found = makespans(reports)
    assert found == expected and [*found] == [*expected]
    numbers = re.findall(r">([^<]*) s</text>", makespan_chart(reports))
    assert numbers == ["60.0", "55.0", "50.0", "47.2", "30.0", "30.0"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark with the server of `bench_server`."""
    monkeypatch.setitem(servers._SERVERS, "vllm", bench_server)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *filter(None, sys.path)]))


@pytest.mark.usefixtures("bench")
def test_a_killed_benchmark_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has each completed run of both GPUs. A run that does not end in time is reported, and is not in the
    file. A later command only makes the missing runs, and refuses a file that was made with other code."""
    path = tmp_path / "servers.json"
    command = ["bench", "run", "servers", "--device", "cpu", "--resume", str(path), "--gpus", "0,1"]
    assert main([*command, "--modes", "none"]) == 0
    assert main([*command, "--modes", "slow", "--limit-s", "0.1"]) == 0  # this server answers nothing
    report = common.read_report(path)
    assert [(run["setting"]["mode"], run["num_gpus"]) for run in report.runs] == [("none", 2)]
    assert "slow: answered 0 of 12 prompts in" in capsys.readouterr().out
    assert main([*command, "--modes", "none,hicache"]) == 0
    later = common.read_report(path)
    assert later.runs[:1] == report.runs and len(later.runs) == 2 and len(later.commands) == 3
    assert later.runs[0]["answers"] == later.runs[1]["answers"]
    (missed,) = [case for case in later.cases if case.name == "servers.vllm.agents.none.missed"]
    (between,) = [case for case in later.cases if case.name == "servers.vllm.agents.none.between"]
    assert between.value == pytest.approx(4.0) and between.note == "mean 4, p50 4, p90 6, p99 6 ms"
    assert missed.note == f"gate {missed.value:.3f}" and list(later.runs[0]["moved_gb"]) == ["load"]
    names = {case.name for case in later.cases}
    assert {"servers.vllm.agents.none.makespan", "servers.vllm.agents.over_none.0.015625"} <= names
    path.write_text(path.read_text().replace(later.trees["kernels"], "0" * 12).replace(later.machine, "nvidia-h200"))
    assert main([*command, "--modes", "none"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot add to {path}: kernels changed since, it is of nvidia-h200, not {later.machine}" in error
    with pytest.raises(ResultError, match="of the benchmark servers, not toy"):
        Report("toy", later.machine, {}, "", "", "", trees=later.trees).resume(path)


def test_lmcache_without_its_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts serves the prompts. If the log of a server has the warning, before or after the requests,
    the run gives no result."""
    package = tmp_path / "lmcache" / "cli"
    package.mkdir(parents=True)
    program = """
        import http.server, os, sys
        def main():
            print(os.environ["LOG"], flush=True)
            port = int(sys.argv[sys.argv.index("--http-port") + 1])
            http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
    """
    (package / "main.py").write_text("\n".join(line[8:] for line in program.splitlines()))
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = {"PYTHONPATH": str(tmp_path), "LOG": "started"}
    with lmcache_server(1.0, environment, tmp_path / "log") as connector:
        assert connector["kv_connector"] == "LMCacheMPConnector"
        port = connector["kv_connector_extra_config"]["lmcache.mp.port"]
    assert isinstance(port, int) and (tmp_path / "log").read_text().splitlines()[0] == "started"
    with (
        pytest.raises(BenchUnavailable, match="without its compiled kernels"),
        lmcache_server(1.0, environment | {"LOG": "using the torch baseline"}, tmp_path / "log"),
    ):
        raise AssertionError("it serves")
