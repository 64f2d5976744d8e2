"""vLLM itself serves a tiny random model over our tier: cached tokens by its own count, and the same output."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm._C", reason="needs vLLM's compiled parts", exc_type=ImportError)

import vllm_server
from hicache.storage import describe, open_existing

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "vllm"
CACHED = vllm_server.PROMPT_TOKENS // 32 * 32
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    subprocess.run([sys.executable, str(EXAMPLES / "tiny_model.py"), folder], check=True)
    return folder


class Served(NamedTuple):
    """What a process of vllm_server has printed, and its log."""

    cached: list[list[int]]  # tokens, for each run a number a prompt
    outputs: list[list[int]]  # for each prompt the tokens, which are the same in all runs
    stored: list[vllm_server.Checksums]
    given: list[vllm_server.Checksums]
    log: str


def serve(model: str, tiers: list[dict[str, Any]], steps: list[str], **task: Any) -> Served:
    task |= {"model": model, "tiers": tiers, "steps": steps}
    result = subprocess.run(
        [sys.executable, vllm_server.__file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-10000:]
    printed = json.loads(result.stdout.splitlines()[-1])
    outputs = [[output for _, output in run] for run in printed["runs"]]
    assert all(output == outputs[0] for output in outputs), "what is cached changed the output"
    cached = [[cached for cached, _ in run] for run in printed["runs"]]
    return Served(cached, outputs[0], printed["stored"], printed["given"], log)


def are_bytes_of(given: vllm_server.Checksums, stored: vllm_server.Checksums) -> bool:
    """Whether each chunk came back with bytes that it was stored with."""
    return all(set(checksums) <= set(stored[key]) for key, checksums in given.items())


@pytest.mark.timeout(1200)
def test_cached_tokens_after_a_reset_a_restart_and_with_every_tier_at_fault(model: str, tmp_path: Path) -> None:
    """What was computed once is not computed again, by vLLM's own count; no fault of a tier changes a token."""
    pages = {"path": str(tmp_path / "pages")}
    steps = ["run", "reset", "run", "faults", *["reset", "run"] * 3]
    first = serve(model, [pages], steps, policy="SLRUPolicy")
    assert first.cached[:2] == [[0, 0], [CACHED, CACHED]]
    assert sum(map(sum, first.cached[2:])) > 0
    assert are_bytes_of(first.given[0], first.stored[0])
    assert "Failed to close mmap_obj" not in first.log
    [folder] = (tmp_path / "pages").iterdir()
    assert describe(folder).entries == 2 * CACHED // 32

    # A second process. Its tiers, first to last: damaged, with a key of its own, too small for a prompt, and the first
    # process's, which a third one writes to.
    shutil.copytree(folder, tmp_path / "damaged" / folder.name)
    data = tmp_path / "damaged" / folder.name / "store.json"
    data.write_bytes(b"\xff" * data.stat().st_size)
    (tmp_path / "key").write_bytes(bytes(range(32)))
    tiers = [
        {"path": str(tmp_path / "damaged")},
        {**pages, "key_file": str(tmp_path / "key")},
        {"path": str(tmp_path / "small"), "budget": "2MB"},
        pages,
    ]
    with contextlib.closing(open_existing(folder)) as other:
        assert other.stats().entries
        second = serve(model, tiers, ["run", "reset", "run"])
    assert second.cached == [[CACHED, CACHED]] * 2
    assert not second.given[0] and len(second.given[3]) == 2 * CACHED // 32
    assert all(are_bytes_of(given, first.stored[0]) for given in second.given)
    assert second.outputs == first.outputs
    assert f"{data} is damaged" in second.log and "pages are read and not stored" in second.log

    # A third, of another dtype and block size, on the first one's path.
    third = serve(model, [pages], ["run", "reset", "run"], dtype="float16", block_size=64)
    assert third.cached == [[0, 0], [vllm_server.PROMPT_TOKENS // 64 * 64] * 2]
