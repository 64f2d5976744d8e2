"""Every command without the packages of the extras."""

from __future__ import annotations

import argparse
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cli_case import outcome
from hicache.config import EngineConfig
from hicache.serving.server.flags import add_flags
from storage_pages import open_store, put_numbers

# A new interpreter in which the packages of the extras cannot be imported.
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
STORE_VERBS = ("stat", "ls", "verify", "compact", "evict", "prune", "copy", "rekey", "serve")
HELP = [
    [],
    *([name] for name in ("demo", "serve", "chat", "plan", "top", "store", "replay", "bench", "doctor", "config")),
]


def test_what_works_without_the_extras(tmp_path: Path) -> None:
    """Without the packages of all extras every --help, `top`, `plan` of a known model, `replay` and `store` work. A
    command that needs a package names its extra in one line. Commands about a store or a server do not import torch,
    which takes seconds."""
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
            """Log nothing."""

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


def test_short_and_complete_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`serve --help` lists 15 flags, `--help-all` all of them; both end with three examples, whose flags are valid."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    listed = {}
    for flag in ("--help", "--help-all"):
        _, out, err = outcome(capsys, "serve", flag)
        assert not err
        listed[flag] = {*re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)} - {"--help-all"}
        examples = re.findall(r"^  hicache serve (.+)$", out.partition("examples:\n")[2], re.MULTILINE)
        assert len(examples) == 3
        for example in examples:
            model, *flags = example.split()
            EngineConfig.from_flags(
                parser.parse_args(["--model", "random", *flags]), device_tokens=4096, model_id=model
            )
    declared = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert len(listed["--help"]) == 15 and listed["--help"] < listed["--help-all"] == declared
    assert "--config" in listed["--help"] and "--disk-level" not in listed["--help"]
    status, out, _ = outcome(capsys, "config", "--show", "--disk-path", "/x", "--disk-level", "7")
    assert status == 0 and "flag --disk-level" in out
