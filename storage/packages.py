"""The two packages that an embedded store needs and that may be missing: `lmdb` and `zstandard`, or None.

Importing `hicache.storage` must work without them; building a store then says what to install. May import the
standard library.
"""

from __future__ import annotations

import importlib
from typing import Any


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


lmdb: Any = _optional("lmdb")
zstandard: Any = _optional("zstandard")
