"""The engine's metrics have one vocabulary, and docs/metrics.md explains all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from component_case import STATES, WINDOWS, config
from hicache import build_engine
from hicache.metrics import UNITS, MetricInfo
from hicache.serving.server.metric_names import series_of
from hicache.store_config import DiskConfig
from hicache.transfer.plan import ASSUMED
from memory_store import MemoryPageStore

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MetricInfo]:
    """Of engines with windows, states and all tiers."""
    found: dict[str, MetricInfo] = {}
    for model in (WINDOWS, STATES):
        path = tmp_path_factory.mktemp("store")
        disk = DiskConfig(path=path, budget_bytes=1 << 26)
        with build_engine(config(disk=disk), model, remote=MemoryPageStore(1 << 20)) as engine:
            assert engine.metrics().keys() == engine.describe().keys() == engine.stats().keys()
            found |= engine.describe()
    return dict(sorted(found.items()))


def test_each_metric_has_type_unit_and_help(described: dict[str, MetricInfo]) -> None:
    """A name ends in its unit; counters count, histograms are of bytes or seconds, rates and ratios are gauges."""
    assert len(described) > 100
    for name, info in described.items():
        assert info.unit in UNITS and re.search(rf"[._]{info.unit}$", name), name
        assert info.help and info.help == info.help.strip().rstrip("."), name
        assert info.type != "histogram" or info.unit in ("bytes", "seconds")
        if info.unit in ("ratio", "state", "flag") or info.unit.endswith("_per_second"):
            assert info.type == "gauge", name
        if info.unit in ("attempts", "failures", "errors", "opens", "retries", "evictions", "touches"):
            assert info.type == "counter", name


def test_the_page_lists_what_an_engine_has(described: dict[str, MetricInfo]) -> None:
    """Each row of the page's tables is a metric with its type and help text, in order, and none is missing."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (\w+) \| (.+) \|$", PAGE, re.MULTILINE)
    expected = [(name, info.type, info.help) for name, info in described.items()]
    assert rows == expected, "\n".join(f"| `{name}` | {kind} | {help} |" for name, kind, help in expected)


def test_the_page_names_what_links_count(device: str) -> None:
    """Rates and copies of transfer backends are families with labels that the page names."""
    with build_engine(config(device=device), WINDOWS) as engine:
        assert engine.metrics().keys() == engine.describe().keys()
        counted = {name: info for name, info in engine.describe().items() if name.startswith("transfer")}
    assert bool(counted) == (device == "cuda")
    for name in [*counted, *(f"transfer.{name}" for name in ASSUMED.stats())]:
        series = series_of(name)
        total = "_total" if name.endswith("_copies") else ""
        assert f"| `{series.family}{total}{{{','.join(series.labels)}}}` |" in PAGE or name.endswith("delayed_copies")


def test_the_page_names_each_family_with_labels(described: dict[str, MetricInfo]) -> None:
    """Families of Prometheus that put metrics together are listed with their labels; no other row is one."""
    rows = set(re.findall(r"^\| `(hicache_\w+)\{([\w,]+)\}` \|", PAGE, re.MULTILINE))
    expected = set()
    for name, info in described.items():
        series = series_of(name)
        if series.labels:
            expected.add((series.family + "_total" * (info.type == "counter"), ",".join(series.labels)))
    assert {row for row in rows if not row[0].startswith("hicache_transfer")} == expected
