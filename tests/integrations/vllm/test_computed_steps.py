"""vLLM's scheduler with hicache's tier: the tier is told which tokens of prompts each step computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from hicache.integrations.vllm.computed_steps import UPDATE_FROM_OUTPUT
from hicache.integrations.vllm.gate import LoadGate
from vllm_scheduler_case import BLOCK_TOKENS, CHUNK_BYTES, VOCABULARY, Engine, answer_to

STEP_TOKENS = 128
LENGTHS = (630, 40, 333, 96, 630)


@pytest.mark.smoke
@pytest.mark.parametrize("connector", ["OffloadingConnector", "HiCacheConnector"])
@pytest.mark.parametrize("is_async", [False, True])
def test_each_computed_token_of_a_prompt_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, is_async: bool
) -> None:
    """Prompts in parts, several in a step, with a prefix that the GPU has or the CPU tier loads. Tokens that are
    cached, and generated tokens, are not reported. An aborted request does not disturb the others."""
    reported = list[tuple[int, int]]()
    original = LoadGate.on_computed

    def computed(gate: LoadGate, spans: Sequence[tuple[int, int]]) -> None:
        reported.extend(spans)
        original(gate, spans)

    monkeypatch.setattr(LoadGate, "on_computed", computed)
    monkeypatch.setattr(Scheduler, "update_from_output", UPDATE_FROM_OUTPUT)  # the tier replaces vLLM's own method
    monkeypatch.chdir(tmp_path)  # vLLM starts programs with `-m`, which would find kernels/ of a checkout
    disk = {"path": str(tmp_path / "disk"), "budget": "64MB", "prefill_tokens_per_s": 0}
    extra = {"cpu_bytes_to_use": 256 * CHUNK_BYTES, "disk": disk}
    if connector == "OffloadingConnector":
        extra |= {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}
    engine = Engine(
        tmp_path, extra, is_async=is_async, num_blocks=64, connector=connector, max_num_batched_tokens=STEP_TOKENS
    )
    choose = random.Random(1)
    long = choose.choices(range(VOCABULARY), k=max(LENGTHS))
    prompts = [long if length == max(LENGTHS) else choose.choices(range(VOCABULARY), k=length) for length in LENGTHS]
    for number, prompt in enumerate(prompts):
        engine.ask(str(number), prompt, 5)
    engine.finish()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask("again", long, 5)
    engine.finish()
    assert [engine.answers[str(number)] for number in range(len(prompts))] == [answer_to(p, 5) for p in prompts]
    assert engine.answers["again"] == answer_to(long, 5)
    assert engine.worker.num_loaded == len(long) // BLOCK_TOKENS and not engine.preempted
    assert sum(end - start for start, end in reported) == sum(LENGTHS) + len(long) - engine.num_cached
    assert max(end - start for start, end in reported) <= STEP_TOKENS and max(reported)[1] == len(long)
    before = len(reported)
    engine.ask("aborted", choose.choices(range(VOCABULARY), k=600), 5)
    engine.step()
    engine.abort("aborted")
    engine.finish()
    assert len(reported) <= before + 1
    engine.close()
