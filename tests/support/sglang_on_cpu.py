"""SGLang's Python on a machine without GPU: stand-ins for the packages whose compiled parts cannot be loaded there.

Each stand-in answers any attribute with an empty class; none of them is on the way of a page.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

STAND_INS = {"torchvision", "gguf", "sgl_kernel", "datasets", "xgrammar"}


class _Anything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """As the type of a field."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def prepare() -> None:
    """Call before anything of SGLang is imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Transformers asks which of these packages are installed, and must not take a stand-in for one.
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, image_utils  # noqa: F401
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # Its name asks for torchvision, its module does not.
    sys.modules["transformers"].AutoImageProcessor = AutoImageProcessor

    sys.meta_path.insert(0, _Finder())
