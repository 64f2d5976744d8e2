"""Counts the tokens that SGLang copies from the GPU to a host pool, when SGLang submits the copies.

With `write_through` SGLang copies tokens as soon as they are computed, so the copies show the prefill speed, which
SGLang does not report to a storage backend. Other write policies copy later and are not watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hicache.integrations.sglang.release import get_server_args

_METHOD = "backup_from_device_all_layer"


class HostCopies:
    """Wraps the method of a host pool with which SGLang's scheduler thread copies tokens to the pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def watch(self, pool: Any, on_copy: Callable[[int], None]) -> None:
        """Watch `pool` from now on, and no other pool. `on_copy` is called with the tokens of each copy and must not
        raise."""
        self.end()
        if get_server_args().hicache_write_policy != "write_through":
            return
        copy = getattr(pool, _METHOD)

        @functools.wraps(copy)
        def copied(device_pool: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
            on_copy(len(host_indices))
            return copy(device_pool, host_indices, *args, **kwargs)

        setattr(pool, _METHOD, copied)
        self._pool = pool

    def end(self) -> None:
        """Restore the method of the pool."""
        if self._pool is not None:
            delattr(self._pool, _METHOD)
            self._pool = None
