"""The example of two servers that share a store, run with vLLM for CPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

if not any(map(importlib.util.find_spec, ("vllm._C", "vllm._C_stable_libtorch"))):
    pytest.skip("needs vLLM's compiled parts", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.smoke
@pytest.mark.timeout(900)  # two starts of vLLM take a minute each on a busy machine
def test_the_second_server_loads_what_the_first_one_computed(tmp_path: Path) -> None:
    """Two servers get the same prompt. The first server computes the prompt, and the second server loads the complete
    chunks of the prompt from the disk."""
    model, examples = tmp_path / "model", ROOT / "examples/vllm"
    subprocess.run([sys.executable, str(examples / "tiny_model.py"), str(model)], cwd=tmp_path, check=True)
    # In bfloat16, vLLM's CPU attention uses AMX tiles. If the first forward of a process is that of a loaded prompt,
    # the kernel has not permitted AMX yet, and the worker ends with SIGILL.
    flags = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(examples / "two_servers.py"), str(model), *flags],
        cwd=tmp_path, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    cached = [
        [int(word) for word in line.partition(": ")[2].split() if word.isdigit()] for line in ran.stdout.splitlines()
    ]
    assert cached[0] == [1440, 0] and cached[1][0] == 1440
    assert cached[1][1] >= 1440 - 32, "all chunks but the last, which vLLM may compute"
