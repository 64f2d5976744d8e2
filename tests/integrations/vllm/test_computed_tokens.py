"""vLLM's scheduler under our tiers: a block that was not computed is neither hit nor stored."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from hicache.integrations.vllm.computed_tokens import NUM_OFFLOADABLE_TOKENS, PREEMPT_REQUEST
from vllm_scheduler_case import BLOCK_TOKENS, CHUNK_BYTES, VOCABULARY, Engine, answer_to
from vllm_tier_case import scheduler

SPEC = {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM has its own methods when a test begins."""
    monkeypatch.setattr(Scheduler, "_preempt_request", PREEMPT_REQUEST)
    monkeypatch.setattr(OffloadingConnectorScheduler, "_calc_num_offloadable_tokens", NUM_OFFLOADABLE_TOKENS)
    monkeypatch.chdir(tmp_path)  # vLLM starts programs by `-m`, which in a checkout would find our folder kernels


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num)


@pytest.mark.smoke
def test_a_request_that_its_last_step_finishes_after_its_preemption(tmp_path: Path) -> None:
    """With asynchronous scheduling. Its block belongs to another request when vLLM would store it: the other request's
    tokens are not stored under its key."""
    extra = {**SPEC, "cpu_bytes_to_use": 256 * CHUNK_BYTES, "offload_prompt_only": False}
    engine = Engine(tmp_path, extra, num_blocks=4)
    prompt = tokens(BLOCK_TOKENS - 1, seed=1)
    engine.ask("long", tokens(2 * BLOCK_TOKENS - 1, seed=2), 8)
    engine.ask("short", prompt, 2)
    engine.finish()
    assert engine.preempted == {"short": 1}
    assert engine.answers["short"] == answer_to(prompt, 2)
    again = [*prompt, *engine.answers["short"]]
    assert engine.scheduler.reset_prefix_cache()
    engine.ask("again", again, 8)
    engine.finish()
    assert engine.answers["again"] == answer_to(again, 8)
    engine.scheduler.shutdown()


@pytest.mark.smoke
def test_the_tier_corrects_the_scheduler_too(tmp_path: Path) -> None:
    """Under vLLM's own specification, as ours does."""
    with scheduler(tmp_path):
        assert Scheduler._preempt_request is not PREEMPT_REQUEST
