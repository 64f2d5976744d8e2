"""A whole vLLM with two workers, each in a process of its own, over the CPU and disk tier; then another one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm._C", reason="needs vLLM's compiled parts", exc_type=ImportError)

import vllm_offload_program
from vllm_offload_program import BLOCK_TOKENS, NUM_PROMPTS, OUTPUT_TOKENS, PROMPT_TOKENS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "vllm"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
START_S = 600  # of one vLLM on a busy machine
CHUNK_BYTES = BLOCK_TOKENS * 4 * 2 * 2 * 64 * 4  # 4 layers, keys and values of 2 heads of 64 elements in float32
LITTLE_CHUNKS = 8  # a prompt has 18


def serve(model: Path, store: Path, rounds: int, cpu: str = "64MB") -> Any:
    options = {
        "rounds": rounds,
        "workers": 1 if torch.cuda.device_count() == 1 else 2,
        "extra": {
            "spec_name": "HiCacheOffloadingSpec",
            "spec_module_path": "hicache.integrations.vllm",
            "cpu_bytes_to_use": cpu,
            "disk": {"path": str(store), "budget": "256MB"},
        },
    }
    run = subprocess.run(
        [sys.executable, vllm_offload_program.__file__, str(model), json.dumps(options)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    shared = re.findall(r"/dev/shm/vllm_offload_\S+?\.mmap", run.stdout + run.stderr)
    assert shared and not any(Path(file).exists() for file in shared)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(4 * START_S)
def test_prompts_are_cached_after_a_reset_and_after_a_restart_and_tokens_stay(tmp_path: Path) -> None:
    """vLLM counts the cached tokens. After the reset they come from the CPU tier, after the restart from the disk, also
    through a CPU tier that is smaller than a prompt, as far as it reaches. Its processes, which are killed where they
    take long to end, leave no shared memory."""
    subprocess.run([sys.executable, str(EXAMPLES / "tiny_model.py"), str(tmp_path / "model")], check=True)
    computed, from_cpu = serve(tmp_path / "model", tmp_path / "store", rounds=2)
    (from_disk,) = serve(tmp_path / "model", tmp_path / "store", rounds=1)
    (through_little,) = serve(tmp_path / "model", tmp_path / "store", rounds=1, cpu=f"{LITTLE_CHUNKS * CHUNK_BYTES}")
    whole_blocks = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [cached for cached, _ in computed] == [0] * NUM_PROMPTS
    assert [cached for cached, _ in from_cpu] == [whole_blocks] * NUM_PROMPTS
    assert [cached for cached, _ in from_disk] == [whole_blocks] * NUM_PROMPTS
    tokens = [output for _, output in computed]
    assert [len(output) for output in tokens] == [OUTPUT_TOKENS] * NUM_PROMPTS
    assert [output for _, output in from_cpu] == tokens
    assert [output for _, output in from_disk] == tokens
    # What the first prompt stored may still pin rows when the others are looked up.
    assert through_little[0][0] == LITTLE_CHUNKS * BLOCK_TOKENS
    assert [output for _, output in through_little] == tokens
