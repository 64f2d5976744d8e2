"""The packages that an embedded store needs and that may be missing: each is the module itself, or None.

`lmdb` and `zstandard` are always needed, `cryptography` (four modules of it) for encrypted pages only. Importing
`hicache.storage` works without them; building a store then says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from hicache.storage.base import StoreError


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def require_packages() -> None:
    """Raises `StoreError` when an embedded store cannot be built here."""
    if lmdb is None or zstandard is None:
        raise StoreError("the disk tier needs two packages: pip install lmdb zstandard")


def load_mooncake() -> Any:
    """The module `mooncake.store`, which is large and starts threads: loaded when a store needs it."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(
            f"a store at mooncake:// needs Mooncake and libibverbs ({error}): "
            "pip install 'hicache[mooncake]' and apt-get install libibverbs1"
        ) from None


lmdb: Any = _optional("lmdb")
zstandard: Any = _optional("zstandard")
ciphers: Any = _optional("cryptography.hazmat.primitives.ciphers")
cipher_algorithms: Any = _optional("cryptography.hazmat.primitives.ciphers.algorithms")
cipher_modes: Any = _optional("cryptography.hazmat.primitives.ciphers.modes")
crypto_errors: Any = _optional("cryptography.exceptions")

# What an LMDB call raises when it fails: its own errors, those of the operating system, and SystemError, with which the
# binding reports a failure that it cannot name.
io_errors: tuple[type[Exception], ...] = (OSError, SystemError, *((lmdb.Error,) if lmdb else ()))
opening_errors: tuple[type[Exception], ...] = (StoreError, *io_errors)
