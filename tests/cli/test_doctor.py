"""`hicache doctor`: its findings, its status, and its advice on releases that were not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli_case import outcome, stats
from hicache import releases
from hicache.doctor import untested
from hicache.storage.disk_rate import measure_disk


def test_the_report_has_every_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Text and JSON have the same findings, including the measured disk. The measurement leaves no file."""
    found = stats(capsys, "doctor", "--disk-path", tmp_path)
    names = {(one["section"], one["name"]): one for one in found["findings"]}
    assert names["versions", "torch"]["value"] == torch.__version__
    assert ("GPU", "device") in names or ("GPU", "cuda:0") in names
    assert {("memory", "/dev/shm"), ("memory", "locked memory"), ("plug-ins", "vLLM"), ("plug-ins", "SGLang")} <= {
        *names
    }
    assert "reads" in names["disk", str(tmp_path)]["value"] and [*tmp_path.iterdir()] == []
    assert found["ok"] and not any(one["is_error"] for one in found["findings"])
    status, out, _ = outcome(capsys, "doctor", "--disk-path", tmp_path)
    assert status == 0 and all(f"  {name}  " in out for _, name in names) and "\nto change\n" in out


def test_a_path_that_cannot_be_measured_is_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A path to a file cannot be measured. All other parts of the report are still printed."""
    file = tmp_path / "file"
    file.touch()
    found = json.loads(outcome(capsys, "doctor", "--json", "--disk-path", file)[1])
    (disk,) = (one for one in found["findings"] if one["section"] == "disk")
    assert "--disk-path" in disk["change"] and len(found["findings"]) > 10


def test_a_missing_directory_is_measured_in_its_parent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """hicache creates the directory of a disk at its start; the doctor creates nothing, and says that the rate may be
    that of another drive."""
    missing = tmp_path / "a" / "b"
    found = stats(capsys, "doctor", "--disk-path", missing)
    (disk,) = (one for one in found["findings"] if one["section"] == "disk")
    assert disk["name"] == str(missing)
    assert "reads" in disk["value"] and disk["value"].endswith(f", measured in {tmp_path}")
    assert disk["change"].startswith("missing; create it on the drive") and "run this again" in disk["change"]
    assert [*tmp_path.iterdir()] == []


def test_without_a_path_the_advice_is_to_give_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of temporary files is seldom on the drive that will have the pages. A measured directory that was
    given has no such advice."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    advice = []
    for path in ((), ("--disk-path", tmp_path)):
        (disk,) = (one for one in stats(capsys, "doctor", *path)["findings"] if one["section"] == "disk")
        assert disk["name"] == str(tmp_path)
        advice.append("--disk-path DIR" in disk["change"])
    assert advice == [True, False]


def test_untested_releases_are_named() -> None:
    """Release candidates and local builds of a tested release count as tested. Earlier and later releases count as
    untested."""
    for version in ("2.11", "2.13.0+cpu", "2.15.9", "2.14.0rc1"):
        assert untested("torch", version) == ""
    for version in ("2.10.9", "2.16.0", "3.0"):
        assert f"torch {version}" in untested("torch", version)
    assert untested("numpy", "99") == ""
    assert "1.9.1" in releases.TESTED["llguidance"] and "2.0" not in releases.TESTED["llguidance"]


def test_a_disk_is_measured_in_complete_chunks(tmp_path: Path) -> None:
    """A disk is measured in complete chunks, even if the size is no multiple of a chunk. A missing folder raises."""
    rate = measure_disk(tmp_path, 1)
    assert rate.write_bytes_per_s > 0 and rate.read_bytes_per_s > 0
    with pytest.raises(OSError):
        measure_disk(tmp_path / "none", 1)
