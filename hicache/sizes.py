"""Sizes in bytes as people write them, for settings and for the URLs of stores."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hicache.errors import ConfigError

_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE | re.ASCII)
_MAX_SHOWN = 80


def parse_bytes(text: str) -> int:
    """'512MiB', '2GB', '100000' -> bytes; decimal and binary units. A fraction of a unit is rounded down to bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _not_a_size(text)
    digits, letter, binary, byte = match.groups()
    # K alone and KiB are 1024; KB is 1000.
    base = 1000 if byte and not binary else 1024
    try:
        exact = Fraction(digits) * Fraction(base) ** " KMGT".index(letter.upper() or " ")
    except ValueError:  # of more than 4300 digits
        raise _not_a_size(text) from None
    if (binary and not letter) or (not letter and exact.denominator != 1):
        raise _not_a_size(text)
    return math.floor(exact)


def _not_a_size(text: str) -> ConfigError:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return ConfigError(f"{shown!r} is not a size in bytes; write it like 512MiB, 2GB or 1000000")
