"""The device bench in miniature: each part keeps its cases under their published names, and compares what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hicache import MHATokenToKVPool
from hicache.bench import device_batch, device_bytes
from hicache.bench.common import Report, read_report
from hicache.cli import main


@pytest.mark.long
def test_a_small_run_has_every_case(tmp_path: Path) -> None:
    """By their names; on a CPU without targets."""
    assert main(["bench", "run", "device", "--device", "cpu", "--samples", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    cases = {case.name: case for case in read_report(path).cases}
    moved = {"copy", "store", "store_fp8", "move", "move_overlapping", "gather", "scatter"}
    assert {name.removesuffix(".2mib") for name in cases if name.endswith(".2mib")} == moved
    assert {name.split(".")[0] for name in cases} - moved == {
        "alloc_extend",
        "alloc_decode",
        "token_alloc",
        "free_group",
        "batch",
    }
    assert not any(case.target for case in cases.values() if case.name != "token_alloc.128.host_us")


def test_a_batch_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The served batch has rates of its passes and copies, each with a ceiling. Its tokens are compared first: if keys
    and values differ from those of plain attention, there is no figure."""
    report = Report("device", "toy", {}, "", "", "")
    device_batch.measure_batch(report, 1, torch.device("cpu"))
    assert [case.name for case in report.cases] == [f"batch.{n}" for n in ("prefill", "decode", "retract", "restore")]
    assert all(case.ceiling and case.target is None for case in report.cases)
    report, load = Report("device", "toy", {}, "", "", ""), MHATokenToKVPool.get_kv_buffer
    monkeypatch.setattr(MHATokenToKVPool, "get_kv_buffer", lambda *of: tuple(rows * 1.01 for rows in load(*of)))
    with pytest.raises(AssertionError, match="plain attention"):
        device_batch.measure_batch(report, 1, torch.device("cpu"))
    assert report.cases == []


def test_a_kernel_that_moves_nothing_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were not stored are an error, and no figure."""
    report = Report("device", "toy", {}, "", "", "")
    monkeypatch.setattr(device_bytes, "store_kv", lambda *_: None)
    with pytest.raises(AssertionError, match="store"):
        device_bytes.measure_bytes(report, 1, torch.device("cpu"), False)
    assert report.cases == []
