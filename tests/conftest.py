"""Fixtures of all tests. Without a GPU, kernels run in Triton's interpreter, and GPU tests are left out."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# Triton reads this variable once, when it is imported; importing hicache imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hicache.build.store_tiers
import hicache.integrations.server_store
import hicache.storage.process.client
import programs
from hicache import RemoteConfig
from hicache.storage.process.health import LIMITS
from hicache.storage.process.settings import ServiceSettings
from hicache.stores.tier import open_tier
from patient_stores import patient_remote
from waiting import BOUND_S

# Tests are many and small. Threads of torch that wait for each other cost more time than they save, most of all on busy
# cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
# The programs that tests start can import the same modules as the tests.
SUPPORT = Path(__file__).parent / "support"
os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])

HAS_CUDA = torch.cuda.is_available()
_MAX_KEPT_BYTES = 1 << 30  # device memory that a worker may keep between two tests

# The default run has the same examples each time, so its result is reproducible. `make test-all` draws new examples,
# ten times the number.
_all = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", max_examples=15, derandomize=True, **_all)
settings.register_profile("unshrunk", settings.get_profile("quick"), phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.register_profile("thorough", max_examples=150, derandomize=False, print_blob=True, **_all)
settings.load_profile(os.environ.get("HICACHE_TEST_PROFILE", "quick"))


pytest_plugins = ["forked_workers"]


def pytest_configure(config: pytest.Config) -> None:
    """Set the folder of the fork servers (programs.py) that the workers of this run share. The name of the folder has
    the pid of the process that owns the run."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-tests-"), str(os.getpid()))
    folder.mkdir()
    os.environ[programs.ADDRESS] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(folder.parent))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not HAS_CUDA:
        here = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = here


def pytest_collection_finish() -> None:
    """Exclude the imported libraries from garbage collection, and collect other objects less often. Both measures save
    a fifth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that are left at the exit


@pytest.fixture(autouse=True)
def stores_in_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run stores in threads of the test's process, with the same frames, because starting an interpreter for each store
    would take minutes. Tests marked `store_process`, and programs that tests start, have stores in processes."""
    if request.node.get_closest_marker("store_process") is None:
        in_process = {"in_process": True}
        for module in (hicache.build.store_tiers, hicache.integrations.server_store):
            monkeypatch.setattr(
                module, "open_tier", lambda requested, **arguments: open_tier(requested, **arguments | in_process)
            )


@pytest.fixture(autouse=True)
def patience_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may wait seconds for a processor. A store is therefore not declared lost for its
    silence, unless a test changes the time or the class that measure the silence. A remote store that a test passes as
    an object has the I/O timeout of a disk. No call of another remote store times out."""
    monkeypatch.setattr(hicache.storage.process.client, "_MIN_SILENCE_S", BOUND_S)
    remote = functools.partial(RemoteConfig, io_timeout_s=LIMITS.io_timeout_s)
    monkeypatch.setattr(hicache.build.store_tiers, "RemoteConfig", remote)
    monkeypatch.setattr(ServiceSettings, "of_remote", staticmethod(patient_remote))


@pytest.fixture(autouse=True)
def device_memory_of_others() -> Iterator[None]:
    """Free the device memory of a large test after it, because workers share the device, and torch keeps freed
    memory."""
    yield
    if HAS_CUDA and torch.cuda.memory_reserved() > _MAX_KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_CUDA else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device on which tensors may be."""
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_CUDA else ["cpu"])
def triton_device(request: pytest.FixtureRequest) -> str:
    """The device whose tensors Triton's kernels accept. On a machine with a GPU, Triton's interpreter is off."""
    return str(request.param)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation of the kernels; pools and allocators that the test builds use it too.

    On the CPU Triton needs its interpreter, which is off on a machine with a GPU.
    """
    on_cpu = "device" not in request.fixturenames or request.getfixturevalue("device") == "cpu"
    if request.param == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton runs on the GPU here")
    monkeypatch.setenv("HICACHE_KERNELS", request.param)
    return str(request.param)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, small enough for a test to fill."""
    with _mounted(tmp_path, "tmpfs", "-o", "size=8m"):
        yield tmp_path


@pytest.fixture(params=["holes", "no holes"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system whose files can have holes, and one whose files cannot."""
    with contextlib.nullcontext() if request.param == "holes" else _mounted(tmp_path, "ramfs"):
        yield tmp_path


@contextlib.contextmanager
def _mounted(path: Path, kind: str, *options: str) -> Iterator[None]:
    try:
        command = ["mount", "-t", kind, *options, kind, str(path)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system needs root")
    yield
    subprocess.run(["umount", "-l", str(path)], check=True)
