"""The demo in two processes over one Redis: the second hits what the first computed, and both yield the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import redis_server

pytestmark = [pytest.mark.remote, pytest.mark.skipif(redis_server.MISSING != "", reason=redis_server.MISSING)]

DEMO = ("-m", "hicache.cli", "demo", "--documents", "2", "--document-tokens", "512", "--turns", "2")


def test_the_second_demo_hits_what_the_first_computed(tmp_path: Path) -> None:
    reports = []
    with redis_server.running() as server:
        for number in range(2):
            report = tmp_path / f"{number}.json"
            command = [sys.executable, *DEMO, "--remote", f"{server.url}?timeout=60", "--json", str(report)]
            subprocess.run(command, check=True, capture_output=True)
            reports.append(json.loads(report.read_text()))
    first, second = reports
    assert first["first_turns"]["hit_tokens"]["remote"] == 0 < second["first_turns"]["hit_tokens"]["remote"]
    assert second["identical"] and [turn["tokens"] for turn in second["turns"]] == [
        turn["tokens"] for turn in first["turns"]
    ]
