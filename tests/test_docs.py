"""The documentation names files, classes, functions, commands, results and settings that exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hicache import cli, store_command
from hicache.bench import command as bench_command
from hicache.bench.common import read_report
from hicache.config import SECTIONS
from hicache.config.settings import settings_of
from hicache.config.stores import SharedStoreConfig
from hicache.integrations.server_store import ServerStoreConfig, server_store_config
from hicache.integrations.vllm.offloading_settings import OffloadingSettings, offloading_settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def _file(path: str) -> Path | None:
    """A path relative to the repository, the package or the package's `kernels` and `storage`."""
    return next((file for file in (ROOT / path, ROOT / "hicache" / path) if file.exists()), None)


def _definitions(file: Path) -> Iterator[str]:
    """The names of classes and functions of a module, and `Class.method`."""
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
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text)
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    targets = [(page.parent / link if link else page, anchor) for link, anchor in links if anchor]
    assert [(str(to), anchor) for to, anchor in targets if anchor not in _anchors(to)] == []
    named = re.findall(r"`([\w-]+-(?:cpu|nvidia)-[\w-]+\.json)`", text)
    assert [name for name in named if not (ROOT / "bench/results" / name).exists()] == []


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and the site make them; for a screenshot, the anchors
    that choose the mode in which GitHub and the site show it."""
    if page.suffix == ".png":
        return {"gh-light-mode-only", "gh-dark-mode-only"}
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w -]", "", text).strip().replace(" ", "-") for text in texts}


@pytest.fixture(scope="module")
def commands() -> dict[str, set[str]]:
    """The words that may follow each command."""
    files = [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*/__init__.py")]
    return {
        "hicache": {*cli._COMMANDS},
        "hicache bench": _subcommands(bench_command.add_flags),
        "hicache store": _subcommands(store_command.add_flags),
        "(?:hicache )?bench run": {"all", "small", "release"}.union(
            *(_matches(r'^NAME = "(\w+)"', file) for file in files)
        ),
        "make": _matches(r"^([a-z-]+):", ROOT / "Makefile"),
    }


def _subcommands(add_flags: Callable[[argparse.ArgumentParser], None]) -> set[str]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return {name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices}


def _matches(pattern: str, file: Path) -> set[str]:
    return set(re.findall(pattern, file.read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path, commands: dict[str, set[str]]) -> None:
    """Every command of `hicache`, every benchmark and every target of `make` that a page has in code exists."""
    code = "\n".join(re.findall(r"^ {4}[^\n]*|`[^`\n]+`", page.read_text(), re.MULTILINE))
    for words, known in commands.items():
        named = re.findall(rf"(?:(?<=`)|(?<=^ {{4}})){words} ([a-z_][\w|-]*)(?![\w:|-])", code, re.MULTILINE)
        assert {word for alternatives in named for word in alternatives.split("|")} - known == set()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.is_relative_to(ROOT / "docs")], ids=lambda page: page.name
)
def test_code_fits_into_the_column(page: Path) -> None:
    """Diagrams, commands and outputs of the site have at most 104 characters a line, so that no line is cut. Python in
    fences may be longer, because it is that of modules."""
    assert [line for line in _code(page.read_text()) if len(line) > 104] == []


def _code(text: str) -> Iterator[str]:
    """The lines of code blocks, without their indentation: fenced blocks except Python, and indented blocks outside of
    lists and cards."""
    fence: str | None = None
    was_blank, is_code, is_list = True, False, False
    for line in text.splitlines():
        if found := re.match(r" *```(\w*)", line):
            fence, is_code = (found[1] if fence is None else None), False
        elif fence is not None:
            if fence != "python":
                yield line
        elif line.strip():
            is_list = (is_list and line.startswith(" ")) or re.match(r"([-*]|\d+\.) ", line) is not None
            indent = 8 if is_list else 4
            is_code = line.startswith(" " * indent) and (is_code or was_blank)
            if is_code:
                yield line[indent:]
        was_blank = not line.strip()


def test_code_of_the_page_of_extensions_is_that_of_the_tests() -> None:
    """Each block of code is, line by line, in the file that its first line names."""
    text = (ROOT / "docs/extending.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == 9
    for path, code in blocks:
        assert code in (ROOT / path).read_text(), path


def test_results_are_those_that_the_page_of_all_results_names() -> None:
    """The first table of the page of all results has every result file, with the commit that the file names."""
    page = (ROOT / "docs/all_results.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", page.partition("\n## ")[0], re.MULTILINE)
    commits = {name: commit for names, commit in rows for name in re.findall(r"`([^`]+)`", names)}
    results = {path.name: read_report(path).commit for path in (ROOT / "bench/results").glob("*.json")}
    assert commits.keys() == results.keys()
    assert [name for name, commit in commits.items() if not results[name].startswith(commit)] == []


def test_missed_targets_are_named() -> None:
    """The pages of results have a row with **missed**, ratio and name for each server case that missed its target."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("performance.md", "all_results.md")]
    rows = re.findall(r"\| \*\*missed\*\* ([\d.]+) \|.*\| `([\w.]+)` \|$", "\n".join(pages), re.MULTILINE)
    reports = [read_report(path) for path in (ROOT / "bench/results").glob("servers-*.json")]
    cases = [case for report in reports for case in report.cases if case.note.startswith("target missed")]
    assert cases
    for case in cases:
        ratios = [float(ratio) for ratio, name in rows if name == case.name.split(".", 2)[2]]
        assert any(ratio == pytest.approx(case.ratio, rel=0.002) for ratio in ratios), case.name


def test_settings_of_servers_are_taken() -> None:
    """The examples of configurations on the pages are JSON that the named plug-in accepts."""
    checked = 0
    pages = [ROOT / "README.md", *(ROOT / "docs/integrations").glob("*.md")]
    flag = r"--(?:kv-transfer-config|[\w-]*backend-extra-config) '(\{.*?\})'"
    for text in re.findall(flag, "\n".join(page.read_text() for page in pages), re.DOTALL):
        if "..." in text:
            continue
        given, checked = json.loads(text), checked + 1
        if "kv_connector_extra_config" in given:
            extra = given["kv_connector_extra_config"]
            assert given["kv_connector"] == "HiCacheConnector" or "spec_name" in extra
            if extra.get("spec_name", "HiCacheOffloadingSpec") == "HiCacheOffloadingSpec":
                offloading_settings(extra)
            else:
                (tier,) = extra["secondary_tiers"]
                server_store_config({k: v for k, v in tier.items() if k not in ("type", "module_path")}, "tier")
        else:
            names = ("backend_name", "module_path", "class_name", "interface_v1")
            server_store_config({k: v for k, v in given.items() if k not in names}, "extra config")
    assert checked >= 4


@pytest.mark.parametrize("name", ["vllm-config", "sglang-config"])
def test_commands_of_configurations_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each complete command on the pages that prints the configuration of a plug-in prints JSON that the plug-in
    accepts."""
    text = "\n".join(page.read_text() for page in PAGES if page.parent.name != "decisions")
    text = re.sub(r"\\\n\s+", "", text)  # lines that end with a backslash go on
    commands = {tuple(flags.split()) for flags in re.findall(rf"{name} ((?:--[a-z-]+ [\w/:.]+ ?)+)", text)}
    complete = [flags for flags in commands if not {"--cpu", "--disk"}.isdisjoint(flags)]
    assert len(complete) >= 2
    for flags in complete:
        assert cli.main([name, *flags]) == 0
        given = json.loads(capsys.readouterr().out)
        if "kv_connector_extra_config" in given:
            offloading_settings(given["kv_connector_extra_config"])
        else:
            assert given["class_name"] == "HiCacheDisk"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_definitions_exist(page: Path) -> None:
    """Every class, function and method that a page names with its file is defined in that file."""
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
    """The tables of settings, flags, environment, metrics, families and measurements are up to date. If not, run `make
    tables`."""
    texts = {path.relative_to(ROOT): path.read_text() for path in PAGES}
    assert [str(path) for path, text in texts.items() if tables.filled(text) != text] == []
    marks = [re.findall(r"^<!-- (table|end of table)\b", text, re.MULTILINE) for text in texts.values()]
    assert all(of_page == ["table", "end of table"] * (len(of_page) // 2) for of_page in marks)
    assert sum(map(len, marks)) > 40


def test_charts_are_those_of_the_results(tables: ModuleType) -> None:
    """The charts are up to date. If not, run `make tables`."""
    drawn = tables.charts()
    assert [name for name, svg in drawn.items() if (tables.PICTURES / name).read_text() != svg] == []
    pictures = {path for path in tables.PICTURES.glob("*.svg") if path.name != "demo.svg"}  # demo.svg is always dark
    assert all("prefers-color-scheme: dark" in path.read_text() for path in pictures)
    page = (ROOT / "docs/performance.md").read_text()
    assert [name for name in drawn if name.startswith("measured-") and f"(pictures/{name})" not in page] == []


def test_the_organisation_is_declared_once(tables: ModuleType) -> None:
    """Each file with the address of the repository has the address of pyproject.toml. If not, run `make tables`."""
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    texts = {name: (ROOT / name).read_text(errors="replace") for name in {*kept, *tables.ADDRESSED}}
    named = {name for name, text in texts.items() if re.search(r"github\.com/[\w.-]+/hicache\b", text)}
    rules = tables.RULES.relative_to(ROOT).as_posix()
    assert named == {*tables.ADDRESSED, rules}
    assert [name for name in tables.ADDRESSED if tables.addressed(texts[name]) != texts[name]] == []


def test_the_table_of_verbs_is_complete() -> None:
    """Each verb of the engine is in the table of their legal order."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("### The verbs of the engine")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    verbs = re.findall(
        r"^    @(?:one_call_at_a_time|running)\n    def (\w+)\(", (ROOT / "hicache/engine.py").read_text(), re.MULTILINE
    )
    assert sorted({*named} - {"with"}) == sorted(verbs)


def test_the_table_of_kernels_is_complete() -> None:
    """Each kernel has a row with the test that compares it. The row says that no engine runs the kernel if its module
    says that only callers with SGLang's interface use it."""
    table = (ROOT / "docs/serving_internals.md").read_text().partition("## The kernels")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| `(.*)` \|$", table, re.MULTILINE)
    rows = {kernel: (engine, test) for kernel, engine, test in found}
    modules = {path.stem: path.read_text() for path in (ROOT / "kernels").glob("[!_]*.py")}
    assert rows.keys() == modules.keys()
    for kernel, (engine, test) in rows.items():
        assert (engine == "no") == ("Only callers with SGLang's interface use it" in modules[kernel]), kernel
        assert kernel in (ROOT / test).read_text(), test


def test_the_settings_page_has_every_declaration(tables: ModuleType) -> None:
    """Each class that declares settings has a table on the page. Each setting has a row with its help, and with
    "required" if it has no default."""
    page = (ROOT / "docs/settings.md").read_text()
    assert re.findall(r"<!-- table: settings (\w+) -->", page) == list(tables._SETTINGS)
    classes = {*SECTIONS.values(), ServerStoreConfig, SharedStoreConfig, OffloadingSettings}
    assert {*tables._SETTINGS.values()} == classes
    for cls in classes:
        rows = dict(re.findall(r"\| `(?:\w+\.)?(\w+)` (.*)", tables._settings_table(cls.__name__)))
        own = {field.name: field for field in dataclasses.fields(cls) if field.name in cls.__annotations__}
        settings = {name: setting for name, setting in settings_of(cls).items() if name in own}
        assert rows.keys() == settings.keys()
        for name, setting in settings.items():
            assert setting.help in rows[name]
            assert ("| required |" in rows[name]) == (own[name].default is dataclasses.MISSING)
