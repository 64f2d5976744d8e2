"""Common parts of the load gates for vLLM and SGLang. A gate decides whether a prefix is loaded from a store or
computed. This module has the gates' counters, and stores the measured prefill speed across restarts of the server."""

from __future__ import annotations

import logging
import math
import struct
from typing import Protocol

from hicache.flow.cost import CostModel, LoadPolicy, PrefillCost
from hicache.metrics import Metrics

log = logging.getLogger(__name__)

_CHANGED = 0.1
_TERMS = struct.Struct("<2d")
_FAMILY = "load_gate_loads"


class NoteStore(Protocol):
    """A store that keeps a short note in addition to its pages. See `StoreClient`."""

    @property
    def note(self) -> bytes: ...

    def keep(self, note: bytes) -> None: ...


class PrefillNote:
    """Stores the measured prefill speed in the note of the store. After a restart, the gate compares loads with the
    stored speed until a new speed is measured. Without a stored speed, a server whose prompts are all on the disk would
    never compute a prompt, and so never measure a speed. One thread at a time calls the methods.

    The note is two float64, little-endian: seconds per token, and seconds per token and position (`PrefillCost`).
    """

    def __init__(self, measured: PrefillCost, store: NoteStore) -> None:
        self._measured = measured
        self._store = store

    def step(self) -> None:
        """Use the speed in the note until a speed is measured. Write the measured speed to the note if it differs from
        the note by more than a tenth."""
        left = _terms_in(self._store.note)
        if not self._measured.is_measured:
            self._measured.assume(*left)
        elif any(abs(new - old) > _CHANGED * new for new, old in zip(self._measured.terms, left, strict=True)):
            self._store.keep(_TERMS.pack(*self._measured.terms))


def _terms_in(note: bytes) -> tuple[float, float]:
    """Return the two times in a note; 0, 0 if the note does not contain two times."""
    token_s, pair_s = _TERMS.unpack(note) if len(note) == _TERMS.size else (0.0, 0.0)
    return (token_s, pair_s) if math.isfinite(token_s + pair_s) and min(token_s, pair_s) >= 0 else (0.0, 0.0)


class ServerLoadPolicy(LoadPolicy):
    """The policy that decides on a server's loads from the disk. `abandoned`: number of waits for the disk that ended
    because the disk did not answer in time."""

    def __init__(self, cost: CostModel, metrics: Metrics) -> None:
        super().__init__(cost, metrics, "gate", "disk", _FAMILY)
        what = "waits for the disk that ended because no page was read in the time that computing takes"
        self.abandoned = metrics.counter("gate.abandoned_loads", what, _FAMILY, decision="abandoned")

    def abandon(self) -> None:
        """Count a wait for the disk that ended because the disk did not answer in time."""
        if not self.abandoned.value:
            log.info("the disk sent no data in time: the rest of a prompt is computed")
        self.abandoned.value += 1
