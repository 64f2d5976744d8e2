"""Releases of other packages with which hicache was tested.

The requirements of the distribution have no upper bounds, because pip would enforce them by replacing an installed
torch or server. A part of hicache that depends on the release of a package checks the release at run time. `hicache
doctor` reports the releases of all these packages. `hicache.integrations` lists the tested releases of each server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Tested(NamedTuple):
    """The first and the last tested release of a package. `last="2.15"` includes 2.15.0, 2.15.1 and so on."""

    first: str
    last: str

    def __contains__(self, version: object) -> bool:
        found, first, last = numbers(str(version)), numbers(self.first), numbers(self.last)
        return first <= found and found[: len(last)] <= last


TESTED: Mapping[str, Tested] = MappingProxyType(
    {
        "torch": Tested("2.11", "2.15"),
        "lmdb": Tested("3", "3"),
        "transformers": Tested("5.23", "5.24"),
        "uvicorn": Tested("0.50", "0.54"),
        "llguidance": Tested("1.7", "1"),
        "obstore": Tested("0.12", "0.12"),
        "mooncake-transfer-engine-non-cuda": Tested("0.3.13", "0.3"),
    }
)


def numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 13, 0) for "2.13.0+cpu" and "2.13.0rc1"."""
    return tuple(int(part) for part in re.split(r"[^\d.]", version, maxsplit=1)[0].split(".") if part)
