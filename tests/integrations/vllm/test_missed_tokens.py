"""Reasons why tokens of prompts were computed: the counter by reason, under vLLM's own scheduler."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import ScheduleEndContext

from hicache.integrations.vllm import HiCacheOffloadingSpec
from hicache.integrations.vllm.manager import EVICTED_AGE, HOST_TOTAL, HOST_USED, MISSED_TOKENS, miss_metrics
from hicache.pages.misses import USABLE, MissReason, MissReasons, count
from hicache.pages.table import names_of
from vllm_offload_case import Cache, engines_on
from vllm_prompts_case import (
    BLOCK_TOKENS,
    COMPLETE,
    CONNECTORS,
    GPU_BLOCKS,
    NUM_CHUNKS,
    PROMPT_CHUNKS,
    Server,
    prompt_of,
)
from vllm_scheduler_case import CHUNK_BYTES
from vllm_tier_case import key, place


class Recorder:
    """Records the statistics that vLLM takes from the manager in each step."""

    def __init__(self, server: Server) -> None:
        self.manager = server.engine.connector.manager
        self._server, self._get_stats = server, self.manager.get_stats
        self.missed, self.ages_s, self.gauges = Counter[str](), list[float](), dict[str, float]()
        self.manager.get_stats = self._take

    def ask(self, prompt: list[int], **given: Any) -> dict[str, int]:
        """Send a prompt. Returns the computed tokens of its complete chunks, by reason."""
        self.missed.clear()
        self._server.ask(prompt, **given)
        self._take()
        return dict(self.missed)

    def _take(self) -> OffloadingConnectorStats | None:
        stats = self._get_stats()
        values = {} if stats is None else stats.data["data"]
        self.missed.update({reason: tokens for (reason,), tokens in values.get(MISSED_TOKENS, {}).items()})
        self.ages_s += values.get(EVICTED_AGE, {}).get(("cpu",), [])
        self.gauges |= {name: values[name][()] for name in (HOST_USED, HOST_TOTAL) if name in values}
        return stats


@pytest.mark.smoke
@pytest.mark.parametrize("connector", CONNECTORS)
def test_new_and_evicted_tokens_are_told_apart(servers: Any, connector: str) -> None:
    """A prompt is new, is hit on the GPU, gets a new end, and is then evicted by other prompts. Each case counts with
    its own reason. The age of each evicted chunk is observed. The CPU tier is full then."""
    server = servers(connector)
    recorder, prompt = Recorder(server), prompt_of(1)
    assert recorder.ask(prompt) == {"never_stored": COMPLETE}
    assert recorder.ask(prompt) == {}
    longer = prompt_of(2, PROMPT_CHUNKS + 2, prompt[:COMPLETE])
    assert recorder.ask(longer) == {"never_stored": 2 * BLOCK_TOKENS}
    server.ask_others(15)
    num_evicted = (15 + 1) * PROMPT_CHUNKS + 2 - NUM_CHUNKS  # minus chunks that only the GPU has
    assert num_evicted - GPU_BLOCKS <= len(recorder.ages_s) <= num_evicted
    assert min(recorder.ages_s) >= 0
    assert recorder.ask(longer) == {"evicted": COMPLETE + 2 * BLOCK_TOKENS}
    assert {*miss_metrics()} == {MISSED_TOKENS, EVICTED_AGE, HOST_USED, HOST_TOTAL}
    assert recorder.gauges == {HOST_USED: NUM_CHUNKS * CHUNK_BYTES, HOST_TOTAL: NUM_CHUNKS * CHUNK_BYTES}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_load_that_costs_more_than_computing_counts_as_gate(
    servers: Any, connector: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The disk has all chunks of the prompt, and the GPU computes 10^9 tokens a second."""
    disk = {"path": str(tmp_path_factory.mktemp("disk")), "prefill_tokens_per_s": 1e9}
    server = servers(connector, disk=disk)
    recorder = Recorder(server)
    server.ask(prompt_of(1))
    server.reset()
    [tier] = recorder.manager.secondary_tiers
    tier.gate.on_read(1, 1e6)  # a disk that takes days to read a page
    assert recorder.ask(prompt_of(1)) == {"gate": COMPLETE}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_chunks_that_a_disk_refuses_count_as_failed(
    servers: Any, connector: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's write queue refuses jobs, so after a reset no tier has the chunks."""
    disk = {"path": str(tmp_path_factory.mktemp("disk")), "prefill_tokens_per_s": 0}
    server = servers(connector, disk=disk)
    recorder = Recorder(server)
    [tier] = recorder.manager.secondary_tiers
    monkeypatch.setattr(tier._backend.writes, "submit", lambda job: False)
    server.ask(prompt_of(1))
    monkeypatch.undo()
    server.reset()
    assert recorder.ask(prompt_of(1)) == {"failed": COMPLETE}


def test_chunks_without_a_row_when_the_gpu_evicts_them_count_as_such(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU tier can free no row, as if transfers had pinned all rows."""
    server = servers("HiCacheConnector")
    recorder = Recorder(server)
    monkeypatch.setattr(server.policy, "num_obtainable", lambda kept: 0)
    server.ask(prompt_of(1))
    server.ask_others(3)
    assert recorder.ask(prompt_of(1)) == {"no_rows": COMPLETE}


def test_chunks_that_are_looked_up_from_the_end_of_a_prompt_all_count() -> None:
    """If all layers have a sliding window, vLLM looks up chunks from the end of the prompt. The GPU has the first two
    chunks, and computes the others."""
    keys = [key(number) for number in range(8)]
    with engines_on("cpu") as engines:
        cache = Cache()
        manager = (engine := engines(cache, {"cpu_bytes_to_use": 4 * cache.chunk_bytes})).manager
        context = engine.request()
        place(keys, context, BLOCK_TOKENS)
        for chunk in reversed(keys[2:]):
            manager.lookup(chunk, context)
        manager.on_schedule_end(ScheduleEndContext((context.req_id,), ()))
        missed = manager.get_stats().data["data"][MISSED_TOKENS]
        manager.on_request_finished(context)
    assert missed == {("never_stored",): 6 * BLOCK_TOKENS}


def test_pages_behind_a_gap_count_with_the_page_before_them() -> None:
    """Usable pages after a gap count with the reason of the page before them. If a name replaces another one in the
    table, the table has no reason for the replaced one."""
    reasons = np.array([USABLE, USABLE, 1, USABLE, 0, USABLE, 2], np.int8)
    assert count(reasons) == {MissReason.NEVER_STORED: 2, MissReason.EVICTED: 2, MissReason.GATE: 1}
    miss_reasons, keys = MissReasons(16), [n.to_bytes(8, "big") for n in range(40)]
    miss_reasons.note(names_of(keys[:16]), MissReason.EVICTED)
    miss_reasons.note(names_of(keys[16:20]), MissReason.FAILED)
    expected = [0] * 4 + [1] * 12 + [4] * 4 + [0] * 20
    assert miss_reasons.reasons(names_of(keys)).tolist() == expected
    miss_reasons.note(names_of(keys[16:18]), MissReason.NEVER_STORED)
    assert miss_reasons.reasons(names_of(keys[16:20])).tolist() == [0, 0, 4, 4]
    assert not len(miss_reasons.reasons(names_of([])))


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Each `vllm:hicache_` series of the Grafana dashboard belongs to a declared metric, and so do its labels."""
    dashboard = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "vllm.json"
    extra = {"cpu_bytes_to_use": "1GB", "disk": {"path": "/nvme/kv"}, "remote": {"url": "dir:///kv"}}
    labels = {
        f"{name}{suffix}": {*metric.labelnames}
        for name, metric in HiCacheOffloadingSpec.build_metric_definitions(extra).items()
        for suffix in ("", "_total", "_bucket")
    }
    panels = json.loads(dashboard.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for text in expressions for name in re.findall(r"vllm:hicache_\w+", text)}
    assert {f"{MISSED_TOKENS}_total", f"{EVICTED_AGE}_bucket"} <= names <= {*labels}
    for text in expressions:
        for name in re.findall(r"vllm:hicache_\w+", text):
            [grouped] = re.findall(r"by \(([^)]*)\)", text)
            assert {*grouped.split(", ")} <= {*labels[name], "le", "instance"}
