"""The documentation as a site, as `make docs` builds it, with the additions of its hooks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

from mkdocs.commands.build import build
from mkdocs.config import load_config

import hicache

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("index.html", "start.html")  # pages where a reader may begin


class _Page(HTMLParser):
    """A parsed page. `links`: the links in its text; `loaded`: files that a browser loads with it; `anchors`: its
    anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self._is_text = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._is_text |= tag == "article"
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and self._is_text and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given["src"]] if "src" in given else []
        if tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._is_text &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build is strict: the build fails if a link or an anchor does not exist, or if a page is not
    in the navigation."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def _targets(page: Path, links: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """File and anchor of each link within the site."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            yield (page.parent / unquote(parts.path)).resolve() if parts.path else page, unquote(parts.fragment)


@pytest.mark.parametrize("start", PAGES)
def test_every_page_is_two_clicks_away(pages: dict[Path, _Page], site: Path, start: str) -> None:
    """Every page can be reached by two links in the text of pages. The navigation does not count, because the pages in
    the repository have none."""
    reached = {(site / start).resolve()}
    for _ in range(2):
        reached |= {target for page in reached & pages.keys() for target, _ in _targets(page, pages[page].links)}
    assert sorted(str(page.relative_to(site)) for page in pages.keys() - reached) == []


def test_every_link_in_the_text_of_a_page_leads_somewhere(pages: dict[Path, _Page]) -> None:
    """Every link in the text of a page, also in tables that hooks make, leads to a file and an anchor that exist."""
    broken = [
        (page.name, str(target), anchor)
        for page, parsed in pages.items()
        for target, anchor in _targets(page, parsed.links)
        if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors)
    ]
    assert broken == []


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, _Page]) -> None:
    """Every script, style and picture that a page loads is a file of the site, and every picture of the documentation
    is loaded."""
    loaded = {page: [*_targets(page, parsed.loaded)] for page, parsed in pages.items()}
    assert all(len(loaded[page]) == len(parsed.loaded) for page, parsed in pages.items())
    assert all(target.exists() for targets in loaded.values() for target, _ in targets)
    all_loaded = {target for targets in loaded.values() for target, _ in targets}
    pictures = {target.name for target in all_loaded if target.parent.name == "pictures"}
    assert pictures == {path.name for path in (ROOT / "docs/pictures").iterdir()}


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name(hooks: ModuleType) -> None:
    """The reference pages together name everything that `hicache` exports, once each."""
    named = [name.rsplit(".", 1)[1] for names in hooks._public_names().values() for name in names]
    assert sorted(named) == hicache.__all__


def test_numbers_and_units_stay_on_one_line(hooks: ModuleType, site: Path) -> None:
    """In text and tables, also across a line of the source. Code and attributes are not changed."""
    html = '<p title="3 s">112.4\ns, 1 697 ms, 25 % of 64 GiB, 3 sessions</p><pre>3 s\n4 s</pre><code>5 s</code>'
    kept = hooks.on_page_content(html, None, None, None).replace("\N{NO-BREAK SPACE}", "~")
    assert kept == '<p title="3 s">112.4~s, 1~697~ms, 25~% of 64~GiB, 3 sessions</p><pre>3 s\n4 s</pre><code>5 s</code>'
    assert re.search("[0-9]\N{NO-BREAK SPACE}s\\b", (site / "performance.html").read_text())


def test_long_code_in_tables_may_break(hooks: ModuleType) -> None:
    """A name of more than 28 characters may break after a dot, an underscore, a slash or a brace."""
    short, long = "<code>a.b</code>", f"<code>{'a' * 24}.b_c/d</code>"
    assert hooks.on_page_content(f"<p>{long}</p>", None, None, None) == f"<p>{long}</p>"
    broken = f"<td>{short} <code>{'a' * 24}.<wbr>b_<wbr>c/<wbr>d</code></td>"
    assert hooks.on_page_content(f"<td>{short} {long}</td>", None, None, None) == broken


def test_short_flags_do_not_break(hooks: ModuleType) -> None:
    """Short code with a hyphen stays on one line. Long code, and blocks of code, may break."""
    long = f"<td><code>--{'a' * 40}</code></td><pre><code>--a b</code></pre>"
    assert hooks.on_page_content(long, None, None, None) == long
    short = hooks.on_page_content("<p>or <code>--a b</code></p>", None, None, None)
    assert short == '<p>or <code class="flag">--a b</code></p>'
