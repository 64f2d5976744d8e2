"""vLLM's scheduler with our tiers: a block that was not computed is neither hit nor stored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from hicache.integrations.vllm.computed_tokens import NUM_OFFLOADABLE_TOKENS, PREEMPT_REQUEST
from vllm_prompts_case import CONNECTORS
from vllm_scheduler_case import BLOCK_TOKENS, CHUNK_BYTES, VOCABULARY, Engine, answer_to
from vllm_tier_case import scheduler

SPEC = {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}
CPU_BYTES = 256 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore vLLM's own methods before a test."""
    monkeypatch.setattr(Scheduler, "_preempt_request", PREEMPT_REQUEST)
    monkeypatch.setattr(OffloadingConnectorScheduler, "_calc_num_offloadable_tokens", NUM_OFFLOADABLE_TOKENS)
    monkeypatch.chdir(tmp_path)  # vLLM starts programs with `-m`, which would find kernels/ of a checkout


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num)


def ask_again(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """The answer to the prompt after the GPU's cache was emptied."""
    engine.finish()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask("again", prompt, 8)
    engine.finish()
    return engine.answers["again"]


@pytest.mark.smoke
def test_a_request_preempted_in_the_step_that_schedules_it(tmp_path: Path) -> None:
    """With priorities, a request is preempted in the step that schedules it. 512 of its tokens were computed before,
    and two blocks of the step already had hashes. The answer of the request, and the one to the same prompt from the
    CPU tier, are those without a cache."""
    extra = {**SPEC, "cpu_bytes_to_use": CPU_BYTES}
    engine = Engine(
        tmp_path, extra, is_async=False, num_blocks=23, scheduling_policy="priority", long_prefill_token_threshold=64
    )
    prompt = tokens(630, seed=1)
    engine.ask("running", tokens(3, seed=2), 28)
    engine.ask("low", prompt, 8, priority=10)
    engine.step()
    engine.step()
    for name, seed in (("high", 3), ("higher", 4)):
        engine.ask(name, tokens(27, seed), 20)
    engine.finish()
    assert engine.preempted == {"low": 1}
    assert engine.answers["low"] == answer_to(prompt, 8)
    assert ask_again(engine, prompt) == answer_to(prompt, 8)
    assert engine.worker.num_loaded == 630 // BLOCK_TOKENS
    engine.close()


@pytest.mark.smoke
def test_a_request_that_its_last_step_finishes_after_its_preemption(tmp_path: Path) -> None:
    """With asynchronous scheduling a request is preempted, and its last step then finishes it. The block of that step
    belongs to another request when vLLM would store it: the other request's tokens are not stored under its key."""
    extra = {**SPEC, "cpu_bytes_to_use": CPU_BYTES, "offload_prompt_only": False}
    engine = Engine(tmp_path, extra, is_async=True, num_blocks=4)
    prompt = tokens(BLOCK_TOKENS - 1, seed=1)
    engine.ask("long", tokens(2 * BLOCK_TOKENS - 1, seed=2), 8)
    engine.ask("short", prompt, 2)
    engine.finish()
    assert engine.preempted == {"short": 1}
    assert engine.answers["short"] == answer_to(prompt, 2)
    again = [*prompt, *engine.answers["short"]]
    assert ask_again(engine, again) == answer_to(again, 8)
    engine.close()


@pytest.mark.smoke
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_chunk_whose_first_blocks_are_outside_the_window(tmp_path: Path, connector: str) -> None:
    """The second of three chunks has one block in the window of a request that hits all three on the GPU. A shorter
    prompt needs all blocks of the second chunk, which were not stored. Its answer is that without a cache."""
    extra = {"cpu_bytes_to_use": CPU_BYTES, "blocks_per_chunk": 3}
    extra |= SPEC if connector == "OffloadingConnector" else {"store": "computed"}
    engine = Engine(tmp_path, extra, is_async=False, num_blocks=64, connector=connector, window=100)
    prompt, chunk = tokens(300, seed=1), 3 * BLOCK_TOKENS
    engine.ask("not stored", prompt, 2, kv_transfer_params={"max_offload_tokens": 0})
    engine.finish()
    engine.ask("hit", [*prompt[: 3 * chunk], *tokens(40, seed=2)], 2)
    assert ask_again(engine, prompt[: chunk + 5]) == answer_to(prompt[: chunk + 5], 8, window=100)
    shorter = [*prompt[: 2 * chunk], *tokens(40, seed=3)]
    assert ask_again(engine, shorter) == answer_to(shorter, 8, window=100)
    engine.close()


@pytest.mark.smoke
def test_the_tier_corrects_the_scheduler_too(tmp_path: Path) -> None:
    """The secondary tier also corrects vLLM's scheduler if vLLM's own specification is used."""
    with scheduler(tmp_path):
        assert Scheduler._preempt_request is not PREEMPT_REQUEST
