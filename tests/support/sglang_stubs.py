"""What SGLang's modules import and no test calls: modules that answer every attribute. Import this before SGLang."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

NAMES = ("torchvision", "gguf", "datasets")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Stub(metaclass=_Anything):
    def __init__(self, *args: object, **kwargs: object) -> None: ...


class _Module(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Stub,), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = {*names}

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        stubbed = fullname.split(".", maxsplit=1)[0] in self._names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


missing = [name for name in NAMES if name not in sys.modules and importlib.util.find_spec(name) is None]
sys.meta_path.append(_Finder(missing))
