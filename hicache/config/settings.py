"""Kinds of settings: accepted values, unit, choices, range and display.

A setting is declared once, as the annotation of a dataclass field: `Annotated[int, Integer("help", 1, unit="tokens")]`.
Values from Python, YAML and flags all pass through `take` when the dataclass is built (`settle`). Flags of other
commands use the same kinds (`as_flag`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml

from hicache.console import parse_bytes, parse_tier_bytes, path_text, sized
from hicache.errors import ConfigError

SOCKET = "unix:"  # prefix of a socket's path in settings that otherwise name a directory
INT64_MAX = (1 << 63) - 1
_SCHEME = r"[a-z][a-z0-9+.-]*://"
_USER = re.compile(f"^((?:{_SCHEME})?).*@", re.IGNORECASE | re.ASCII | re.DOTALL)

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxstring = _short.maxother = 80


def short_repr(value: object) -> str:
    """Return `repr(value)` for a message, shortened to about 80 characters."""
    try:
        return _short.repr(value)
    except ValueError:  # Python refuses to convert integers of more than 4300 digits
        return "a number of thousands of digits"


@dataclass(frozen=True)
class Setting:
    """One setting. `help`: the purpose of the setting. `unit`: the unit of its number.

    `computed_from`: the inputs from which the engine computes a value of `auto`; empty: the value is never computed.
    `has_flag`: whether the setting has a command-line flag; the file of `--config` accepts every setting.
    """

    help: str
    unit: str = field(default="", kw_only=True)
    computed_from: str = field(default="", kw_only=True)
    auto: str | int = field(default="auto", kw_only=True)
    has_flag: bool = field(default=True, kw_only=True)

    def take(self, given: object, name: str = "") -> Any:
        """Convert and check `given`. Raises `ConfigError` with `name` and the reason if `given` is not accepted."""
        if self.computed_from and isinstance(given, str) and given == "auto":
            return self.auto
        try:
            return self._value(given)
        except ValueError as error:
            raise ConfigError(f"{name}={error}" if name else str(error)) from None

    def is_auto(self, value: object) -> bool:
        """Return whether `value` means that the engine computes the setting."""
        return bool(self.computed_from) and value == self.auto

    def shown(self, value: object) -> object:
        """Return the value without secrets, for output and messages."""
        return value

    def text(self, value: object) -> str:
        """Return an accepted value as text with its unit."""
        if self.is_auto(value):
            return "auto"
        return f"{value} {self.unit}" if self.unit else str(self.shown(value)) or '""'

    @property
    def detail(self) -> str:
        """The choices of the setting for its help text; empty if the setting has no choices."""
        return ""

    @property
    def metavar(self) -> str:
        """The placeholder of the value in a list of flags."""
        return self.unit.upper() or "VALUE"

    def _value(self, given: object) -> Any:
        """Convert and check `given`. Raises a `ValueError` whose message begins with `given`."""
        raise NotImplementedError

    def _refused(self, given: object, reason: str) -> ValueError:
        meaning = f" ({self.help})" if self.help else ""
        return ValueError(f"{short_repr(self.shown(given))} {reason}{meaning}")


@dataclass(frozen=True)
class Integer(Setting):
    """An integer in [minimum, maximum]. Text is parsed; fractions and booleans are refused."""

    minimum: int = 0
    maximum: int = INT64_MAX

    def _value(self, given: object) -> int:
        value = self._number(given)
        if value < self.minimum:
            raise self._refused(given, f"is below the minimum of {self._bound(self.minimum)}")
        if value > self.maximum:
            raise self._refused(given, f"is above the maximum of {self._bound(self.maximum)}")
        return value

    def _bound(self, value: int) -> str:
        return str(value)

    def _number(self, given: object) -> int:
        if isinstance(given, str):
            try:
                return int(given)
            except ValueError:
                raise self._refused(given, f"is not an integer of at least {self.minimum}") from None
        if isinstance(given, bool) or not isinstance(given, numbers.Integral):
            raise self._refused(given, f"is not an integer of at least {self.minimum}")
        return int(given)


@dataclass(frozen=True)
class Size(Integer):
    """Bytes: an integer, or text such as 512MiB, 2GB or 1.5k; decimal units (KB) and binary units (KiB, or K alone).
    `keyword`: a word that is accepted instead of a number and kept unchanged; empty: no word. `needs_unit`: text
    without a unit is refused unless it is 0. `is_tier`: size of a tier; a small number without a unit is refused unless
    it is 0."""

    unit: str = field(default="bytes", kw_only=True)
    keyword: str = field(default="", kw_only=True)
    needs_unit: bool = field(default=False, kw_only=True)
    is_tier: bool = field(default=False, kw_only=True)

    def text(self, value: object) -> str:
        if isinstance(value, int) and not self.is_auto(value):
            return sized(value)
        return self.keyword if value == self.keyword else super().text(value)

    def _value(self, given: object) -> Any:
        if self.keyword and given == self.keyword:
            return given
        value = super()._value(given)
        if self.needs_unit and value and isinstance(given, str) and given.strip()[-1].isdigit():
            raise self._refused(given, f"has no unit: write {value}GB, or {value}B for bytes")
        return value

    def _bound(self, value: int) -> str:
        return sized(value).partition(" (")[0]

    def _number(self, given: object) -> int:
        if not isinstance(given, str):
            return super()._number(given)
        return parse_tier_bytes(given) if self.is_tier else parse_bytes(given)


@dataclass(frozen=True)
class Tokens(Integer):
    """A number of tokens: at least 1 by default, and at most 2^30, because slots of the request table are int32."""

    minimum: int = 1
    maximum: int = 1 << 30
    unit: str = field(default="tokens", kw_only=True)


@dataclass(frozen=True)
class Number(Setting):
    """A finite number in [minimum, maximum]."""

    minimum: float = 0.0
    maximum: float = 1e15

    def _value(self, given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, numbers.Real | str):
            raise self._refused(given, "is not a number")
        try:
            value = float(given)
        except (ValueError, OverflowError):
            raise self._refused(given, "is not a number") from None
        if not math.isfinite(value):
            raise self._refused(given, "is not a finite number")
        if not self.minimum <= value <= self.maximum:
            is_low = value < self.minimum
            bound = f"below the minimum of {self.minimum:g}" if is_low else f"above the maximum of {self.maximum:g}"
            raise self._refused(given, f"is {bound}")
        return value


@dataclass(frozen=True)
class Share(Number):
    """A share in [minimum, 1]."""

    metavar = "SHARE"
    maximum: float = 1.0

    @property
    def detail(self) -> str:
        return f"{self.minimum:g} to {self.maximum:g}"


@dataclass(frozen=True)
class Text(Setting):
    """Text that can be encoded as UTF-8, because digests are computed from it."""

    def _value(self, given: object) -> str:
        if not isinstance(given, str):
            raise self._refused(given, "must be text")
        try:
            given.encode()
        except UnicodeEncodeError:
            raise self._refused(given, "is not valid Unicode text") from None
        return given


@dataclass(frozen=True)
class Url(Text):
    """A URL. User name and password are hidden in output, even if the password contains an unescaped "/" or "@"."""

    metavar = "URL"

    def shown(self, value: object) -> object:
        return _USER.sub(r"\1***@", str(value)) if "@" in str(value) else value


@dataclass(frozen=True)
class FilePath(Setting):
    """A path of the file system, as text. `may_be_socket`: unix:/path/of/socket is accepted too."""

    metavar = "PATH"
    may_be_empty: bool = True
    may_be_socket: bool = False

    def _value(self, given: object) -> Any:
        is_socket = self.may_be_socket and isinstance(given, str) and given.startswith(SOCKET)
        try:
            path = path_text(given.removeprefix(SOCKET) if is_socket and isinstance(given, str) else given)
        except ConfigError as error:
            raise self._refused(given, str(error)) from None
        try:
            path.encode()
        except UnicodeEncodeError:
            raise self._refused(given, "is not UTF-8 (give another folder, or a link to it)") from None
        if any(character < " " or character == "\x7f" for character in path):
            raise self._refused(given, "has a control character")
        if not path and (is_socket or not self.may_be_empty):
            raise self._refused(given, "is not a path")
        return f"{SOCKET}{path}" if is_socket else path


@dataclass(frozen=True)
class Address(Text):
    """An address: empty text, or text that begins with one of `schemes` and has an address after the scheme."""

    metavar = "ADDRESS"
    schemes: tuple[str, ...] = ()

    def _value(self, given: object) -> str:
        value = super()._value(given)
        if value and not any(value.startswith(scheme) and len(value) > len(scheme) for scheme in self.schemes):
            raise self._refused(given, f"does not begin with {' or '.join(self.schemes)}")
        return value


@dataclass(frozen=True)
class Choice(Setting):
    """A setting whose value is one of `words`."""

    metavar = "WORD"
    words: tuple[str, ...]

    @property
    def detail(self) -> str:
        return f"one of {', '.join(self.words)}"

    def _value(self, given: object) -> Any:
        if not isinstance(given, str) or given not in self.words:
            raise ValueError(f"{short_repr(given)}: choose one of {', '.join(self.words)}")
        return given


@dataclass(frozen=True)
class Packing(Choice):
    """A `Choice` whose words YAML may parse as values of other types: off as false, 4 as a number."""

    def _value(self, given: object) -> Any:
        if given is False:
            return super()._value("off")
        return super()._value(str(given) if isinstance(given, int) and not isinstance(given, bool) else given)


def settings_of(cls: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by field name. Fields without a `Setting` are left out."""
    return _settings_of(cls)


@cache
def _settings_of(cls: type) -> Mapping[str, Setting]:
    hints = get_type_hints(cls, include_extras=True)
    declared = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    found = {name: extra for name, extras in declared for extra in extras if isinstance(extra, Setting)}
    return MappingProxyType(found)


def settle(config: object, prefix: str = "") -> None:
    """Validate and convert every setting of a frozen dataclass. Call this function in `__post_init__`."""
    for name, setting in settings_of(type(config)).items():
        object.__setattr__(config, name, setting.take(vars(config)[name], f"{prefix}{name}"))


def as_mapping(values: object, name: str) -> Mapping[Any, Any]:
    """Return `values` as a mapping. Raises `ConfigError` with `name` if `values` are not a mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is not a mapping of names to values but {short_repr(values)}")
    return values


def from_mapping(cls: type, values: Mapping[Any, Any], name: str, flag: Callable[[str], str] | None = None) -> Any:
    """Build the dataclass `cls` from values by field name. `ConfigError` lists unknown and missing names. `flag`:
    returns the flag of a setting, for the message."""
    known = {item.name: item for item in dataclasses.fields(cls)}
    unknown = sorted(key if isinstance(key, str) else short_repr(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"{name}: unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [key for key, item in known.items() if item.default is dataclasses.MISSING and key not in values]
    if missing:
        flags = "" if flag is None else f"; give {', '.join(map(flag, missing))}"
        raise ConfigError(f"{name}: missing setting {', '.join(missing)}{flags}")
    return cls(**values)


def read_yaml(path: str | Path) -> Mapping[Any, Any]:
    """Return the mapping in a YAML file. Raises `ConfigError` if the file cannot be read or contains no mapping."""
    try:
        values = yaml.safe_load(Path(path_text(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except Exception as error:  # the parser may raise ValueError, KeyError, RecursionError and other errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    return as_mapping(values, f"the configuration {path}")


def as_flag(setting: Setting) -> Callable[[str], Any]:
    """Return the setting as the `type` of an argparse flag."""

    def take(text: str) -> Any:
        try:
            return setting.take(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return take
