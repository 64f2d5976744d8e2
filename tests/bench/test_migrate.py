"""The bench of migrations: all bytes of a leg are compared, and the mix decides how much each moves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hicache import ModelGeometry
from hicache.bench.common import read_report
from hicache.bench.migrate import LEGS, Mix, Tiers
from hicache.bench.transfer import GEOMETRIES, Layout, Rig
from hicache.cli import main

GEOMETRY = ModelGeometry(layer_num=4, head_num=8, head_dim=128)  # host pages of 1 MiB
PAGE_BYTES = 1 << 20


@pytest.fixture
def tiers(device: str, tmp_path: Path) -> Iterator[Tiers]:
    mix = Mix(1, 2, 1, 3)
    rig = Rig(GEOMETRY, Layout("", 64, 64, False), sum(mix) * 64, torch.device(device))
    found = Tiers(rig, mix, 1, tmp_path)
    yield found
    found.close()
    rig.close()


def test_every_leg_moves_its_part_and_its_bytes(tiers: Tiers) -> None:
    """Pages survive the whole journey; in round after round each leg moves as many pages as the mix says, and all bytes
    are where they belong."""
    tiers.journey()
    tiers.fill()
    for turn in range(1, 4):
        tiers.poison()
        tiers.move()
        tiers.verify()
        assert {leg: len(ended) for leg, ended in tiers.ended_s.items()} == dict.fromkeys(LEGS, turn)
        assert all(seconds > 0 for ended in tiers.ended_s.values() for seconds in ended)
    assert [tiers.num_bytes(leg) for leg in LEGS] == [part * PAGE_BYTES for part in (1, 2, 1, 3)]
    owned = [at for leg in LEGS for at in tiers.ranges[leg]]
    assert owned == list(range(7))


@pytest.mark.parametrize("leg", LEGS)
def test_one_wrong_byte_of_any_leg_fails_the_run(leg: str, tiers: Tiers) -> None:
    """A byte that differs on either side of a leg is found, in the leg's last page."""
    tiers.fill()
    tiers.poison()
    tiers.move()
    tiers.views[tiers.ranges[leg][-1]][-1] ^= 1
    with pytest.raises(AssertionError, match=f"of {leg} is not"):
        tiers.verify()


def test_what_was_not_moved_is_found(tiers: Tiers) -> None:
    """Destinations hold other bytes before a round: a leg that did nothing cannot pass for one that did."""
    tiers.fill()
    tiers.poison()
    with pytest.raises(AssertionError):
        tiers.verify()


def test_a_run_has_a_case_for_each_leg_beside_its_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each leg of the mix has GB/s, a ceiling and its pages in the note, one whose part is 0 none; no file stays."""
    monkeypatch.setitem(GEOMETRIES, "gqa8b", GEOMETRY)
    flags = [
        "--device",
        "cpu",
        "--samples",
        "1",
        "--pages",
        "2",
        "--dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    for mix, legs in (("1:2:1:1", LEGS), ("0:0:0:1", ("read",))):
        assert main(["bench", "run", "migrate", "--mix", mix, *flags]) == 0
        (path,) = (tmp_path / "out").iterdir()
        cases = {case.name: case for case in read_report(path).cases}
        assert list(cases) == [f"migrate.{leg}" for leg in (*legs, "total")]
        for leg in legs:
            case = cases[f"migrate.{leg}"]
            pages = 2 * getattr(Mix.of(mix), leg)
            assert case.unit == "GB/s" and case.value > 0 and case.ceiling is not None and case.ceiling > 0
            assert case.note.startswith(f"mix {mix}, {pages} pages of 1024 KiB")
        assert [p.name for p in tmp_path.iterdir()] == ["out"], "the run left files behind"


@pytest.mark.parametrize("text", ["", "1:1:1", "1:1:1:1:1", "0:0:0:0", "-1:1:1:1", "a:1:1:1", "1:1:1:²", "1.5:1:1:1"])
def test_a_wrong_mix_is_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mix is four whole numbers, not all zero."""
    with pytest.raises(argparse.ArgumentTypeError):
        Mix.of(text)
    assert main(["bench", "run", "migrate", "--device", "cpu", f"--mix={text}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "load:backup:write:read" in line
