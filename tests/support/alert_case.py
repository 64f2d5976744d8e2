"""The metrics that the alerts of deploy/alerts.yaml read, by the server that exports them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VLLM = "vllm:"
# A name with the prefix of vLLM is a metric of vLLM; with an optional prefix, a metric of all servers.
_METRIC = re.compile(r"(\(vllm:\)\?|vllm:)?\b(hicache_\w+)")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_of_plug_ins(server: str) -> set[str]:
    """Return the metrics that the alerts read from "vllm" or "sglang"."""
    found = {match for rule in alerts() for match in _METRIC.findall(rule["expr"])}
    shared = {name for prefix, name in found if prefix not in ("", _VLLM)}
    if server == "sglang":
        return shared
    return {f"{_VLLM}{name}" for name in shared | {name for prefix, name in found if prefix == _VLLM}}
