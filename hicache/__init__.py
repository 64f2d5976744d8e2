"""hicache: GPU memory, pinned CPU memory and disk as one cache for the attention state (KV) of language models.

The public names (`hicache.surface`) are loaded when the first of them is asked for: torch takes a second or more, and
the command line must answer, and be interrupted, before. Importing needs neither a GPU nor Triton nor lmdb.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.surface import *  # noqa: F403 - the list of names stands there
    from hicache.surface import __all__ as __all__

__version__ = "0.1.0"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if not name.startswith("_") or name == "__all__":
            surface = import_module("hicache.surface")
            # Loading it has also set the attributes of this package that are its parts.
            globals().update({public: getattr(surface, public) for public in surface.__all__}, __all__=surface.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
