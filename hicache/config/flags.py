"""The settings as flags of the command line, and the source of each value: a default, a file or a flag."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from hicache.config.settings import Setting, as_mapping, settings_of
from hicache.errors import ConfigError, OutOfMemory


class Layer(NamedTuple):
    """Values of settings from one source; values of a section are a mapping. `source`: name of the source; empty if the
    source is the command line, where each value is given by the flag of its setting."""

    values: Mapping[Any, Any]
    source: str = ""


def combine(layers: Sequence[Layer], sections: Set[str]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Merge layers. Later layers override earlier layers; in a section, each value is overridden separately. Returns
    the values, and the source of each value by `name` or `section.name`."""
    values: dict[Any, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            if key in sections and isinstance(value, Mapping):
                below = values.get(key)
                values[key] = {**as_mapping({} if below is None else below, key), **value}
                sources.update({f"{key}.{name}": layer.source or f"flag {flag_of(key, name)}" for name in value})
            else:
                values[key] = value
                sources[str(key)] = layer.source or f"flag {flag_of('', key)}"
    return values, sources


@contextlib.contextmanager
def naming_flags(sources: Mapping[str, str]) -> Iterator[None]:
    """Within the `with` block, let a `ConfigError` or `OutOfMemory` about a setting given by a flag name the flag:
    `--page-size 48` instead of `page_size=48`, and `raise --device-tokens` instead of `raise device_tokens`. `sources`:
    as returned by `combine`.
    """
    try:
        yield
    except (ConfigError, OutOfMemory) as error:
        message = str(error)
        for name, source in sources.items():
            if source.startswith("flag "):
                flag = source.removeprefix("flag ")
                message = re.sub(rf"\b{name.replace('.', ' ')}=", f"{flag} ", message)
                if "_" in name:  # names without an underscore are also words of a message
                    message = re.sub(rf"(?<![\w-]){name.replace('.', ' ')}\b", flag, message)
        raise type(error)(message) from error


def add_section(group: argparse._ArgumentGroup, section: str, cls: type) -> None:
    """Add the flags of all settings of the dataclass `cls` that have a flag: `--NAME` or `--SECTION-NAME`. The values
    of flags stay text."""
    defaults = {item.name: item.default for item in dataclasses.fields(cls)}
    for name, setting in _with_flags(cls).items():
        details = [setting.detail] if setting.detail else []
        if defaults[name] is not dataclasses.MISSING:
            details.append(f"default {setting.text(defaults[name])}")
        help = f"{setting.help} ({'; '.join(details)})" if details else setting.help
        flag, dest = flag_of(section, name), _dest(section, name)
        group.add_argument(flag, dest=dest, metavar=setting.metavar, help=help.replace("%", "%%"))


def given_flags(flags: argparse.Namespace, sections: Mapping[str, type]) -> Layer:
    """Return the values given on the command line. The section "" contains the settings without a prefix."""
    values: dict[str, Any] = {}
    for section, cls in sections.items():
        given = {name: getattr(flags, _dest(section, name)) for name in _with_flags(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        values.update({section: given} if section and given else given)
    return Layer(values)


def _with_flags(cls: type) -> dict[str, Setting]:
    return {name: setting for name, setting in settings_of(cls).items() if setting.has_flag}


def flag_of(section: str, name: str) -> str:
    return "--" + _dest(section, name).replace("_", "-")


def _dest(section: str, name: str) -> str:
    return f"{section}_{name}" if section else name
