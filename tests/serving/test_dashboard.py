"""The page at `/dashboard` in a real browser."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from browser_case import BROWSER, Page, browser_page
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.readings import Reading
from server_case import KEY, SECRET, TINY, Server, serving
from waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "hicache" / "serving" / "server" / "dashboard.html"
# The tiles, as text by name; and their sizes.
TILES = (
    "Object.fromEntries([...document.querySelectorAll('.tile')]"
    ".map(x => [x.children[1].textContent, x.children[0].textContent]))"
)
SIZES = "[...document.querySelectorAll('.tile')].map(x => [x.offsetWidth, x.offsetHeight])"
# The table of all figures, as text by name.
SHOWN = (
    "Object.fromEntries([...document.querySelectorAll('#all td[data-figure]')]"
    ".map(x => [x.dataset.figure, x.textContent]))"
)


def ask(server: Server, num_prompts: int) -> None:
    for number in range(num_prompts):
        prompt = f"{SECRET} {number % 2} " * 60
        server.client(KEY).completions.create(model="random", prompt=prompt, max_tokens=4)
    server.wait_idle()
    server.wait_for_at_least("hicache_admit_hit_tokens_total", 1)


def wait_until_equal(page: Page, server: Server) -> Mapping[str, float]:
    """Wait until the page has every figure that the server exports, and no other figure; returns the figures."""

    def shown() -> Mapping[str, float]:
        return {name: float(text.replace(",", "")) for name, text in page.value(SHOWN).items()}

    def exported() -> Mapping[str, float]:
        return {name: round(value, 3) for name, value in MetricsClient(server.root).read().figures.items()}

    eventually(lambda: shown() == exported(), lambda: (shown(), exported()))
    return exported()


def test_the_page_names_no_other_address() -> None:
    """Page and script name no host. The namespace of SVG looks like an address, but is a name."""
    text = re.sub(r"(?m)(^|\s)// .*", "", PAGE.read_text())
    assert set(re.findall(r"//[\w.-]+", text)) == {"//www.w3.org"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_shows_what_the_server_exports(tmp_path: Path) -> None:
    """The page needs no key, like `/metrics`. After requests the page has every figure, bars, and charts that together
    show their values at one time, in light and in dark mode. A tile without a value has a dash, and a value changes no
    size. The charts draw steps and break a line where readings are missing. The console has no error, and the page only
    requests addresses of the server. If the server stops, the page says so."""
    num_without_value = 6  # tiles: hit rates, latencies, saved time and overlapped loads
    flags = ("--device-tokens", "4096", "--host-bytes", "8MiB", "--disk-path", str(tmp_path / "disk"))
    with serving(tmp_path, *TINY, *flags, api_key=KEY) as server, browser_page(tmp_path / "profile") as page:
        page.open(f"{server.root}/dashboard")
        page.wait_for("document.querySelectorAll('#all td[data-figure]').length > 0")
        idle, sizes = page.value(TILES), page.value(SIZES)
        assert sorted(idle.values()).count("–") >= num_without_value and len(set(map(tuple, sizes))) == 1
        ask(server, 4)
        figures = wait_until_equal(page, server)
        assert figures["prompt.tokens"] > figures["hit_tokens.device"] > 0
        assert page.value("[...document.querySelectorAll('.tier b')].map(x => x.textContent)") == [
            "device",
            "host",
            "disk",
        ]
        assert page.value(TILES).keys() == idle.keys() and page.value(SIZES) == sizes, "a value moves no tile"
        assert "of the drive's size written a day" in page.value("document.querySelector('#tiers').textContent")
        for name in ("first_token_s", "between_tokens_s"):
            shown = page.value(f"quantile(readings.at(-1), '{name}', 0.99, figure => get(readings.at(-1), figure))")
            assert shown == pytest.approx(Reading(0, figures).quantile(name, 0.99))
        assert "random, version " in page.value("document.querySelector('header').textContent")
        page.wait_for("[...document.querySelectorAll('svg')].every(x => x.querySelector('path'))")
        page.value("document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', {clientX: 500}))")
        assert page.value("document.querySelectorAll('svg .at').length") == page.value("charts.length"), (
            "one time in all"
        )
        kept = json.loads(urllib.request.urlopen(f"{server.root}/metrics.json?history=1").read())["history"]
        assert kept["rows"] and all(len(row) == len(kept["names"]) + 1 for row in kept["rows"])
        rows = "{names: ['prompt.tokens', 'tokens.computed'], rows: [[0, 1, 1], [10, 5, null], [20, 9, 41]]}"
        points = page.value(f"pointsOf({{time_s: 30, figures: {{}}, history: {rows}}}).map(x => [x.gap_s, x.tokens])")
        assert points == [[35, {}], [35, {"computed": pytest.approx(4.1)}]], "of readings before the page was opened"
        # Readings at 10, 20, 21 and 60 s; nothing was read between 21 and 60 s.
        given = "[[10, 10], [20, 10], [21, 10], [60, 39]].map(([at_s, over_s]) => ({at_s, over_s, gap_s: 35}))"
        page.value(f"points = {given}.map(x => ({{...points.at(-1), ...x}}))")
        spans = "spansOf({isGauge: %s}).map(x => [x.from_s, x.to_s])"
        assert page.value(spans % "false") == [[0, 10], [10, 20], [20, 21], [21, 60]], "a mean fills its time"
        assert page.value(spans % "true") == [[10, 20], [20, 21], [21, 22], [60, 61]], "a gauge is held until the next"
        lengths = "runsOf(spansOf({isGauge: true}), x => 1).map(x => x.length)"
        assert page.value(lengths) == [3, 1], "the line breaks where readings are missing"
        page.value("points = [...Array(900).keys()].map(s => ({...points.at(-1), at_s: s})), thin(300)")
        assert page.value("points.length") == 600 + 30, "one in ten seconds of the older points"
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.value(background)
        page.dark()
        assert page.value(background) != light
        assert page.errors == []
        assert {url.split("/")[2] for url in page.urls if not url.startswith("data:")} == {
            f"{server.host}:{server.port}"
        }
        assert server.end() == 0
        page.wait_for("document.querySelector('#status').textContent.includes('no answer from the server')")
