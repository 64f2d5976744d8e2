"""What mkdocs does to build the site beside reading docs/: the reference, the decisions, files outside of docs/.

reference/     a page for each package that has public names, from `hicache/__init__.pyi` and the docstrings
decisions/     listed by their titles
repository/    files outside of docs/ that a page links to, as they are
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections of the navigation that are folders."""
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
    """Point links that leave docs/ to the copies."""
    folder = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        outside = _outside(folder, link[2])
        return link[0] if outside is None else link[1] + os.path.relpath(_place_of(outside), folder or ".")

    return _LINK.sub(moved, markdown)


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
