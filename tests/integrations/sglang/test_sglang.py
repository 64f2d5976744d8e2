"""A real SGLang on the CPU, with a tiny model, over hicache's disk."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sglang_server
from hicache.bench.servers import sglang
from hicache.bench.servers.runs import Setting

pytestmark = pytest.mark.timeout(2400)  # a start of SGLang takes a minute on a busy machine

SUPPORT = Path(sglang_server.__file__).parent
PROMPTS = [random.Random(number).choices(range(10, 250), k=1027) for number in range(3)]
ARGUMENTS = argparse.Namespace(model="", device=torch.device("cpu"), small=True, layers=0, write_policy="write_back")


def served(folder: Path, mode: str) -> tuple[list[int], list[list[int]]]:
    """Cached tokens and answers of a process that gets each prompt twice."""
    setting = Setting("sglang", mode, "", "", clients=1, cpu_gib=1 / 64, gpu_tokens=4096, files="", variant="")
    given = sglang.task(setting, ARGUMENTS, 1764, folder, {}) | {"prompts": PROMPTS}
    if mode != "none":
        given["engine"]["hicache_write_policy"] = "write_through"
    path = os.pathsep.join([str(SUPPORT / "sglang_site"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **given["environment"], "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, sglang_server.__file__],
        input=json.dumps(given),
        env=environment | {"SGLANG_USE_CPU_ENGINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return [cached for cached, _ in found], [answer for _, answer in found]


def test_after_a_restart_all_that_was_stored_comes_from_the_disk(tmp_path: Path) -> None:
    """Three processes run: without HiCache, with hicache's disk, and with the same disk again. Each gets the prompts
    twice, and all answers are equal, whether tokens were computed, on the device, or loaded. In the third process all
    complete pages are cached from the first request on."""
    cached, answers = served(tmp_path, "none")
    assert cached == [0, 1024] * 3 and len({*map(tuple, answers)}) > 1
    for expected in (0, 1024):
        cached, loaded = served(tmp_path, "hicache")
        assert cached == [expected, 1024] * 3 and loaded == answers
