"""Two servers of vLLM, of the releases 0.32 and 0.33, on separate nodes with a shared directory."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import __version__

from vllm_nodes import CACHED, CHUNK_TOKENS, Node, Result, environment_of, repeated, write_model

HERE = Path(sys.executable)
IS_NEWER = __version__.startswith("0.33")
OTHER = environment_of("vllm-0.32" if IS_NEWER else "vllm-0.33")

pytestmark = [
    pytest.mark.timeout(2400),  # a start of vLLM takes minutes on a busy machine
    pytest.mark.skipif(OTHER is None, reason="the environment of the other release is not made"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(HERE, tmp_path_factory.mktemp("nodes") / "models" / "x")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def files_of(shared: Path) -> list[Path]:
    """The files of pages in the directory."""
    return [path for path in shared.rglob("*") if path.is_file() and len(path.name) == 64]


def disk(tmp_path: Path, name: str, shared: Path) -> dict[str, object]:
    return {"path": str(tmp_path / name), "remote": {"url": f"dir://{shared}", "backup": "all"}}


def test_a_prompt_of_one_release_is_loaded_by_the_other(model: Path, tmp_path: Path, shared: Path) -> None:
    """A server of the other release loads the prompt from a copy of the weights at another path. By vLLM's own count
    the tokens of the prompt are cached, and the output is the same. Afterwards the disk of the second node has the
    chunks. Servers with `HiCacheConnector` share chunks with each other, but not with a tier of vLLM's own spec, which
    does not know all settings of the model."""
    assert OTHER is not None
    other_model = tmp_path / "data" / "x"
    shutil.copytree(model, other_model)
    first = Node(OTHER, model, disk(tmp_path, "a", shared), ["run each", "copy"], is_patient=True).result()
    assert first.cached == [[0, 0]]
    assert len(files_of(shared)) == 2 * CACHED // CHUNK_TOKENS
    second = Node(HERE, other_model, disk(tmp_path, "b", shared), ["run each"], is_patient=True).result()
    assert second.cached == [[CACHED, CACHED]] and second.outputs == first.outputs
    assert_bytes(second, first)
    connector = {"connector": "HiCacheConnector", "is_patient": True}
    third = Node(HERE, other_model, disk(tmp_path, "c", shared), ["run each", "copy"], **connector).result()
    assert third.cached == first.cached and third.outputs == first.outputs
    fourth = Node(OTHER, model, disk(tmp_path, "d", shared), ["run each"], **connector).result()
    assert fourth.cached == second.cached and fourth.outputs == first.outputs


if IS_NEWER:  # CI tests each pair of servers once; under 0.32 it runs `test_two_servers`
    pytest.mark.smoke(test_a_prompt_of_one_release_is_loaded_by_the_other)


def assert_bytes(read: Result, written: Result) -> None:
    """Check that each chunk was loaded with bytes that a node stored."""
    stored = {key: {*written.stored.get(key, ()), *read.stored.get(key, ())} for key in read.given}
    assert read.given and all({*sums} <= stored[key] for key, sums in read.given.items())


def flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xff" * 64)


FAULTS: dict[str, Callable[[Path], object]] = {"wrong bytes": flip, "lost pages": Path.unlink}


def spoil_one(fault: Callable[[Path], object], shared: Path, rng: random.Random) -> None:
    """Apply a fault to a file of the shared directory."""
    files = files_of(shared)
    with contextlib.suppress(FileNotFoundError):
        if files:
            fault(rng.choice(files))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_directory_change_no_token(model: Path, tmp_path: Path, shared: Path, fault: str) -> None:
    """While two servers store and load, pages of the directory get wrong bytes or vanish. No output token changes."""
    assert OTHER is not None
    steps = ["run each", *["reset", "run each"] * 3]
    first = Node(OTHER, model, disk(tmp_path, "a", shared), ["run each"]).result()
    with repeated(partial(spoil_one, FAULTS[fault], shared, random.Random(1)), pause_s=0.05):
        remote_only = {key: value for key, value in disk(tmp_path, "b", shared).items() if key != "path"}
        second = Node(HERE, model, remote_only, steps)
        third = Node(OTHER, model, disk(tmp_path, "c", shared), steps)
        results = [second.result(), third.result()]
    assert all(result.outputs == first.outputs for result in results)


@pytest.mark.skipif(not __version__.startswith("0.32"), reason="workers need the compiled parts of their vLLM")
def test_nodes_with_two_ranks_share_pages(model: Path, tmp_path: Path, shared: Path) -> None:
    """The scheduler looks up each chunk once for both workers. A node with one worker has rows of another layout and
    finds no page."""
    ranks = {"llm": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}
    first = Node(HERE, model, disk(tmp_path, "a", shared), ["run each", "copy"], is_patient=True, **ranks).result()
    assert len(files_of(shared)) == 2 * CACHED // CHUNK_TOKENS
    second = Node(HERE, model, disk(tmp_path, "b", shared), ["run each"], is_patient=True, **ranks).result()
    assert second.cached == [[CACHED, CACHED]] and second.outputs == first.outputs
    alone = Node(HERE, model, disk(tmp_path, "c", shared), ["run each"], is_patient=True).result()
    assert alone.cached == [[0, 0]]


def test_a_node_that_is_killed_while_it_writes_leaves_complete_pages(model: Path, tmp_path: Path, shared: Path) -> None:
    assert OTHER is not None
    killed = Node(OTHER, model, disk(tmp_path, "a", shared), ["run each", *["reset", "run each"] * 20], prompts=20)
    while not files_of(shared):
        assert killed.process.poll() is None
        time.sleep(0.01)
    killed.kill()
    first = Node(OTHER, model, {"path": str(tmp_path / "c")}, ["run each"]).result()
    second = Node(HERE, model, disk(tmp_path, "b", shared), ["run each"]).result()
    assert second.outputs == first.outputs
