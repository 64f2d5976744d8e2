"""A stand-in for the package torch_memory_saver. The stand-in counts the bytes that torch zeroes within each region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Counting(TorchFunctionMode):
    def __init__(self, num_bytes: Counter[str], tag: str) -> None:
        super().__init__()
        self._num_bytes, self._tag = num_bytes, tag

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.zeros:
            self._num_bytes[self._tag] += result.nbytes
        return result


class TorchMemorySaver:
    def __init__(self) -> None:
        self.num_bytes: Counter[str] = Counter()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Counting(self.num_bytes, tag):
            yield


torch_memory_saver = TorchMemorySaver()
