"""How many tokens SGLang copies from the GPU to a host pool, as it submits the copies.

With `write_through` it does so as soon as they are computed, so this shows the speed of prefill, which nothing else
tells a storage backend. Other policies copy later: they are not watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hicache.integrations.sglang.release import get_server_args

_METHOD = "backup_from_device_all_layer"


class HostCopies:
    """Wraps the method of one pool by which SGLang's scheduler copies to it. Scheduler thread."""

    def __init__(self) -> None:
        self._pool: Any = None

    def watch(self, pool: Any, told: Callable[[int], None]) -> None:
        """From now on, and in place of another pool: `told` gets the tokens of each copy, and does not raise."""
        self.end()
        if get_server_args().hicache_write_policy != "write_through":
            return
        copy = getattr(pool, _METHOD)

        @functools.wraps(copy)
        def copied(device_pool: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
            told(len(host_indices))
            return copy(device_pool, host_indices, *args, **kwargs)

        setattr(pool, _METHOD, copied)
        self._pool = pool

    def end(self) -> None:
        """The pool is as it was."""
        if self._pool is not None:
            delattr(self._pool, _METHOD)
            self._pool = None
