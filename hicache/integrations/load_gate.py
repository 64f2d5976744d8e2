"""What the gates before the disk under vLLM and SGLang share: their setting, and decisions that are counted, and logged
once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hicache.config import Auto
from hicache.integrations.server_store import ServerStoreConfig
from hicache.metrics import Metrics
from hicache.settings import Number, as_mapping, from_mapping

log = logging.getLogger(__name__)

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
