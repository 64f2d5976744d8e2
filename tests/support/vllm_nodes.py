"""Servers of vLLM on several simulated nodes: each is a process of this machine with its own disk, and all share a
store.

The environments of `.ci/servers` are in one folder, so a test in one environment can start a server of another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
EXAMPLES = SUPPORT.parents[1] / "examples" / "vllm"
# The environment of vLLM 0.33 has only the sources of vLLM. So servers of 0.33 use the compiled CPU code of 0.32, whose
# operations have the same signatures.
_SERVE = """
import runpy, sys, vllm
vllm.__path__ += sys.argv[2:]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
PROMPT_TOKENS, CHUNK_TOKENS = 600, 64
CACHED = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS


def environment_of(name: str) -> Path | None:
    """The Python of an environment, like "vllm-0.32"; None if the environment does not exist."""
    folder = Path(sys.prefix).parent
    found = sorted(path for path in folder.glob(f"{name}-*") if (path / ".done").exists())
    return found[-1] / "bin" / "python" if found else None


def _compiled_parts() -> list[Path]:
    """The folders of vLLM in the environment that has its compiled parts."""
    python = environment_of("vllm-0.32")
    return [] if python is None else sorted(python.parent.parent.glob("lib/python3*/site-packages/vllm"))


def write_model(python: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    subprocess.run([python, EXAMPLES / "tiny_model.py", folder], check=True)
    return folder


class Node:
    """A server that runs some `steps` of `vllm_server` and ends. `python`: the Python of its environment. `disk`: the
    settings of its tier. `connector` in `more`: a connector of hicache in place of vLLM's, whose tier records no bytes.
    All nodes have the same prompts."""

    def __init__(self, python: Path, model: Path, disk: dict[str, Any], steps: list[str], **more: Any) -> None:
        settings = {"prefill_tokens_per_s": 0, "budget": "256MB", **disk}
        tiers = {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "hicache.bench.servers.vllm_worker",
            "secondary_tiers": [{"type": "RecordingTier", "module_path": "vllm_server", **settings}],
        }
        tiers = {"disk": settings} if "connector" in more else tiers
        extra = {"cpu_bytes_to_use": 64 << 20, **tiers, **more.pop("extra", {})}
        llm = {"block_size": CHUNK_TOKENS, "prefix_caching_hash_algo": "sha256", **more.pop("llm", {})}
        task = {"model": str(model), "extra": extra, "steps": steps, "llm": llm, "prompt_tokens": PROMPT_TOKENS, **more}
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(SUPPORT)]),
        }
        self._log = (model.parent / f"{len(list(model.parent.glob('*.log')))}.log").open("w+")
        self.process = subprocess.Popen(
            [python, "-c", _SERVE, SUPPORT / "vllm_server.py", *_compiled_parts()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=model,
            env={**os.environ, **variables},
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task))
        self.process.stdin.close()
        self.process.stdin = None

    def result(self) -> Result:
        """Wait for the end of the server. Check that no request failed, and that each loaded chunk has bytes with which
        it was stored."""
        printed, _ = self.process.communicate()
        self._log.seek(0)
        log = self._log.read()
        self._log.close()
        assert self.process.returncode == 0, (printed + log)[-10000:]
        return Result(json.loads(printed.splitlines()[-1]), log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class Result:
    """The results of a server. `cached`: by run, the cached tokens of each prompt. `outputs`: of each prompt, equal in
    all runs."""

    def __init__(self, printed: dict[str, Any], log: str) -> None:
        self.cached = [[cached for cached, _ in run] for run in printed["runs"]]
        outputs = [[output for _, output in run] for run in printed["runs"]]
        assert all(output == outputs[0] for output in outputs), "a cache changed the output"
        self.outputs = outputs[0]
        self.metrics: dict[str, float] = printed["metrics"]
        self.stored, self.given = (printed[name][0] if printed[name] else {} for name in ("stored", "given"))
        self.log = log


@contextlib.contextmanager
def repeated(fault: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Call `fault` in a thread again and again, with a pause after each call, until the block ends."""
    ended = threading.Event()

    def apply() -> None:
        while not ended.is_set():
            fault()
            ended.wait(pause_s)

    thread = threading.Thread(target=apply)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
