"""`hicache top`, `/metrics.json` and the Grafana dashboard use metrics that the server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from alert_case import alerts
from hicache import __version__
from hicache.cli import main
from hicache.console import scaled
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.figures import FIGURES, TIERS
from hicache.monitoring.readings import Reading
from server_case import Server
from waiting import eventually

T = TypeVar("T")
GRAFANA = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "hicache.json"
ADDED_BY_PROMETHEUS = {"job", "instance"}
# Part of a PromQL expression: a metric, its selector, and the labels of the result.
SELECTOR = re.compile(r"(hicache_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def samples(server: Server) -> dict[str, list[dict[str, str]]]:
    """By name of the metric: the labels of each of its samples."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def during(server: Server, act: Callable[[], T]) -> tuple[Reading, T]:
    """The result of `act`, and a reading that is equal before and after `act`. Copies may still be in flight and change
    readings."""
    client = MetricsClient(server.url)

    def attempt() -> tuple[Reading, T] | None:
        before, result = client.read(), act()
        return (before, result) if client.read().figures == before.figures else None

    found = eventually(attempt)
    assert found is not None
    return found


def test_a_server_exports_every_figure(server: Server) -> None:
    """A server with three tiers has a sample for each series of `FIGURES`, so no name or label is misspelt."""
    assert set(MetricsClient(server.root).read().figures) == set(FIGURES)


def test_the_server_says_what_it_is_and_what_it_saved(server: Server) -> None:
    """`hicache_info` has version and model. The seconds that a tier saved are above 0 exactly for tiers whose tokens
    were hit."""
    assert samples(server)["hicache_info"] == [{"version": __version__, "model": "random"}]
    figures = MetricsClient(server.root).read().figures
    for tier in TIERS:
        assert (figures[f"saved_s.{tier}"] > 0) == (figures[f"hit_tokens.{tier}"] > 0), tier


def test_top_prints_what_the_server_exports(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """`--once` ends with status 0 and prints the tiers with their hit rates, and the tokens that were reused."""

    def top() -> list[str]:
        assert main(["top", "--once", server.url]) == 0
        return capsys.readouterr().out.splitlines()

    reading, lines = during(server, top)
    assert reading.get("tokens.reused") > 0
    assert reading.tiers == ["device", "host", "disk"]
    for tier in reading.tiers:
        rate = reading.hit_rate(tier)
        assert rate is not None
        assert any(re.match(rf"{tier} .* {rate:.1%}  +\d+ s$", line.rstrip()) for line in lines), lines
    reused = re.escape(scaled(reading.get("tokens.reused")))
    assert any(re.match(rf"reused +- +{reused}\b", line) for line in lines), lines


def test_the_page_gets_the_same_figures_without_a_key(server: Server) -> None:
    """`/metrics.json` has the figures of `/metrics`. /v1 needs the key, but neither `/metrics.json` nor the dashboard
    does."""
    reading, found = during(server, lambda: json.loads(server.get("/metrics.json")))
    assert found["figures"] == dict(reading.figures) and found["time_s"] > 0
    assert server.get("/dashboard").startswith("<!doctype html>")
    assert server.status("/v1/models") == 401


def _panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_grafana_asks_for_metrics_that_exist(server: Server) -> None:
    """The server exports every metric, label and label value in the expressions of the Grafana dashboard."""
    exported, dashboard = samples(server), json.loads(GRAFANA.read_text())
    expressions = [target["expr"] for panel in _panels(dashboard) for target in panel["targets"]]
    queries = [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    assert len(expressions) > 30 and len(queries) == 2
    for text in (*expressions, *queries):
        names = set(re.findall(r"hicache_\w+", text))
        assert names and names <= set(exported), (names - set(exported), text)
        labels = {label for name in names for labels in exported[name] for label in labels} | ADDED_BY_PROMETHEUS
        for group in GROUPING.findall(text):
            assert {label.strip() for label in group.split(",")} <= labels, text
        for name, matchers in SELECTOR.findall(text):
            for label, value in MATCHER.findall(matchers):
                known = {labels.get(label) for labels in exported[name]}
                assert label in ADDED_BY_PROMETHEUS or value in known, (label, value, text)


def test_the_page_of_the_documentation_names_metrics_that_exist(server: Server) -> None:
    """The server exports every metric that the pages on monitoring and alerts name."""
    docs = GRAFANA.parents[1]
    text = (docs / "monitoring.md").read_text() + (docs / "alerts.md").read_text()
    names = set(re.findall(r"(?<!vllm:)\bhicache_\w+", text))
    assert names and names <= set(samples(server))


def test_the_alerts_read_metrics_that_exist(server: Server) -> None:
    """The server exports every metric that an alert reads, unless the metric is vLLM's."""
    names = {name for rule in alerts() for name in re.findall(r"(?<!vllm:)\bhicache_\w+", rule["expr"])}
    assert "hicache_disk_process_state" in names and names <= set(samples(server))
