"""hicache: GPU memory, pinned CPU memory and disk as one cache for the attention state (KV) of language models.

`__init__.pyi` lists the public names. Each is imported from its module when it is first used, since torch takes a
second to load and most programs need neither a store nor every kind of pool.
"""

import ast
import functools
import importlib
import pkgutil

__version__ = "0.1.0"


@functools.cache
def _modules() -> dict[str, str]:
    """The module of each public name: `from MODULE import NAME as NAME` in the stub."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_modules()[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
