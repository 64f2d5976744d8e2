"""The installed package: what vLLM does with it in each of its processes without any setting."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hicache.errors import ConfigError
from hicache.integrations.vllm.features import PLUG_INS

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "hicache",
    "kernels",
    "storage",
    "bench",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
)
LOADED = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import hicache
print(hicache.__file__)
"""
LOGGED = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from hicache.integrations.vllm import HiCacheTier
from hicache.flow import cost
cost.log.info("a line of %s", "hicache")
cost.log.debug("a line for developers")
"""


def test_lines_of_hicache_are_in_the_log_of_vllm(tmp_path: Path) -> None:
    """Lines of hicache are in vLLM's log, with vLLM's format and log level, each line once."""
    ran = subprocess.run([sys.executable, "-c", LOGGED], cwd=tmp_path, capture_output=True, text=True, check=True)
    [line] = [line for line in (ran.stdout + ran.stderr).splitlines() if "a line" in line]
    assert " INFO " in line and line.endswith("a line of hicache")


def test_vllm_removes_what_a_killed_server_left(tmp_path: Path) -> None:
    """The installed package is a general plug-in of vLLM. The plug-in removes the file of a memory region that no
    process has open."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend of pyproject.toml is not installed")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    left = Path(f"/dev/shm/vllm_offload_{uuid.uuid4()}.mmap")
    left.write_bytes(bytes(4096))
    try:
        loaded = subprocess.run(
            [sys.executable, "-c", LOADED], env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        assert loaded.stdout.splitlines()[-1].startswith(str(site)) and not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_every_plug_in_has_probes_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM lacks a name that the connector uses, the connector is refused, and the error has this name. The
    secondary tier still loads."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    from hicache.integrations import vllm as plug_ins
    from hicache.integrations.vllm.release import load_plug_in

    assert {*plug_ins.__all__} == {*PLUG_INS}
    loaded = {name: getattr(plug_ins, name) for name in PLUG_INS}
    monkeypatch.delattr(FreeKVCacheBlockQueue, "iter_blocks_after")
    for name in PLUG_INS:
        if name == "HiCacheConnector":
            with pytest.raises(ConfigError, match=r"FreeKVCacheBlockQueue has no iter_blocks_after"):
                load_plug_in(name, loaded.__getitem__)
        else:
            assert load_plug_in(name, loaded.__getitem__) is loaded[name]


def test_a_method_that_vllm_calls_with_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from hicache.integrations.vllm import HiCacheTier
    from hicache.integrations.vllm.release import load_plug_in

    monkeypatch.setattr(SecondaryTierManager, "touch", lambda self, keys, req_context, rank: None)
    with pytest.raises(ConfigError, match=r"HiCacheTier\.touch does not match .*SecondaryTierManager: rank"):
        load_plug_in("HiCacheTier", lambda _: HiCacheTier)
