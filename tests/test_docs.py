"""The documentation names files, classes and functions that exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hicache.config import SECTIONS
from hicache.config.settings import settings_of
from hicache.integrations.server_store import ServerStoreConfig
from hicache.integrations.vllm.offloading_settings import OffloadingSettings

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


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/site/tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_code(tables: ModuleType) -> None:
    """Of settings, flags, environment, metrics and families: run `make tables` where they are not."""
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    assert [str(path) for path, text in texts.items() if tables.filled(text) != text] == []
    marks = [re.findall(r"^<!-- (table|end of table)\b", text, re.MULTILINE) for text in texts.values()]
    assert all(of_page == ["table", "end of table"] * (len(of_page) // 2) for of_page in marks)
    assert sum(map(len, marks)) > 60


def test_the_settings_page_has_every_declaration(tables: ModuleType) -> None:
    """Each class that declares settings has a table there, each setting a row with its help, and with "required" where
    it has no default."""
    page = (ROOT / "docs/settings.md").read_text()
    assert re.findall(r"<!-- table: settings (\w+) -->", page) == list(tables._SETTINGS)
    classes = {*SECTIONS.values(), ServerStoreConfig, *_derived(ServerStoreConfig), OffloadingSettings}
    assert {*tables._SETTINGS.values()} == classes
    for cls in classes:
        rows = dict(re.findall(r"\| `(?:\w+\.)?(\w+)` (.*)", tables._settings_table(cls.__name__)))
        own = {field.name: field for field in dataclasses.fields(cls) if field.name in cls.__annotations__}
        settings = {name: setting for name, setting in settings_of(cls).items() if name in own}
        assert rows.keys() == settings.keys()
        for name, setting in settings.items():
            assert setting.help in rows[name]
            assert ("| required |" in rows[name]) == (own[name].default is dataclasses.MISSING)


def _derived(cls: type) -> set[type]:
    return {cls for child in cls.__subclasses__() for cls in (child, *_derived(child))}
