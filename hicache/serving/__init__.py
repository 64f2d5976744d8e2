"""The reference scheduler and model runner: transformers models with long contexts, served through the three tiers.

Needs the extra `serve`. No other package imports this one.

    from hicache.serving import Scheduler, ModelRunner, Request

`__init__.pyi` lists the public names. Each is imported from its module when it is first used, for transformers takes
seconds to load, and only the runner needs it.
"""

import ast
import functools
import importlib
import pkgutil


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
