"""The bench of packed pages in miniature: every case under its name, its sample, and its checks against damage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.bench.common import read_report
from hicache.bench.forward8b import TINY
from hicache.bench.overlap import CONTIGUOUS, RANDOM
from hicache.bench.packed_sample import DISTANCES, FORMATS, TILE_TOKENS, KvSample, drawn_sample
from hicache.bench.transfer import Layout, Rig
from hicache.cli import main
from hicache.config.engine import KvPacking

CPU = torch.device("cpu")
TRANSFERS = {
    "load.contiguous",
    "load.random",
    "load.3bit",
    "load.1",
    "load.8",
    "unfit.load",
    "unfit.store",
    "unfit.first_layer",
    "store",
    "both",
    "capacity.host",
}


def _sample(rng: np.random.Generator) -> KvSample:
    """Two heads of 8 values over four tiles, no two of them alike."""
    bits = rng.integers(0, 1 << 15, (2, 2, 4, TILE_TOKENS, 8)).astype(np.int16)
    return KvSample(torch.from_numpy(bits))


def _run(tmp_path: Path, *arguments: str) -> dict[str, float | None]:
    """The targets of a run by case."""
    assert (
        main(["bench", "run", "packed", "--device", "cpu", "--out", str(tmp_path), "--samples", "1", *arguments]) == 0
    )
    (path,) = tmp_path.glob("*.json")
    return {case.name.removeprefix("packed."): case.target for case in read_report(path).cases}


@pytest.mark.long
def test_transfers_and_forwards_have_every_case(tmp_path: Path) -> None:
    """The names are those of the full run, by its own sizes, and on a CPU no figure has a target."""
    cases = _run(tmp_path, "--only", "transfer", "forward")
    overlaps = {f"overlap.{part}suffix8" for part in ("", "hidden.", "control.", "beside.")}
    assert cases.keys() == TRANSFERS | overlaps | {"decode"} and not any(cases.values())


@pytest.mark.long
def test_engines_have_every_case(tmp_path: Path) -> None:
    cases = _run(tmp_path, "--only", "disk", "ttft", "--dir", str(tmp_path))
    assert cases.keys() == {"capacity.disk", "disk.processor", "ttft.128", "ttft.256"} and not any(cases.values())
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "the run left files behind"


def test_tiles_are_tokens_in_a_row_and_none_is_twice_on_a_page() -> None:
    """Rows have heads of all layers side by side; within a page no head has the same tokens twice."""
    sample = _sample(np.random.default_rng(0))
    tiles = {tile.numpy().tobytes(): at for at, tile in enumerate(sample.heads.flatten(0, 2))}
    for page in range(4):
        rows = torch.cat([sample.rows(layer, 0, 16) for layer in range(4)], 1)[page * TILE_TOKENS :][:TILE_TOKENS]
        found = [tiles[part.contiguous().numpy().tobytes()] for part in rows.split(8, 1)]
        assert len({*found}) == len(found) == 8
    assert sample.rows(0, 1, 12).shape == (4 * TILE_TOKENS, 12)


@pytest.mark.parametrize(
    ("layout", "kv_packing"),
    [
        (CONTIGUOUS, "off"),
        (RANDOM, "4"),
        *(pytest.param(*rest, marks=pytest.mark.long) for rest in [(RANDOM, "off"), (CONTIGUOUS, "4"), (RANDOM, "3")]),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_rig_holds_the_sample_and_sees_damage(layout: Layout, kv_packing: KvPacking) -> None:
    """What was stored comes back, whatever the format; a changed byte of a host page, or a page that does not fit, is
    an error."""
    sample = drawn_sample()
    with closing(Rig(TINY.geometry, layout, 512, CPU, kv_packing=kv_packing, sample=sample)) as rig:
        rig.verify()
        sample.require(rig.pool, rig.slots)
        rig.host.bytes_of[int(rig.pages[1])] ^= 1
        rig.whole_up()
        with pytest.raises(AssertionError):
            sample.require(rig.pool, rig.slots)
        _sample(np.random.default_rng(0)).fill(rig.pool, rig.slots)
        if kv_packing == "off":
            rig.whole_down()
        else:
            with pytest.raises(AssertionError, match="do not fit"):
                rig.whole_down()


def test_the_drawn_sample_has_the_measured_distances() -> None:
    """The shares of keys and values that escape are those of the model, and every page fits."""
    sample = drawn_sample()
    for bits, format in FORMATS.items():
        means, misfits = sample.escapes(format, 4, 256)
        wanted = [sum(shares[(1 << int(bits)) - 1 :]) for shares in DISTANCES]
        assert means == pytest.approx(wanted, rel=0.1) and misfits == 0
