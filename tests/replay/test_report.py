"""The HTML report of a sweep: it is whole, stands alone, and says what the results say."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.replay.cost import TierCosts
from hicache.replay.report import render
from hicache.replay.simulation import ReplayResult, ReplaySettings, optimal, replay
from hicache.replay.trace import Trace
from replay_case import trace_of

pytest.importorskip("matplotlib", reason="a report needs matplotlib")
pytest.importorskip("jinja2", reason="a report needs jinja2")

COSTS = TierCosts(1000, 2000, 1e6, 1e5)
SIZES = (ReplaySettings(20), ReplaySettings(20, 30), ReplaySettings(20, 30, 60))
POLICIES = ("lru", "lfu", "slru")


class Page(HTMLParser):
    """Tables by id as rows of cells, every address and every id of a page, and whether all elements end."""

    VOID = ("meta", "br", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._style = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = {name: value or "" for name, value in attrs}
        self.addresses += [given[name] for name in ("src", "href", "xlink:href", "data", "action") if name in given]
        self.addresses += re.findall(r"url\(([^)]*)\)", given.get("style", "") + given.get("clip-path", ""))
        self.ids += [given["id"]] if "id" in given else []
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows = self.tables.setdefault(given.get("id", "facts"), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self._rows[-1][-1] += data
        if self._open and self._open[-1] == "style":
            self.addresses += re.findall(r"url\(([^)]*)\)|@import", data)


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = np.random.default_rng(0)
    return trace_of(*([s, *range(100 * s, 100 * s + int(rng.integers(1, 9)))] for s in rng.integers(1, 9, 80)))


@pytest.fixture(scope="module")
def results(trace: Trace) -> list[ReplayResult]:
    found = []
    for settings in SIZES:
        found += [replay(trace, replace(settings, policy=policy), costs=COSTS) for policy in POLICIES]
        found.append(optimal(trace, settings, COSTS))
    return [*found, optimal(trace, ReplaySettings(None), COSTS, "unlimited")]


@pytest.fixture(scope="module")
def page(trace: Trace, results: list[ReplayResult]) -> Page:
    return Page(render(trace, results))


def test_it_opens_without_a_network(page: Page) -> None:
    """No address leads out of the page, every one of its own exists, no id stands twice, and nothing runs."""
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "iframe", "object", "embed", "link", "img"} & set(page.tags)
    assert page.tags.count("svg") == 4


def test_every_result_is_in_the_tables(page: Page, trace: Trace, results: list[ReplayResult]) -> None:
    """A row a result with its rates, tokens and times; the sweep as a table of capacities and policies;
    the facts of the trace."""
    facts = dict(page.tables["facts"])
    assert (facts["requests"], facts["blocks asked for"], facts["time"]) == ("80", str(trace.num_blocks), "79 s")
    head, *rows = page.tables["results"]
    assert len(rows) == len(results)
    for row, result in zip(rows, results, strict=True):
        cells = dict(zip(head, row, strict=True))
        assert (cells["policy"], cells["hit rate"]) == (result.name, f"{result.hit_rate:.4f}")
        assert int(cells["tokens saved"].replace(",", "")) == result.tokens_saved
        assert cells["p50"] == f"{np.percentile(result.ttft_s, 50):.3f}"
        if result.name in POLICIES:
            rates = {tier: f"{rate:.4f}" for tier, rate in result.tier_hit_rates.items()}
            assert {tier: cells[tier] for tier in rates} == rates
    rate_head, *rates_table = page.tables["rates"]
    assert rate_head == ["capacity", *POLICIES, "optimal", "unlimited"]
    assert [row[0] for row in rates_table] == ["20", "20 + 30", "20 + 30 + 60"]
    flat = [f"{result.hit_rate:.4f}" for result in results]
    assert [row[1:] for row in rates_table] == [[*flat[at : at + 4], flat[-1]] for at in (0, 4, 8)]


def test_a_hostile_name_is_text(trace: Trace, results: list[ReplayResult]) -> None:
    """Markup in a trace's name is shown, not read, and the page is the same but for it."""
    hostile = '</title><script>alert("1")</script><img src="http://example.org/x">&$x$'
    text = render(replace(trace, name=hostile), results[:1])
    assert Page(text).tags == Page(render(trace, results[:1])).tags
    assert "example.org" in text and "<script" not in text


def test_what_a_sweep_lacks_is_left_out(trace: Trace) -> None:
    """One policy, no bound, no cost model, one instant, no hit: the page has what is left."""
    at_once = replace(trace, requests=tuple(replace(request, time_s=0.0) for request in trace.requests))
    result = replay(at_once, ReplaySettings(20))
    page = Page(render(at_once, [result]))
    assert page.tags.count("svg") == 2
    assert page.tables["rates"] == [["capacity", "lru"], ["20", f"{result.hit_rate:.4f}"]]
    assert "p50" not in page.tables["results"][0]
    with pytest.raises(ConfigError):
        render(trace, [])
    unlimited = optimal(trace, ReplaySettings(None), name="unlimited")
    assert "rates" not in Page(render(trace, [unlimited])).tables
    nothing = replay(trace_of(*([at] for at in range(10))), ReplaySettings(4))
    assert [row[2] for row in Page(render(trace, [nothing])).tables["results"]] == ["hit rate", "0.0000"]
