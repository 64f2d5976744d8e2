"""Kinds of settings: what each takes, its unit and range, and what is said of anything else.

A setting is declared once, as the annotation of a dataclass's field: `Annotated[int, Whole("help", minimum=1)]`. What
comes from Python, YAML or flags passes through the same `take` when the dataclass is built (`settle`); flags of other
commands use the same kinds (`as_flag`). May import errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_type_hints

from hicache.errors import ConfigError

INT64_MAX = (1 << 63) - 1
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE | re.ASCII)

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """The value in a message: short, whatever it is."""
    try:
        return _short.repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return "a number of thousands of digits"


@dataclass(frozen=True)
class Setting:
    """One setting. `help` says what it is for, with its unit where the name has none."""

    help: str

    def take(self, given: object, name: str = "") -> Any:
        """The value of what was given. `ConfigError` with `name` and the reason for what the setting does not take."""
        try:
            return self._value(given)
        except ValueError as error:
            raise ConfigError(f"{name}={error}" if name else str(error)) from None

    def _value(self, given: object) -> Any:
        """`ValueError` that begins with what was given."""
        raise NotImplementedError

    def _refused(self, given: object, reason: str) -> ValueError:
        return ValueError(f"{shown(given)} {reason}: {self.help}")


@dataclass(frozen=True)
class Whole(Setting):
    """A whole number in [minimum, maximum]. Text is read as one; a fraction or a truth value is none."""

    minimum: int = 0
    maximum: int = INT64_MAX

    def _value(self, given: object) -> int:
        value = self._number(given)
        if value < self.minimum:
            raise self._refused(value, f"is below {self.minimum}")
        if value > self.maximum:
            raise self._refused(value, f"is above {self.maximum}")
        return value

    def _number(self, given: object) -> int:
        if isinstance(given, str):
            try:
                return int(given)
            except ValueError:
                raise self._refused(given, "is no whole number") from None
        if isinstance(given, bool) or not isinstance(given, numbers.Integral):
            raise self._refused(given, "is no whole number")
        return int(given)


@dataclass(frozen=True)
class Size(Whole):
    """Bytes: a whole number, or text such as 512MiB, 2GB or 1.5k; decimal (KB) and binary units (KiB, or K alone)."""

    def _number(self, given: object) -> int:
        return parse_bytes(given) if isinstance(given, str) else super()._number(given)


@dataclass(frozen=True)
class Number(Setting):
    """A finite number in [minimum, maximum]."""

    minimum: float = 0.0
    maximum: float = 1e15

    def _value(self, given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, numbers.Real | str):
            raise self._refused(given, "is no number")
        try:
            value = float(given)
        except (ValueError, OverflowError):
            raise self._refused(given, "is no number") from None
        if not math.isfinite(value):
            raise self._refused(given, "is no finite number")
        if not self.minimum <= value <= self.maximum:
            bound = f"below {self.minimum:g}" if value < self.minimum else f"above {self.maximum:g}"
            raise self._refused(value, f"is {bound}")
        return value


@dataclass(frozen=True)
class Text(Setting):
    """Text that can be encoded, since digests are made of it."""

    def _value(self, given: object) -> str:
        if not isinstance(given, str):
            raise self._refused(given, "must be text")
        try:
            given.encode()
        except UnicodeEncodeError:
            raise self._refused(given, "is no valid Unicode text") from None
        return given


@dataclass(frozen=True)
class FilePath(Setting):
    """A path of the file system, as text."""

    may_be_empty: bool = True

    def _value(self, given: object) -> str:
        path = os.fspath(given) if isinstance(given, os.PathLike) else given
        if not isinstance(path, str):
            raise self._refused(given, "must be text")
        try:
            is_path = b"\0" not in os.fsencode(path)
        except UnicodeEncodeError:
            is_path = False
        if not is_path or not (path or self.may_be_empty):
            raise self._refused(given, "is no path")
        return path


@dataclass(frozen=True)
class Choice(Setting):
    """One of a few words."""

    words: tuple[str, ...]

    def _value(self, given: object) -> str:
        if not isinstance(given, str) or given not in self.words:
            raise ValueError(f"{shown(given)}: choose one of {', '.join(self.words)}")
        return given


def settings_of(cls: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by the names of its fields; fields that are none are left out."""
    hints = get_type_hints(cls, include_extras=True)
    declared = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    return {name: extra for name, extras in declared for extra in extras if isinstance(extra, Setting)}


def settle(config: object, prefix: str = "") -> None:
    """To be called by a frozen dataclass when it is built: each setting's field gets the value of what was given."""
    for name, setting in settings_of(type(config)).items():
        object.__setattr__(config, name, setting.take(vars(config)[name], f"{prefix}{name}"))


def as_mapping(values: object, name: str) -> Mapping[Any, Any]:
    """`values`, which came from outside. `ConfigError` where they are no mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is no mapping of names to values but {shown(values)}")
    return values


def from_mapping(cls: type, values: Mapping[Any, Any], name: str) -> Any:
    """Build the dataclass `cls` from values by its fields' names. `ConfigError` names what is unknown or missing."""
    known = {item.name: item for item in dataclasses.fields(cls)}
    unknown = sorted(key if isinstance(key, str) else shown(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"{name}: unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [key for key, item in known.items() if item.default is dataclasses.MISSING and key not in values]
    if missing:
        raise ConfigError(f"{name}: missing setting {', '.join(missing)}")
    return cls(**values)


def as_flag(setting: Setting) -> Callable[[str], Any]:
    """The setting as the `type` of a flag."""

    def take(text: str) -> Any:
        try:
            return setting.take(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return take


def parse_bytes(text: str) -> int:
    """'512MiB', '2GB', '100000' -> bytes; decimal and binary units. A fraction of a unit is rounded down to a byte."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _no_size(text)
    digits, letter, binary, byte = match.groups()
    # K alone and KiB are 1024; KB is 1000.
    base = 1000 if byte and not binary else 1024
    try:
        exact = Fraction(digits) * Fraction(base) ** " KMGT".index(letter.upper() or " ")
    except ValueError:  # of more than 4300 digits
        raise _no_size(text) from None
    if (binary and not letter) or (not letter and exact.denominator != 1):
        raise _no_size(text)
    return math.floor(exact)


def _no_size(text: str) -> ConfigError:
    return ConfigError(f"{shown(text)} is no size in bytes; write it like 512MiB, 2GB or 1000000")
