"""The documentation names files, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/integrations").glob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)


def _file(path: str) -> Path | None:
    """A path relative to the repository, the package or the package's `kernels` and `storage`."""
    return next((file for file in (ROOT / path, ROOT / "hicache" / path) if file.exists()), None)


def _definitions(file: Path) -> Iterator[str]:
    """Classes and functions of a module, and `Class.method`."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    """Every path to a Python file or a folder of the repository, and every link to another page, exists."""
    text = page.read_text()
    paths = re.findall(r"`([\w/]+/(?:\w+\.py)?)(?:: [\w.]+)?`", text) + re.findall(r"`(\w+\.py)(?:: [\w.]+)?`", text)
    assert [path for path in paths if _file(path) is None] == []
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (page.parent / link).exists()]
    assert links == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_definitions_exist(page: Path) -> None:
    """Every class, function and method that is named with its file is defined there."""
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", page.read_text())
    missing = [(path, name) for path, name in named if name not in set(_definitions(_file(path) or page))]
    assert missing == []
    if page.name == "architecture.md":
        assert len(named) > 10
