"""What the gates before the disk under vLLM and SGLang share: their setting, decisions that are counted and logged
once, and the speed of prefill that outlives the server."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from hicache.config import Auto
from hicache.config.settings import Number, as_mapping, from_mapping
from hicache.flow.cost import PrefillCost
from hicache.integrations.server_store import ServerStoreConfig
from hicache.metrics import Metrics

log = logging.getLogger(__name__)

_CHANGED = 0.1
_DECISIONS = {
    "accepted": "loads from the disk that were estimated to be faster than computing",
    "declined": "loads from the disk that were not made, since computing was estimated to be faster",
    "unmeasured": "loads from the disk that were made while one of the two speeds was unknown",
    "abandoned": "waits for the disk that ended, since computing was estimated to be faster by then",
}


@dataclass(frozen=True, kw_only=True)
class GatedStoreConfig(ServerStoreConfig):
    """The settings of the disk, and of the gate before it."""

    prefill_tokens_per_s: Annotated[
        float | Auto,
        Number(
            "speed of prefill; what would be slower to load is computed; 0: nothing would",
            unit="tokens/second",
            computed_from="prompts that are timed while serving",
        ),
    ] = "auto"


def gated_store_config(given: Mapping[str, Any], where: str) -> GatedStoreConfig:
    """The settings in `given`. `ConfigError` names `where` they stand, what is wrong and what is known."""
    config: GatedStoreConfig = from_mapping(GatedStoreConfig, as_mapping(given, where), where)
    return config


class KeepsNote(Protocol):
    """A store that keeps a few bytes beside its pages: see `StoreClient`."""

    @property
    def note(self) -> bytes: ...

    def keep(self, note: bytes) -> None: ...


class PrefillNote:
    """The speed of prefill, left with the store: after a restart the first prompts are weighed by it, though all of
    them may be on the disk and none is computed. Called by one thread at a time."""

    def __init__(self, measured: PrefillCost, store: KeepsNote) -> None:
        self._measured, self._store = measured, store
        self._kept = (0.0, 0.0)  # last

    def step(self) -> None:
        """Assume what an earlier server left, until one is measured; leave that, and each change by a tenth."""
        if not self._measured.is_measured:
            self._measured.assume(*_terms_in(self._store.note))
        elif any(abs(new - old) > _CHANGED * new for new, old in zip(self._measured.terms, self._kept, strict=True)):
            self._kept = self._measured.terms
            self._store.keep(json.dumps(self._kept).encode())


def _terms_in(note: bytes) -> tuple[float, float]:
    """0, 0 for what is not two times in seconds."""
    try:
        token_s, pair_s = map(float, json.loads(note or "[0, 0]"))
    except (TypeError, ValueError):
        return 0.0, 0.0
    return (token_s, pair_s) if math.isfinite(token_s + pair_s) and min(token_s, pair_s) >= 0 else (0.0, 0.0)


class LoadDecisions:
    """Called by one thread at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self.accepted, self.declined, self.unmeasured, self.abandoned = (
            metrics.counter(f"gate.{decision}_loads", what, "load_gate_loads", decision=decision)
            for decision, what in _DECISIONS.items()
        )

    def decide(self, load_s: float | None, compute_s: float | None) -> bool:
        """Whether to load what takes so long to load and to compute; None: not known yet."""
        if load_s is None or compute_s is None:
            self.unmeasured.value += 1
            return True
        if load_s <= compute_s:
            self.accepted.value += 1
            return True
        if not self.declined.value:
            log.info(
                "a prefix on the disk is computed again: loading it would take %.3g s, computing %.3g s; "
                "prefill_tokens_per_s=0 loads it anyway",
                load_s,
                compute_s,
            )
        self.declined.value += 1
        return False

    def abandon(self) -> None:
        """Count a wait that ended."""
        if not self.abandoned.value:
            log.info("the disk has become slow: the rest of a prompt is computed instead")
        self.abandoned.value += 1
