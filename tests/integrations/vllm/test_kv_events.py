"""KV events as vLLM's own classes read them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kv_events_case import subscribe


def test_vllm_decodes_what_an_engine_tells(tmp_path: Path) -> None:
    """A subscriber with vLLM's `KVEventBatch` holds what the tiers hold."""
    subscribe(tmp_path, "vllm.distributed.kv_events")
