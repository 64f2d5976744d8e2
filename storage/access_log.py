"""What readers tell the writer: which pages were used, and which did not verify."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

# The log keeps this many uses; the oldest are dropped beyond that, which loses a hint and no page.
_MAX_LOGGED = 1 << 16
_KEYS_AT_ONCE = 1 << 13


class AccessLog:
    """What readers noted since the last commit: keys that were used, and keys whose value did not verify. The latter
    are quarantined: they count as absent until the writer has deleted them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: deque[bytes] = deque(maxlen=_MAX_LOGGED)
        self._quarantined: dict[bytes, None] = {}

    def add_used(self, keys: Iterable[bytes]) -> None:
        """Note uses, oldest first."""
        with self._lock:
            self._used.extend(keys)

    def quarantine(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._quarantined.update(dict.fromkeys(keys))

    def is_quarantined(self, key: bytes) -> bool:
        return key in self._quarantined

    @property
    def empty(self) -> bool:
        return not self._used and not self._quarantined

    @property
    def any_quarantined(self) -> bool:
        return bool(self._quarantined)

    def peek(self) -> tuple[list[bytes], list[bytes]]:
        """The next uses to apply and all quarantined keys. They stay until `remove`, so an aborted commit loses
        none."""
        with self._lock:
            return list(islice(self._used, _KEYS_AT_ONCE)), list(self._quarantined)

    def remove(self, used: Sequence[bytes], quarantined: Sequence[bytes]) -> None:
        """Remove what `peek` returned, after it was applied. Uses that were dropped meanwhile are gone already."""
        with self._lock:
            for key in used:
                if self._used and self._used[0] == key:
                    self._used.popleft()
            for key in quarantined:
                self._quarantined.pop(key, None)
