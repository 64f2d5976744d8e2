"""The overlap bench: its checks against damage, its figures and names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hicache.bench.common import Report, read_report
from hicache.bench.forward8b import TINY
from hicache.bench.overlap import AGED, CONTIGUOUS, ORDERS, Overlap
from hicache.bench.stage import Stage, step_timer
from hicache.cli import main

PREFIX = 256
PARTS = ("", "hidden.", "control.", "beside.")


@pytest.fixture(params=[CONTIGUOUS, AGED], ids=lambda layout: layout.name)
def stage(request: pytest.FixtureRequest, device: str) -> Iterator[Stage]:
    with closing(Stage(TINY, request.param, PREFIX, torch.device(device))) as stage:
        yield stage


def test_every_variant_gives_the_resident_output(stage: Stage) -> None:
    """Poisoned before and loaded again, layer by layer or as a whole, the prefix gives the same bits at every step."""
    suffix = stage.forward.suffix(16)
    timer = step_timer(stage.sync)
    steps = stage.steps(suffix)
    assert list(steps) == ["load", "compute", "together", "control", "beside"]
    for _ in range(3):
        for name, step in steps.items():
            stage.output = torch.zeros_like(suffix.x)
            assert timer(step) > 0
            assert bool(stage.output.any()) == (name != "load")
    stage.rig.verify()


def test_poison_and_wrong_bytes_are_seen(stage: Stage) -> None:
    """Before each load the whole prefix is poison, and a forward over it without that load fails its check."""
    steps = stage.steps(stage.forward.suffix(8))
    for name in ("together", "control"):
        stage.load()
        steps[name].before()
        for layer in stage.rig.pool.layer_ids:
            for buffer in stage.rig.pool.layer_buffers(layer):
                assert buffer[stage.rig.slots].unique().tolist() == [-7.0]
        with pytest.raises(AssertionError):
            step_timer(stage.sync)(steps["compute"])
    # When one host page changes, every step that loads it fails too.
    stage.load()
    steps = stage.steps(stage.forward.suffix(8))
    stage.rig.host.bytes_of[int(stage.rig.pages[1])].zero_()
    for name in ("together", "control"):
        with pytest.raises(AssertionError):
            step_timer(stage.sync)(steps[name])


def _report() -> Report:
    return Report("overlap", "toy", {}, "", "", "")


def test_shares_follow_from_the_seconds() -> None:
    """max over measured, and the hidden share of the shorter half, for every run of both variants."""
    overlap = Overlap(64, 0.080, 0.020, (0.080, 0.085, 0.100), (0.100, 0.100, 0.110), (0.080, 0.080, 0.082))
    contiguous, random, aged = ORDERS
    report = _report()
    overlap.report(report, random, target=True)
    overlap.report(report, aged, target=True)
    overlap.report(report, contiguous, target=False)
    cases = {case.name: case for case in report.cases}
    shares, hidden, control, beside = (cases[f"overlap.{part}suffix64.random"] for part in PARTS)
    assert shares.value == pytest.approx(0.080 / 0.085) and shares.met is False and shares.target == 0.965
    assert overlap.hidden(overlap.together) == pytest.approx([1.0, 0.75, 0.0])
    assert hidden.value == pytest.approx(0.75) and control.value == pytest.approx(0.0)
    assert beside.value == pytest.approx(1.0) and overlap.hidden([0.110]) == pytest.approx([-0.5])
    assert cases["overlap.aged.suffix64"].target == 0.95 and "overlap.aged.control.suffix64" in cases
    assert {cases[f"overlap.{part}suffix64"].target for part in PARTS} == {None}
    assert aged.submit(32768) == "overlap.aged.submit" and random.submit(32768) == "submit.32k.random"


def test_a_small_run_has_every_case(tmp_path: Path) -> None:
    """On the CPU the names are those of the full run, by its own sizes, and no figure has a target."""
    arguments = ["--device", "cpu", "--samples", "2", "--prefix-tokens", "256", "--suffixes", "16", "8"]
    assert main(["bench", "run", "overlap", "--out", str(tmp_path), *arguments]) == 0
    (path,) = tmp_path.iterdir()
    report = read_report(path)
    lengths = ["suffix8", "suffix16", "suffix8.random"]
    submits = ["submit.256", "submit.256.staging256", "submit.256.random", "overlap.aged.submit"]
    expected = {"matmul.during_load", "attention.during_load"}
    expected |= {f"{name}{part}" for name in submits for part in ("", ".all_layers")}
    expected |= {f"overlap.{part}{s}" for part in PARTS for s in lengths}
    expected |= {f"overlap.aged.{part}suffix8" for part in PARTS}
    names = {case.name for case in report.cases}
    assert {name for name in names if "host_prefix" not in name} == expected
    assert {case.samples for case in report.cases} == {2} and all(case.target is None for case in report.cases)
