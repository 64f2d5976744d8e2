"""Counts the tokens that SGLang copies from the GPU to a host pool. A copy is counted when SGLang submits it.

SGLang does not report its prefill speed to a storage backend. With the write policy `write_through`, SGLang copies
tokens as soon as they are computed, so the copies show the prefill speed. With other write policies SGLang copies
later, so these copies are not counted.
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
        """Count the copies to `pool` from now on, and stop counting copies to an earlier pool. `on_copy` is called with
        the number of tokens of each copy, and must not raise."""
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
        """Stop counting, and restore the pool's own method."""
        if self._pool is not None:
            delattr(self._pool, _METHOD)
            self._pool = None
