"""The life of a page: the tables of docs/invariants.md equal those that check the histories, histories take each row,
and a change that no row allows is found."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from component_case import FULL, MODELS, config, prefill
from engine_fuzz import run
from hicache import CacheEngine, CacheRequest, build_engine
from page_life import DEVICE, EXCLUSIVE, HOST, TABLES, PageLives
from stepped_transfer import SteppedTransfers
from toy_model import prompt

PAGE = Path(__file__).parents[2] / "docs" / "invariants.md"


def test_the_documentation_has_the_tables_that_histories_are_held_to() -> None:
    """The documentation has the same rows in each tier."""
    _, _, text = PAGE.read_text().partition("## The life of a page")
    text, _, _ = text.partition("\n## ")
    found: dict[str, list[tuple[str, str]]] = {}
    for first, second in re.findall(r"^(\w+) +(\w+) {2,}\S", text, re.MULTILINE):
        if second == "to":
            rows = found[first] = []
        else:
            rows.append((first, second))
    assert found == {tier: list(table) for tier, table in TABLES.items()}


def test_histories_take_each_row_of_memory() -> None:
    """Histories without a store, which their seeds determine, take each row of device and host."""
    device, host = {("device", *row) for row in DEVICE}, {("host", *row) for row in HOST}
    of_reads = {row for row in host if "READ" in row or "DISOWNED" in row}
    at_eviction = {row for row in device if "EVICTING" in row}
    wanted = (device | host) - of_reads - at_eviction
    assert _rows_of("hybrid", range(14, 40, 2), wanted) == wanted
    wanted = at_eviction | {("exclusive", *row) for row in EXCLUSIVE}
    assert _rows_of("full", range(0, 40, 2), wanted) == wanted


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", MODELS)
def test_histories_take_each_row(kind: str) -> None:
    wanted = {
        (tier, *row) for tier, table in TABLES.items() for row in table if kind == "full" or "EVICTING" not in row
    }
    assert _rows_of(kind, range(100), wanted) == wanted


def _rows_of(kind: str, seeds: range, wanted: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """The rows that histories take; stops as soon as these include all `wanted` rows."""
    seen = Counter[tuple[str, str, str]]()
    for seed in seeds:
        seen += run(kind, seed, 400)
        if wanted <= seen.keys():
            break
    return wanted & seen.keys()


def _loading() -> tuple[CacheEngine, SteppedTransfers, np.ndarray]:
    """An engine with a record of its pages, and with a load in flight."""
    engine, first = build_engine(config(), FULL), prompt(1, 41)
    PageLives(engine)
    transfers = SteppedTransfers(engine)
    engine.start()
    for name, tokens in (("a", first), ("b", prompt(2, 100))):
        with engine.acquire(CacheRequest(name, tokens)) as lease:
            prefill(engine, lease, tokens, FULL)
        engine.flush()
    assert engine.acquire(CacheRequest("c", first)).hit.host
    return engine, transfers, first


def test_the_record_finds_planted_faults() -> None:
    """The record finds three faults: a load that counts as arrived too early, a load whose pages on the host may be
    evicted, and a change of a column outside of the calls that may change it."""
    engine, _, tokens = _loading()
    (load,) = engine.inspect.copies.loads
    engine.inspect.copies.detach(load)
    with pytest.raises(AssertionError, match=r"device: .*LOADING.*CACHED"):
        engine.expect("d", tokens)
    engine, _, tokens = _loading()
    (load,) = engine.inspect.copies.loads
    engine.inspect.context.full.pages.unlock(load.pages["full"].rows)
    with pytest.raises(AssertionError, match="is loaded from the host, where nobody has locked it"):
        engine.expect("d", tokens)
    engine, _, tokens = _loading()
    pages = engine.inspect.context.full.pages
    pages.state[pages.rows_held()[-1]] = 0
    with pytest.raises(AssertionError, match=r"host: .*HELD.*NONE.* in no call, in expect"):
        engine.expect("d", tokens)
