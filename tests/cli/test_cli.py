"""`hicache demo` as a user meets it, and what every command does without the packages of the extras."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.cli import main
from hicache.storage import store_at
from storage_pages import open_store, put_numbers

SMALL = ["--documents", "4", "--turns", "2", "--document-tokens", "600", "--chunk", "256", "--max-new-tokens", "4"]
SMALL += ["--model", "random"]


def _demo(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Run a small demo that must succeed; returns its results."""
    out = tmp_path / "out.json"
    assert main(["demo", *SMALL, "--json", str(out), *flags]) == 0
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def test_a_second_demo_finds_the_first_ones_pages(tmp_path: Path) -> None:
    """A demo is identical, hits every tier, accounts for every prompt token and writes every figure promised. With
    --disk, a second run finds all first turns on disk and verifies them."""
    store = str(tmp_path / "store")
    first = _demo(tmp_path, "--disk", store)
    assert first["identical"] is True and first["compared_with_recompute"] is True
    assert first["requests"] == 8 == len(first["turns"])
    assert set(first["hit_tokens"]) == {"device", "host", "disk"}
    assert all(tokens > 0 for tokens in first["hit_tokens"].values()), first["hit_tokens"]
    assert sum(first["hit_tokens"].values()) + first["computed_tokens"] == first["prompt_tokens"]
    assert set(first["ttft_ms"]) == {"cached", "recompute"} and min(first["ttft_ms"].values()) > 0
    assert set(first["bytes_moved"]) == {"device_to_host", "host_to_device", "host_to_disk", "disk_to_host"}
    assert all(size > 0 for size in first["bytes_moved"].values())
    assert first["device"] == "cpu" and first["seconds"] > 0
    assert first["pages"]["mismatched"] == 0 and first["pages"]["compared"] > 0
    assert all(len(turn["tokens"]) == 4 for turn in first["turns"])
    sizes = first["sizes"]  # none of the upper two holds the working set
    assert 2 * sizes["device_tokens"] < sizes["working_set_tokens"] > sizes["host_tokens"]
    second = _demo(tmp_path, "--disk", store)
    assert first["first_turns"]["hit_tokens"]["disk"] == 0
    assert all(turn["hit_tokens"]["disk"] > 0 for turn in second["turns"] if turn["turn"] == 1)
    assert second["identical"] and second["pages"]["unrecorded"] == 0 < second["pages"]["compared"]
    assert [turn["tokens"] for turn in first["turns"]] == [turn["tokens"] for turn in second["turns"]]


def test_flags_go_before_the_sizes_that_the_demo_chooses(tmp_path: Path) -> None:
    """--host-bytes replaces the demo's host_bytes; settings of the disk apply to the demo's own store; without a host
    tier it keeps no store of its own. Without a baseline no comparison is claimed."""
    results = _demo(tmp_path, "--no-baseline", "--host-bytes", "auto", "--disk-level", "0", "--dtype", "auto")
    sizes = results["sizes"]
    assert sizes["device_tokens"] < sizes["host_tokens"] <= 2 * sizes["device_tokens"] + 64
    assert results["bytes_moved"]["host_to_disk"] > 0
    assert results["compared_with_recompute"] is False and results["ttft_ms"]["recompute"] is None
    results = _demo(tmp_path, "--no-baseline", "--host-bytes", "0")
    assert results["sizes"]["host_tokens"] == 0 == results["bytes_moved"]["host_to_disk"]


# In an interpreter of its own: what the extras bring is not there.
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
for name in "transformers fastapi starlette pydantic uvicorn h11 prometheus_client openai jinja2 matplotlib".split():
    sys.modules[name] = None
from hicache.cli import main

def call(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as left:
            status = left.code or 0
    return status, out.getvalue(), err.getvalue(), "torch" in sys.modules

print(json.dumps([call(*line) for line in json.loads(sys.argv[1])]))
"""
STORE_VERBS = ("stat", "ls", "verify", "compact", "evict", "prune", "serve")
HELP = [[], *([name] for name in ("demo", "serve", "chat", "plan", "top", "store", "replay", "bench", "config"))]


def test_what_works_without_the_extras(tmp_path: Path) -> None:
    """Without the packages of all extras every --help, `top`, `plan` of a known model, `replay` and `store` work; what
    needs a package names its extra in one line. Those about a store or a server load no torch, which takes seconds."""
    store = open_store(tmp_path / "store")
    put_numbers(store, range(2))
    store.close()
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 2)

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"time_s": 1.0, "figures": {"requests.running": 3, "requests.waiting": 4}}')

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        helps = [[*name, "--help"] for name in [*HELP, *(["store", verb] for verb in STORE_VERBS)]]
        light = {
            "hicache 0.": ["--version"],
            "running 3": ["top", "--once", f"127.0.0.1:{server.server_port}"],
            "identity.": ["store", "stat", str(tmp_path / "store")],
            "2 pages": ["store", "verify", str(tmp_path / "store")],
        }
        works = {
            "--device-tokens": ["plan", "--model", "llama-3.1-8b", "--gpu", "h100"],
            "unlimited": ["replay", str(trace), "--processes", "1"],
        }
        needs = {
            "serve": [["demo"], ["serve"], ["plan", "--gpu", "h100", "--model", str(tmp_path)]],
            "chat": [["chat"]],
            "replay": [["replay", str(trace), "--plot", str(tmp_path / "rates.svg")]],
        }
        lines = [*light.values(), *helps, *works.values(), *(line for group in needs.values() for line in group)]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(lines)], stdout=subprocess.PIPE, text=True, check=True
        )
        server.shutdown()
    results = iter(json.loads(done.stdout))
    for words, line in light.items():
        status, out, err, has_torch = next(results)
        assert (status, err, has_torch) == (0, "", False) and words in out, line
    for line in helps:
        status, out, err, _ = next(results)
        assert (status, err) == (0, "") and " ".join(["usage: hicache", *line[:-1]]) in out, line
    for words, line in works.items():
        status, out, err, _ = next(results)
        assert (status, err) == (0, "") and words in out, line
    for extra, group in needs.items():
        for line in group:
            status, out, err, _ = next(results)
            assert (status, out, len(err.splitlines())) == (2, "", 1) and f"hicache[{extra}]" in err, line


@pytest.mark.long
@pytest.mark.timeout(1800)  # it waits for nothing but the processor, whoever else has it
def test_the_default_demo(tmp_path: Path) -> None:
    """The demo of the random model is identical and hits all tiers. How much sooner it is, `bench` measures."""
    out = tmp_path / "out.json"
    assert main(["demo", "--model", "random", "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["identical"] is True and all(results["hit_tokens"].values())


@pytest.mark.gpu
def test_the_demo_on_a_gpu(tmp_path: Path) -> None:
    """On CUDA the same demo is identical, hits all tiers, and a store filled there serves a second run."""
    flags = ["--device", "cuda", "--disk", str(tmp_path / "store")]
    first, second = _demo(tmp_path, *flags), _demo(tmp_path, *flags)
    for results in (first, second):
        assert results["identical"] is True and results["device"] == torch.cuda.get_device_name()
    assert all(first["hit_tokens"].values())
    assert second["first_turns"]["hit_tokens"]["disk"] > 0
    assert os.path.getsize(store_at(tmp_path / "store") / "index.mdb") > 0
