"""Write tables of declarations in the code, and of measurements, into the pages of docs/ and README, between marks:

    <!-- table: settings EngineConfig -->
    ...
    <!-- end of table -->

`make tables` runs this module. It also draws the charts of the result files, and writes the address of the repository
into files that name it. Tests check that all are up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import re
import sys
import tempfile
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from charts import PICTURES, charts
from measured import measured_table

from hicache import DiskConfig, EngineConfig, RemoteConfig, build_engine
from hicache.config import SECTIONS
from hicache.config.environment import VARIABLES
from hicache.config.settings import Choice, Integer, Number, Setting, Size, settings_of
from hicache.config.stores import SharedStoreConfig
from hicache.console import sized
from hicache.integrations.server_store import ServerStoreConfig
from hicache.integrations.vllm.offloading_settings import OffloadingSettings
from hicache.metrics import MetricInfo
from hicache.serving.server.flags import add_flags

ROOT = Path(__file__).resolve().parent.parent.parent
_MAX_SHOWN = 10_000  # larger maxima depend on the machine, and are omitted

_OF_SERVERS = (ServerStoreConfig, SharedStoreConfig, OffloadingSettings)
_SETTINGS: dict[str, type] = {cls.__name__: cls for cls in (*SECTIONS.values(), *_OF_SERVERS)}
_WITH_FLAGS = (EngineConfig, DiskConfig, RemoteConfig)
_PREFIXES = {cls.__name__: f"{section}." for section, cls in SECTIONS.items() if section}


_REPOSITORY = re.compile(r"https://github\.com/[\w.-]+/hicache\b")
# Files that name the address of the repository, which pyproject.toml declares as `Repository`.
ADDRESSED = (
    "pyproject.toml",
    "README.md",
    "docs/index.md",
    "docs/start.md",
    "CITATION.cff",
    ".github/ISSUE_TEMPLATE/config.yml",
    "deploy/alerts.yaml",
)
ALERTS, RULES = ROOT / "deploy/alerts.yaml", ROOT / "deploy/kubernetes/rules.yaml"


def addressed(text: str) -> str:
    """Return the text of a file with the declared address of the repository in place of another one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return _REPOSITORY.sub(project["urls"]["Repository"], text)


def rules(alerts: str) -> str:
    """Return the PrometheusRule of the Prometheus Operator that has the alerts of a rule file."""
    groups = textwrap.indent("\n".join(line for line in alerts.splitlines() if not line.startswith("#")), "  ")
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata: {name: hicache}\nspec:\n"
    return f"# Written by `make tables` from {ALERTS.relative_to(ROOT)}.\n{head}{groups}\n"


def filled(page: str) -> str:
    """Return the text of a page with its tables replaced by the current ones."""
    return _MARKED.sub(lambda found: f"{found[1]}\n\n{_TABLES[found[2]](found[3] or '')}\n\n{found[4]}", page)


def main() -> None:
    sys.path.append(str(ROOT / "tests" / "support"))
    changed = {path: filled(path.read_text()) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
    for path in (ROOT / name for name in ADDRESSED):
        changed[path] = addressed(changed.get(path) or path.read_text())
    changed[RULES] = rules(changed[ALERTS])
    changed |= {PICTURES / name: svg for name, svg in charts().items()}
    for path, now in changed.items():
        if not path.exists() or now != path.read_text():
            path.write_text(now)
            print(path.relative_to(ROOT))


def _table(header: str, rows: list[str]) -> str:
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows])


@functools.cache
def _metrics() -> dict[str, MetricInfo]:
    """The metrics of engines with windows, states, packed pages and all tiers, by name."""
    from component_case import PACKABLE, WIDER, config
    from memory_store import MemoryPageStore

    found: dict[str, MetricInfo] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, write_policy in (("window", "write_through"), ("hybrid", "write_through"), ("full", "exclusive")):
            disk, model = DiskConfig(path=f"{folder}/{kind}", budget_bytes=1 << 26), WIDER[kind]
            settings = config(disk=disk, kv_packing="4", write_policy=write_policy, **PACKABLE)
            with build_engine(settings, model, remote=MemoryPageStore(1 << 20)) as engine:
                found |= engine.describe()
    return dict(sorted(found.items()))


def _metrics_table(parts: str) -> str:
    rows = [
        f"| `{name}` | {info.type} | {info.help} |"
        for name, info in _metrics().items()
        if name.partition(".")[0] in parts.split()
    ]
    return _table("| metric | type | meaning |", rows)


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
    """A table of the settings that the class `name` declares, without inherited ones. A star marks a setting with a
    flag."""
    cls, prefix = _SETTINGS[name], _PREFIXES.get(name, "")
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    own = inspect.get_annotations(cls)
    mark = " *" if cls in _WITH_FLAGS else ""
    rows = [
        f"| `{prefix}{field}`{mark if setting.has_flag else ''} | {_default(setting, defaults[field])} | "
        f"{_values(setting)} | {_meaning(setting)} |"
        for field, setting in settings_of(cls).items()
        if field in own
    ]
    return _table("| setting | default | values | meaning |", rows)


def _default(setting: Setting, default: object) -> str:
    if default is dataclasses.MISSING:
        return "required"
    return f"`{setting.text(default).partition(' (')[0]}`" if default != "" else "none"


def _values(setting: Setting) -> str:
    if isinstance(setting, Choice):
        return ", ".join(f"`{word}`" for word in setting.words)
    if not isinstance(setting, Integer | Number):
        return "text"
    minimum = sized(setting.minimum).partition(" (")[0] if isinstance(setting, Size) else f"{setting.minimum:g}"
    return f"{minimum} to {setting.maximum:g}" if setting.maximum <= _MAX_SHOWN else f"at least {minimum}"


def _meaning(setting: Setting) -> str:
    return setting.help + (f"; auto is computed from {setting.computed_from}" if setting.computed_from else "")


def _environment_table(_: str) -> str:
    rows = []
    for variable in VARIABLES:
        words = f"; values: {', '.join(variable.words)}" if variable.words else ""
        names = ", ".join(f"`{name}`" for name in variable.names)
        rows.append(f"| {names} | {variable.default} | {variable.help}{words} |")
    return _table("| variable | default | meaning |", rows)


def _flags_table(_: str) -> str:
    """A table of the flags of `hicache serve` that are not settings of the engine."""
    server, engine = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    add_flags(server)
    EngineConfig.add_flags(engine)
    settings = {name for action in engine._actions for name in action.option_strings}
    own = [action for action in server._actions if not settings & {*action.option_strings}]
    return _table("| flag | meaning |", [f"| `{_usage(action)}` | {action.help} |" for action in own])


def _usage(flag: argparse.Action) -> str:
    name = flag.option_strings[0] if flag.option_strings else str(flag.metavar)
    if not flag.option_strings or flag.nargs == 0:
        return name
    value = flag.dest.upper() if flag.type is None else "N"  # text, or a number
    return f"{name} {flag.metavar or ','.join(flag.choices or ()) or value}"


def _measured_table(page: str) -> str:
    """README's table, or the same with links from a page of docs/."""
    folder = "../bench/results" if page else "bench/results"
    return _table("| result | hicache | others | workload, and case with its file |", measured_table(folder=folder))


_TABLES: dict[str, Callable[[str], str]] = {
    "environment": _environment_table,
    "families": _families_table,
    "flags": _flags_table,
    "measured": _measured_table,
    "metrics": _metrics_table,
    "models": _models_table,
    "settings": _settings_table,
}
_MARKED = re.compile(r"^(<!-- table: (\w+)(?: ([\w ]+))? -->)$.*?^(<!-- end of table -->)$", re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    main()
