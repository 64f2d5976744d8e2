"""The steps bench in miniature: every call is timed on every tier, and growth is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hicache.bench import steps
from hicache.bench.common import Report, read_report
from hicache.cli import main


@pytest.mark.long
def test_a_small_run_has_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is found on every tier, and queued requests are admitted or cancelled; the run leaves no files."""
    monkeypatch.setattr(steps, "MODELS", {"state": steps.MODELS["state"]})
    monkeypatch.setattr(steps, "PAGES", (64,))
    monkeypatch.setattr(steps, "MAX_ROUNDS", 3)
    arguments = ["--tokens", "2048", "--queued", "1", "60", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["bench", "run", "steps", *arguments]) == 0
    (path,) = tmp_path.iterdir()
    cases = {case.name: case for case in read_report(path).cases}
    tiers = ("new", "device", "host", "disk")
    calls = {*(f"acquire.{tier}" for tier in tiers), "poll.new", "poll.host", "poll.disk", "release.disk"}
    names = {f"{call}.state.page64.2048" for call in {*calls, "commit", "extend", "release", "submit"}}
    for call in ("submit", "poll", "acquire.new", "acquire.disk", "commit", "extend", "release"):
        names |= {f"queued.{call}.state.{number}" for number in (1, 60)}
    assert cases.keys() == names | {"queued.cancel.state.60", "load"}
    assert all(case.p50 <= case.value for case in cases.values() if case.unit == "ms")


@pytest.mark.parametrize("linear", [True, False])
def test_growth_is_judged_beside_the_next_smaller_size(linear: bool) -> None:
    """The longest call may grow with a prompt and not with a queue; what takes less than a millisecond may grow."""
    measured = {
        size: steps.Calls(
            {"same": [0.001, 0.01], "as_much": [size / 1e3], "square": [size**2 / 1e3], "short": [size / 1e7]}
        )
        for size in (500, 5000)
    }
    for calls in measured.values():
        calls.elapsed = calls.computed
    report = Report.start("steps", torch.device("cpu"), "")
    steps._report(report, "full", measured, linear=linear)
    met = {
        case.name.split(".full")[0].removeprefix("queued."): case.met
        for case in report.cases
        if case.name.endswith("5000")
    }
    assert met == {"same": True, "as_much": linear, "square": False, "short": True}
