"""What mkdocs does to build the site beside reading docs/: the reference, lists of pages, files outside of docs/.

reference/     a page for each package that has public names, from `hicache/__init__.pyi` and the docstrings
decisions/     in the navigation and in their index by their titles
repository/    files outside of docs/ that a page links to, as they are

A comment `<!-- TABLE: ARGUMENT -->` becomes a table of what the code declares; `_TABLES` has their names.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hicache import DiskConfig, EngineConfig, build_engine
from hicache.config import SECTIONS, VARIABLES
from hicache.config.settings import Choice, Number, Setting, Size, Whole, settings_of
from hicache.console import sized
from hicache.integrations.load_gate import GatedStoreConfig
from hicache.integrations.server_store import ServerStoreConfig
from hicache.integrations.sglang.linker_settings import LinkerConfig
from hicache.integrations.vllm.offloading_settings import OffloadingSettings
from hicache.metrics import MetricInfo
from hicache.serving.server.flags import add_flags

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "build/docs"
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")
_MAX_SHOWN = 10_000  # maxima above are those of the machine, and tell nobody anything

_SETTINGS: dict[str, type] = {
    cls.__name__: cls
    for cls in (*SECTIONS.values(), ServerStoreConfig, GatedStoreConfig, LinkerConfig, OffloadingSettings)
}
_PREFIXES = {cls.__name__: f"{section}." for section, cls in SECTIONS.items() if section}


@event_priority(100)  # before the plugin that looks for the package
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay the package out as it installs, and fill the sections of the navigation that are folders."""
    sys.path.append(str(ROOT / "tests" / "support"))  # of the tables
    shutil.rmtree(PACKAGE, ignore_errors=True)
    (PACKAGE / "hicache").mkdir(parents=True)
    for path in (*(ROOT / "hicache").iterdir(), ROOT / "kernels", ROOT / "storage", ROOT / "bench"):
        (PACKAGE / "hicache" / path.name).symlink_to(path)
    config.nav = _filled(config.nav)
    return config


def _filled(entry: Any) -> Any:
    """`entry` of the navigation with lists of pages where it names a folder."""
    pages = {
        "decisions/": [f"decisions/{path.name}" for path in _decisions()],
        "reference/": [f"reference/{name}.md" for name in _public_names()],
    }
    if isinstance(entry, list):
        return [_filled(part) for part in entry]
    if isinstance(entry, dict):
        return {title: _filled(part) for title, part in entry.items()}
    return pages.get(entry, entry)


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
    """Those of engines with windows, states, packed pages and all tiers."""
    from component_case import PACKABLE, WIDER, config
    from memory_store import MemoryPageStore

    found: dict[str, MetricInfo] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in (WIDER["window"], WIDER["hybrid"]):
            disk = DiskConfig(path=f"{folder}/{model.window}", budget_bytes=1 << 26)
            settings = config(disk=disk, kv_packing="4", **PACKABLE)
            with build_engine(settings, model, remote=MemoryPageStore(1 << 20)) as engine:
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


def _settings_table(name: str) -> str:
    """The settings that the class `name` declares itself, without those of the classes that it derives from."""
    cls, prefix = _SETTINGS[name], _PREFIXES.get(name, "")
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    own = inspect.get_annotations(cls)
    rows = [
        f"| `{prefix}{field}` | {_default(setting, defaults[field])} | {_values(setting)} | {_meaning(setting)} |"
        for field, setting in settings_of(cls).items()
        if field in own
    ]
    return _table("| setting | default | values | |", rows)


def _default(setting: Setting, default: object) -> str:
    if default is dataclasses.MISSING:
        return "required"
    return f"`{setting.text(default).partition(' (')[0]}`" if default != "" else "none"


def _values(setting: Setting) -> str:
    if isinstance(setting, Choice):
        return ", ".join(f"`{word}`" for word in setting.words)
    if not isinstance(setting, Whole | Number):
        return "text"
    minimum = sized(setting.minimum).partition(" (")[0] if isinstance(setting, Size) else f"{setting.minimum:g}"
    return f"{minimum} to {setting.maximum:g}" if setting.maximum <= _MAX_SHOWN else f"at least {minimum}"


def _meaning(setting: Setting) -> str:
    return setting.help + (f"; auto is computed from {setting.computed_from}" if setting.computed_from else "")


def _environment_table(_: str) -> str:
    rows = []
    for variable in VARIABLES:
        words = f": {', '.join(variable.words)}" if variable.words else ""
        names = ", ".join(f"`{name}`" for name in variable.names)
        rows.append(f"| {names} | {variable.default} | {variable.help}{words} |")
    return _table("| variable | default | |", rows)


def _flags_table(_: str) -> str:
    """The flags of `hicache serve` that are no settings of the engine."""
    server, engine = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    add_flags(server)
    EngineConfig.add_flags(engine)
    settings = {name for action in engine._actions for name in action.option_strings}
    own = [action for action in server._actions if not settings & {*action.option_strings}]
    return _table("| flag | |", [f"| `{_usage(action)}` | {action.help} |" for action in own])


def _usage(flag: argparse.Action) -> str:
    name = flag.option_strings[0] if flag.option_strings else str(flag.metavar)
    if not flag.option_strings or flag.nargs == 0:
        return name
    return f"{name} {flag.metavar or ','.join(flag.choices or ()) or 'N'}"


def _decisions_list(_: str) -> str:
    """The title of each decision, with a link for a page of their folder."""
    titles = {path.name: path.read_text().splitlines()[0].removeprefix("# ") for path in _decisions()}
    return "\n".join(f"- [{title}]({name})" for name, title in titles.items())


def _packages_list(_: str) -> str:
    """The packages that have public names, with a link for a page of the reference."""
    lines = []
    for package, names in _public_names().items():
        short = ", ".join(f"`{name.rpartition('.')[2]}`" for name in names)
        lines.append(f"- [{package}]({package}.md): {short}")
    return "\n".join(lines)


_TABLES: dict[str, Callable[[str], str]] = {
    "decisions": _decisions_list,
    "environment": _environment_table,
    "families": _families_table,
    "flags": _flags_table,
    "metrics": _metrics_table,
    "models": _models_table,
    "packages": _packages_list,
    "settings": _settings_table,
}
_TABLE = re.compile(rf"<!-- ({'|'.join(_TABLES)})(?:: ([\w ]+))? -->")


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))


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
