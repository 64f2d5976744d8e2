"""The settings of the tier under vLLM: those of the disk, and of the gate before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hicache.config import Auto
from hicache.integrations.server_store import ServerStoreConfig
from hicache.settings import Number, as_mapping, from_mapping


@dataclass(frozen=True, kw_only=True)
class TierConfig(ServerStoreConfig):
    """What a user gives for the tier, or as the `disk` of the spec."""

    prefill_tokens_per_s: Annotated[
        float | Auto,
        Number(
            "speed of prefill; what would be slower to load is computed; 0: nothing would",
            unit="tokens/second",
            computed_from="prompts that are timed while serving",
        ),
    ] = "auto"


def tier_config(given: Mapping[str, Any], where: str) -> TierConfig:
    """The settings in `given`. `ConfigError` names `where` they stand, what is wrong and what is known."""
    config: TierConfig = from_mapping(TierConfig, as_mapping(given, where), where)
    return config
