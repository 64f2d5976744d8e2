"""What watches a server from outside asks for metrics that it exports: `/metrics.json`, Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hicache.monitoring.client import MetricsClient
from hicache.monitoring.figures import FIGURES
from server_case import Server
from waiting import eventually

GRAFANA = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "hicache.json"
ADDED_BY_PROMETHEUS = {"job", "instance"}
# Of PromQL in an expression: a metric with its selector, and the labels that are kept.
SELECTOR = re.compile(r"(hicache_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def samples(server: Server) -> dict[str, list[dict[str, str]]]:
    """The labels of every sample by name."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_a_server_exports_every_figure(server: Server) -> None:
    """A server with three tiers has a sample for each series of `FIGURES`: no name or label is misspelt."""
    assert set(MetricsClient(server.root).read()) == set(FIGURES)


def test_the_page_gets_the_same_figures_without_a_key(server: Server) -> None:
    """`/metrics.json` has the figures of `/metrics`; neither it nor the page asks for the key, which /v1 does."""
    client = MetricsClient(server.url)

    def found_between_equal_readings() -> bool:  # copies may still be under way
        before, found = client.read(), json.loads(server.get("/metrics.json"))
        return found["time_s"] > 0 and found["figures"] == before == client.read()

    eventually(found_between_equal_readings)
    assert server.get("/dashboard").startswith("<!doctype html>")
    assert server.status("/v1/models") == 401


def _panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_grafana_asks_for_metrics_that_exist(server: Server) -> None:
    """Every metric, label and label value of every expression of the Grafana dashboard is exported."""
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
    """Every metric in docs/monitoring.md, those of its alerts among them, is exported."""
    names = set(re.findall(r"hicache_\w+", (GRAFANA.parents[1] / "monitoring.md").read_text()))
    assert names and names <= set(samples(server))
