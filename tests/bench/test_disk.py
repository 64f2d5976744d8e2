"""The disk bench in miniature: it runs, compares bytes, and keeps every case under its published name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache import ModelGeometry
from hicache.bench import disk, disk_pipeline, disk_writes
from hicache.bench.common import read_report
from hicache.cli import main


@pytest.mark.long
def test_a_small_run_has_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, writes, look-ups and the pipeline leave a figure each, and the targets stand in the file."""
    monkeypatch.setattr(disk_pipeline, "GEOMETRY", ModelGeometry(layer_num=2, head_num=2, head_dim=128))
    monkeypatch.setattr(disk_pipeline, "DOCUMENTS", 2)
    monkeypatch.setattr(disk_writes, "ALONE_S", 0.1)
    arguments = ["--gib", "0.0626", "--samples", "1", "--small-pages", "1000"]
    arguments += ["--document-tokens", "64", "--dir", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["bench", "run", "disk", *arguments]) == 0
    (path,) = (tmp_path / "out").iterdir()
    cases = {case.name: case for case in read_report(path).cases}
    targets = {"cold.8mib": 0.98, "cold.2mib": 0.97, "cold.128kib": 0.85, "compressed.8mib": 1.25, "pipeline": 0.95}
    targets |= {"write.alone": 0.95, "write.beside_readers": 0.6, "read.beside_writer": 0.9}
    targets |= dict.fromkeys(("contains.1000", "open.1m", "open.trees"), 1.0)
    assert {name: case.target for name, case in cases.items() if case.target} == targets
    names = {f"pack.{how}" for how in ("none", "byte_shuffle")}
    names |= {"raw.8mib", "raw.2mib", "raw.128kib", "write.raw", "write.commit", "open.1m.memory"}
    assert cases.keys() == targets.keys() | names | {"write.raw.beside_readers", "read.raw.beside_writer"}
    assert cases["contains.1000"].ceiling == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "the run left files behind"


def test_another_pages_bytes_fail_the_run() -> None:
    """A read that gives a page's bytes under another page's number is noticed, and so is one changed byte."""
    like = np.arange(64, dtype=np.uint8)
    order = [range(i, i + 1) for i in range(disk.THREADS)]
    good = [like.copy() for _ in range(disk.THREADS)]
    for i, page in enumerate(good):
        page[:8] = np.frombuffer(i.to_bytes(8, "big"), dtype=np.uint8)
    disk.compare(good, like, order)
    with pytest.raises(AssertionError):
        disk.compare(good[::-1], like, order)
    good[1][20] ^= 1
    with pytest.raises(AssertionError):
        disk.compare(good, like, order)
