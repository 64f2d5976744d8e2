"""Models that are named as in a hub. Here the hub is a server on this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="no huggingface_hub here, of the extra 'serve'")

REVISION = "0123456789abcdef0123456789abcdef01234567"
TAKEN = {"config.json": b"{}", "model.safetensors": b"weights" * 300, "tokenizer.json": b'{"a": 1}'}
TAKEN["tokenizer_config.json"] = b"{}"
SHARDS = {f"model-{i}.safetensors": b"weights" for i in range(2)}
INDEX = json.dumps({"weight_map": {f"weight{i}": shard for i, shard in enumerate(SHARDS)}}).encode()
PARTED = {**{name: text for name, text in TAKEN.items() if "weights" not in str(text)}, **SHARDS}
PARTED["model.safetensors.index.json"] = INDEX
LEFT = {"pytorch_model.bin": b"a pickle", "modeling.py": b"print('code')"}
HUB = {"tiny/model": {**TAKEN, **LEFT}, "tiny/parted": PARTED, "tiny/pickled": {"config.json": b"{}", **LEFT}}
CHOOSE = """
import argparse, sys
from hicache.serving.packaged_model import choose_model, model_flag
for name in sys.argv[1:]:
    try:
        choice = choose_model(model_flag(name), print)
        print(choice.path, choice.name)
    except argparse.ArgumentTypeError as error:
        print("refused:", error)
assert "torch" not in sys.modules
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that answers as the real one does for models whose files are not in large-file storage."""

    def do_GET(self) -> None:
        name, _, what = self.path.removeprefix("/api/models").strip("/").partition("/revision/")
        name, _, _ = name.partition("/tree/")
        if self.path.startswith("/api/"):
            files = HUB.get(name)
            if files is None:
                self._answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
            elif what:
                self._answer(200, json.dumps({"id": name, "sha": REVISION, "siblings": []}).encode())
            else:
                tree = [{"type": "file", "path": file, "size": len(text), "oid": file} for file, text in files.items()]
                self._answer(200, json.dumps(tree).encode())
            return
        name, _, file = self.path.strip("/").partition(f"/resolve/{REVISION}/")
        self._answer(200, HUB[name][file], **{"X-Repo-Commit": REVISION, "ETag": f'"{file}"'})

    do_HEAD = do_GET

    def _answer(self, status: int, text: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def chosen(endpoint: str, home: Path, *names: str) -> list[str]:
    """The model that is chosen for each name. A separate interpreter chooses the models, because the hub's address is
    read once. This interpreter must not import torch."""
    kept: Mapping[str, str] = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", CHOOSE, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_of_the_hub_is_taken(tmp_path: Path) -> None:
    """Configuration, tokenizer and safetensors are downloaded to the cache; pickle files and code are not downloaded. A
    cached model is used without the hub. A model that the hub lacks is one error line."""
    with hub() as endpoint:
        printed, reported, again, missing, pickled = chosen(
            endpoint, tmp_path, "tiny/model", "tiny/model", "tiny/missing", "tiny/pickled"
        )
    assert "tiny/model" in printed and again == reported
    path, name = reported.split()
    assert name == "tiny/model"
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == TAKEN
    assert missing.startswith("refused: ") and "tiny/missing" in missing
    assert "no weights of it in safetensors" in pickled
    again, missing = chosen(endpoint, tmp_path, "tiny/model", "tiny/missing")
    assert again == reported, "the hub is gone, the cache is there"
    assert "the hub cannot be reached: " in missing and "hf download tiny/missing --local-dir" in missing


def test_what_another_program_left_in_the_cache_is_completed(tmp_path: Path) -> None:
    """A snapshot without all its files is no model: the missing files are downloaded from the hub, or the error says
    that no hub answers. A complete snapshot needs no hub."""
    models, cache = ("tiny/model", "tiny/parted"), tmp_path / "hub"
    with hub() as endpoint:
        chosen(endpoint, tmp_path, *models)
    broken = []
    for name in models:
        complete = cache / f"models--{name.replace('/', '--')}"
        shutil.rmtree(
            complete / "trees", ignore_errors=True
        )  # earlier versions of the hub's tools write no such listing
        for file in (complete / "snapshots" / REVISION).iterdir():
            broken.append(f"{name}-without-{file.name}")
            copy = cache / f"models--{broken[-1].replace('/', '--')}"
            shutil.copytree(complete, copy, symlinks=True)
            (copy / "snapshots" / REVISION / file.name).unlink()
    refused = chosen("http://127.0.0.1:1", tmp_path, *models, *broken)
    assert [line.split()[-1] for line in refused[: len(models)]] == [*models]
    assert all("the hub cannot be reached" in line for line in refused[len(models) :]) and len(broken) == 10, refused
    (cache / "models--tiny--parted" / "snapshots" / REVISION / "model-1.safetensors").unlink()
    with hub() as endpoint:
        printed, reported = chosen(endpoint, tmp_path, "tiny/parted")
    assert printed.startswith("downloading tiny/parted from the hub")
    assert {file.name for file in Path(reported.split()[0]).iterdir()} == {*PARTED}
