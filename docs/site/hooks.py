"""Hooks of mkdocs that add generated pages to the site: the reference, lists of pages, files outside of docs/.

reference/     a page for each package that has public names, from `hicache/__init__.pyi` and the docstrings
decisions/     in the navigation and in their index by their titles
repository/    unchanged copies of files outside of docs/ that a page links to

A comment `<!-- decisions -->` or `<!-- packages -->` becomes a list of these pages. `docs/site/tables.py` writes the
tables of declarations in the code into the pages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "build/docs"
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")


@event_priority(100)  # before the plugin that looks for the package
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the package's folders as installed, and fill the navigation sections that are folders."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    (PACKAGE / "hicache").mkdir(parents=True)
    for path in (*(ROOT / "hicache").iterdir(), ROOT / "kernels", ROOT / "storage", ROOT / "bench"):
        (PACKAGE / "hicache" / path.name).symlink_to(path)
    config.nav = _filled(config.nav)
    return config


def _filled(entry: Any) -> Any:
    """Replace the folders that a navigation entry names by lists of their pages."""
    pages = {
        "decisions/": [{"All decisions": "decisions/index.md"}, *(f"decisions/{path.name}" for path in _decisions())],
        "reference/": [f"reference/{name}.md" for name in _public_names()],
    }
    if isinstance(entry, list):
        return [_filled(part) for part in entry]
    if isinstance(entry, dict):
        return {title: _filled(part) for title, part in entry.items()}
    return pages.get(entry, entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for package, names in _public_names().items():
        lines = [f"# hicache.{package}", "", *(f"::: {name}" for name in names), ""]
        files.append(File.generated(config, f"reference/{package}.md", content="\n".join(lines)))
    for path in sorted(_linked_outside()):
        files.append(File.generated(config, _place_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the lists of pages, and redirect links to files outside of docs/ to their copies."""
    folder = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        outside = _outside(folder, link[2])
        return link[0] if outside is None else link[1] + os.path.relpath(_place_of(outside), folder or ".")

    return _LINK.sub(moved, _LIST.sub(lambda found: _LISTS[found[1]](), markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep a number and its unit, and the groups of a number, on one line. Short code with hyphens gets a class that
    keeps it on one line. Long code in tables may break after some signs. Other code is not changed."""
    html = _FLAG.sub(r'<code class="flag">\1</code>', html)
    html = _CELL.sub(lambda cell: _LONG.sub(lambda code: re.sub(r"(?<=[._/{])", "<wbr>", code[0]), cell[0]), html)
    parts = _TAG.split(html)
    return "".join(part if _TAG.fullmatch(part) else _GAP.sub("\N{NO-BREAK SPACE}", part) for part in parts)


_FLAG = re.compile(r"(?<!<pre>)<code>(?=[^<]*-)([^<]{1,32})</code>")
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_LONG = re.compile(r"(?<=<code>)[^<]{29,}(?=</code>)")
_TAG = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]*>)", re.DOTALL)
_GAP = re.compile(r"(?<=\d)[ \n](?=(?:\d{3}|[kMG]B/s|[kKMGT]i?B|m?s|tokens/s|%)(?!\w))")


def _decisions_list() -> str:
    """A Markdown list of the decisions, by title, with links relative to their folder."""
    titles = {path.name: path.read_text().splitlines()[0].removeprefix("# ") for path in _decisions()}
    return "\n".join(f"- [{title}]({name})" for name, title in titles.items())


def _packages_list() -> str:
    """A Markdown list of the packages with public names, with links relative to the reference."""
    lines = []
    for package, names in _public_names().items():
        short = ", ".join(f"`{name.rpartition('.')[2]}`" for name in names)
        lines.append(f"- [hicache.{package}]({package}.md): {short}")
    return "\n".join(lines)


_LISTS: dict[str, Callable[[], str]] = {"decisions": _decisions_list, "packages": _packages_list}
_LIST = re.compile(rf"<!-- ({'|'.join(_LISTS)}) -->")


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))


def _public_names() -> dict[str, list[str]]:
    """Map each package of hicache to its public names with their modules, in the order of the stub."""
    stub = ast.parse((ROOT / "hicache/__init__.pyi").read_text())
    found: dict[str, list[str]] = defaultdict(list)
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found[node.module.split(".")[1]] += [f"{node.module}.{alias.name}" for alias in node.names]
    return dict(sorted(found.items()))


def _linked_outside() -> set[str]:
    """Paths in the repository, outside of docs/, that pages link to."""
    found = set()
    for page in (ROOT / "docs").rglob("*.md"):
        folder = page.parent.relative_to(ROOT / "docs").as_posix()
        links = (link[2] for link in _LINK.finditer(page.read_text()))
        found |= {path for link in links if (path := _outside(folder, link)) is not None}
    return found


def _outside(folder: str, link: str) -> str | None:
    """The path in the repository of a link from a page in `folder`; None if it is in docs/ or does not exist."""
    path = os.path.normpath(os.path.join("docs", folder, link))
    is_inside = path.startswith("docs/")
    return None if is_inside or path.startswith("..") or not (ROOT / path).is_file() else path


def _place_of(path: str) -> str:
    """The path in the site of a file of the repository. Markdown becomes plain text: its links would not work."""
    return f"repository/{path}.txt" if path.endswith(".md") else f"repository/{path}"
