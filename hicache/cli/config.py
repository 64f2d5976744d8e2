"""`hicache config --show`: every setting in force, its value with unit, and its source. Imports no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hicache.config import SECTIONS, EngineConfig
from hicache.config.environment import VARIABLES, Variable
from hicache.config.settings import settings_of
from hicache.console import columns

_NOT_SET: Mapping[str, str] = MappingProxyType(
    {"device_tokens": "required", "model_id": "default; a server computes it from the weights"}
)
_PLACEHOLDERS: Mapping[str, Any] = MappingProxyType({"device_tokens": 1 << 30, "model_id": "not set"})


class _Row(NamedTuple):
    """A setting or an environment variable. `value`: as in JSON. `text`: as in the table. `computed_from`: the inputs
    from which the engine computes an auto value; empty for other values."""

    name: str
    value: object
    unit: str
    text: str
    source: str
    computed_from: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache config` and of all settings."""
    parser.usage = "hicache config --show [--json] [--config FILE] [--SETTING VALUE ...]"
    parser.add_argument("--show", action="store_true", required=True, help="print the settings in force")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    EngineConfig.add_flags(parser)


def run(flags: argparse.Namespace) -> int:
    """Print the table or the JSON object. Returns 0. Raises `ConfigError` if the settings are wrong."""
    settings, variables = list(_settings(flags)), [_variable(variable) for variable in VARIABLES]
    if flags.json:
        print(json.dumps({"settings": _object(settings), "environment": _object(variables)}))
    else:
        print(columns([("setting", "value", "from"), *map(_cells, settings)]))
        print()
        print(columns([("environment", "value", "from"), *map(_cells, variables)]))
    return 0


def _settings(flags: argparse.Namespace) -> Iterator[_Row]:
    config = EngineConfig.from_flags(flags, **_PLACEHOLDERS)
    sources = EngineConfig.sources_of(flags)
    for section, cls in SECTIONS.items():
        part: Any = getattr(config, section) if section else config
        if part is None:
            yield _Row(section, None, "", "none", sources.get(section, "default"))
            continue
        for name, setting in settings_of(cls).items():
            full_name = f"{section}.{name}" if section else name
            if full_name in _NOT_SET and full_name not in sources:
                yield _Row(full_name, None, setting.unit, "not set", _NOT_SET[full_name])
            else:
                given, source = getattr(part, name), sources.get(full_name, "default")
                value, computed_from = (
                    ("auto", setting.computed_from) if setting.is_auto(given) else (setting.shown(given), "")
                )
                yield _Row(full_name, value, setting.unit, setting.text(given), source, computed_from)


def _variable(variable: Variable) -> _Row:
    value, name = variable.read()
    if not name:
        return _Row(variable.names[0], None, "", "unset", f"default: {variable.default}")
    shown = "set" if variable.is_secret else value
    return _Row(variable.names[0], shown, "", shown, f"environment variable {name}")


def _object(rows: Sequence[_Row]) -> dict[str, dict[str, object]]:
    """Return the rows by name. Empty fields are left out."""
    found: dict[str, dict[str, object]] = {row.name: {"value": row.value, "source": row.source} for row in rows}
    for row in rows:
        found[row.name] |= {"unit": row.unit} if row.unit else {}
        found[row.name] |= {"computed_from": row.computed_from} if row.computed_from else {}
    return found


def _cells(row: _Row) -> tuple[str, str, str]:
    source = f"{row.source}; computed from {row.computed_from}" if row.computed_from else row.source
    return row.name, row.text, source
