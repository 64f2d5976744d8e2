"""The keys under which Triton would compile the kernel launches of a test. Without a GPU nothing is compiled or
launched."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class _NoDevice:
    """A Triton driver without a GPU: Triton computes the keys of an H100."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_keys(*modules: types.ModuleType) -> Iterator[list[tuple[str, str]]]:
    """Record the kernel and the key of each launch inside the context, each pair once, for the kernels in `modules`.
    With a GPU the kernels run; without a GPU the launches are only recorded."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    keys: list[tuple[str, str]] = []
    on_gpu = torch.cuda.is_available()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        if (fn.name, key) not in keys:
            keys.append((fn.name, key))
        return not on_gpu  # True: Triton neither compiles nor launches

    kernels = [(module, *item) for module in modules for item in vars(module).items() if item[0].endswith("_kernel")]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, kernel in kernels:
            if on_gpu:
                kernel.device_caches.clear()
            else:
                patch.setattr(module, name, JITFunction(kernel.fn, **kernel.kwargs))
        if not on_gpu:
            patch.setattr(driver, "_active", _NoDevice())
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        yield keys
