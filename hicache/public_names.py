"""Imports a package's public names at their first use, because importing torch and transformers takes seconds.

A package lists its names in `__init__.pyi`, as `from MODULE import NAME as NAME`, and says in `__init__.py`

    __getattr__, __dir__ = on_first_use(__name__, globals())
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from collections.abc import Callable


def on_first_use(package: str, namespace: dict[str, object]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`, whose globals are `namespace`. `__all__` has the names of its
    stub."""

    @functools.cache
    def modules() -> dict[str, str]:
        """Return the module of each public name."""
        stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
        imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(modules())
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(modules()[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *modules()})

    return get, names
