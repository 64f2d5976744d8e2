"""What mkdocs does to build the site beside reading docs/: the reference, the decisions, files outside of docs/.

reference/     a page for each package that has public names, from `hicache/__init__.pyi` and the docstrings
decisions/     listed by their titles
repository/    files outside of docs/ that a page links to, as they are

The comments `<!-- families -->`, `<!-- metrics: PARTS -->` and `<!-- models -->` become tables of what the code has.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hicache import DiskConfig, build_engine
from hicache.metrics import MetricInfo

ROOT = Path(__file__).resolve().parent.parent.parent
_TABLE = re.compile(r"<!-- (families|metrics|models)(?:: ([\w ]+))? -->")
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections of the navigation that are folders."""
    sys.path.append(str(ROOT / "tests" / "support"))  # of the tables
    pages = {
        "decisions": [f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("*.md"))],
        "reference": [f"reference/{name}.md" for name in _public_names()],
    }
    for section in config.nav or ():
        for title, entry in section.items():
            if isinstance(entry, str) and entry.rstrip("/") in pages:
                section[title] = pages[entry.rstrip("/")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for package, names in _public_names().items():
        lines = [f"# {package}", "", *(f"::: {name}" for name in names), ""]
        files.append(File.generated(config, f"reference/{package}.md", content="\n".join(lines)))
    for path in sorted(_linked_outside()):
        files.append(File.generated(config, _place_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables of the code in, and point links that leave docs/ to the copies."""
    folder = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        outside = _outside(folder, link[2])
        return link[0] if outside is None else link[1] + os.path.relpath(_place_of(outside), folder or ".")

    return _LINK.sub(moved, _TABLE.sub(lambda found: _TABLES[found[1]](found[2] or ""), markdown))


def _table(header: str, rows: list[str]) -> str:
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows])


@functools.cache
def _metrics() -> dict[str, MetricInfo]:
    """Those of engines with windows, states and all tiers."""
    from component_case import STATES, WINDOWS, config
    from memory_store import MemoryPageStore

    found: dict[str, MetricInfo] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in (WINDOWS, STATES):
            disk = DiskConfig(path=f"{folder}/{model.window}", budget_bytes=1 << 26)
            with build_engine(config(disk=disk), model, remote=MemoryPageStore(1 << 20)) as engine:
                found |= engine.describe()
    return dict(sorted(found.items()))


def _metrics_table(parts: str) -> str:
    rows = [
        f"| `{name}` | {info.type} | {info.help} |"
        for name, info in _metrics().items()
        if name.partition(".")[0] in parts.split()
    ]
    return _table("| metric | type | |", rows)


def _families_table(_: str) -> str:
    members: dict[str, list[str]] = defaultdict(list)
    for name, info in _metrics().items():
        if info.labels:
            total = "_total" if info.type == "counter" else ""
            members[f"hicache_{info.family}{total}{{{','.join(info.labels)}}}"].append(f"`{name}`")
    rows = [f"| `{family}` | {', '.join(metrics)} |" for family, metrics in sorted(members.items())]
    return _table("| family | metrics |", rows)


def _models_table(_: str) -> str:
    from family_table import FAMILIES, UNTRIED

    rows = [f"| `{row}` | {family.kind or 'refused'} | {family.reason} |" for row, family in FAMILIES.items()]
    rows += [f"| `{row}` | not tried | {reason} |" for row, reason in UNTRIED.items()]
    return _table("| family | verdict | refused because |", sorted(rows, key=lambda row: row.replace("`", "")))


_TABLES: dict[str, Callable[[str], str]] = {
    "families": _families_table,
    "metrics": _metrics_table,
    "models": _models_table,
}


def _public_names() -> dict[str, list[str]]:
    """Package below hicache -> its public names with their modules, in the order of the stub."""
    stub = ast.parse((ROOT / "hicache/__init__.pyi").read_text())
    found: dict[str, list[str]] = defaultdict(list)
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found[node.module.split(".")[1]] += [f"{node.module}.{alias.name}" for alias in node.names]
    return dict(sorted(found.items()))


def _linked_outside() -> set[str]:
    """Files of the repository, outside of docs/, that pages link to."""
    found = set()
    for page in (ROOT / "docs").rglob("*.md"):
        folder = page.parent.relative_to(ROOT / "docs").as_posix()
        links = (link[2] for link in _LINK.finditer(page.read_text()))
        found |= {path for link in links if (path := _outside(folder, link)) is not None}
    return found


def _outside(folder: str, link: str) -> str | None:
    """The path in the repository of a link from a page in `folder`; None where it stays in docs/ or leads nowhere."""
    path = os.path.normpath(os.path.join("docs", folder, link))
    is_inside = path.startswith("docs/")
    return None if is_inside or path.startswith("..") or not (ROOT / path).is_file() else path


def _place_of(path: str) -> str:
    """Where a file of the repository is in the site. Markdown is shown as it is: its own links would lead nowhere."""
    return f"repository/{path}.txt" if path.endswith(".md") else f"repository/{path}"
