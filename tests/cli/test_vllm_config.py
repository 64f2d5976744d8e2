"""`hicache vllm-config`: JSON that the plug-in accepts, and one line for each wrong flag."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from cli_case import outcome, refused
from hicache.integrations.vllm.offloading_settings import offloading_settings


def test_the_plug_in_accepts_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is one line of JSON, also for a path with a colon. The sizes are those of the flags."""
    flags = ["--cpu", "1MiB", "--disk", "/nvme/a:b:500GB", "--salt", "t", "--chunk-blocks", "4"]
    status, out, _ = outcome(capsys, "vllm-config", *flags)
    assert status == 0 and out.count("\n") == 1
    config = json.loads(out)
    assert config["kv_connector"] == "HiCacheConnector" and config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_module_path"] == "hicache.integrations.vllm"
    extra = config["kv_connector_extra_config"]
    assert "spec_name" not in extra and extra["blocks_per_chunk"] == 4
    settings = offloading_settings(extra)
    assert settings.cpu_bytes_to_use == 1 << 20
    assert settings.disk is not None
    assert settings.disk.path == "/nvme/a:b" and settings.disk.budget == 500 * 10**9 and settings.disk.salt == "t"


def test_without_a_disk_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(outcome(capsys, "vllm-config", "--cpu", "1MiB")[1])
    assert offloading_settings(config["kv_connector_extra_config"]).disk is None


def test_the_spec_is_named_under_the_connector_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(outcome(capsys, "vllm-config", "--cpu", "1MiB", "--plugin", "spec")[1])
    assert config["kv_connector"] == "OffloadingConnector" and "kv_connector_module_path" not in config
    extra = config["kv_connector_extra_config"]
    assert extra["spec_name"] == "HiCacheOffloadingSpec"
    assert extra["spec_module_path"] == "hicache.integrations.vllm"
    assert offloading_settings(extra).cpu_bytes_to_use == 1 << 20


def test_sizes_that_exceed_the_machine_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """If a size exceeds the free memory or the disk of this machine, or the key file is missing, a note says so. The
    JSON is still printed, because the server may run on another machine."""
    flags = ["--disk", f"{tmp_path}/not/made/yet:60TB", "--chunk-blocks", "1", "--key-file", str(tmp_path / "key")]
    status, out, err = outcome(capsys, "vllm-config", "--cpu", "900TB", *flags)
    assert status == 0 and json.loads(out)
    _, memory, key, space = err.splitlines()
    assert "of free memory and" in memory and "in /dev/shm: choose a smaller --cpu" in memory
    assert f"{tmp_path / 'key'} is not on this machine" in key
    assert f"{tmp_path} of this machine has" in space and "60TB" in space


def test_a_small_shared_memory_is_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If /dev/shm is smaller than the CPU tier and the memory is not, a note says how to enlarge it."""
    monkeypatch.setattr("hicache.integrations.vllm.transfer_config.shared_bytes", lambda: 1 << 20)
    _, note = outcome(capsys, "vllm-config", "--cpu", "3MB", "--chunk-blocks", "1")[2].splitlines()
    assert "/dev/shm of this machine has 1.0 MiB free" in note and "remount,size=1G " in note


def test_free_memory_and_loads_without_comparison_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cpu", "free", "--disk", "/nvme:100MB", "--always-load"]
    extra = json.loads(outcome(capsys, "vllm-config", *flags)[1])["kv_connector_extra_config"]
    settings = offloading_settings(extra)
    assert settings.cpu_bytes_to_use == "free"
    assert settings.disk is not None and settings.disk.prefill_tokens_per_s == 0


def test_notes_say_the_memory_and_what_small_chunks_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """The store process needs memory if there is a disk. Chunks of one block are noted unless they were asked for."""

    def notes(*flags: str) -> list[str]:
        return outcome(capsys, "vllm-config", "--cpu", "1MiB", *flags)[2].splitlines()

    (memory,) = notes("--chunk-blocks", "1")
    assert "1.0 MiB" in memory and "/dev/shm" in memory and "store process" not in memory
    memory, chunks = notes("--disk", "/:64MB")
    assert "store process" in memory and "a quarter as many chunks" in chunks
    _, packing = notes("--chunk-blocks", "3")
    assert "chunks of 3 blocks are not packed" in packing and "choose 1, 2, 4 or 8" in packing
    _, hits = notes("--chunk-blocks", "4", "--plugin", "spec")
    assert "adds no hits unless it is larger than the GPU cache" in hits


def test_a_disk_that_this_machine_lacks_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A directory that is missing below the root disk, which a forgotten mount would cause, a budget of less than a
    page, and a socket at which nothing listens have a note."""

    def notes(disk: str) -> list[str]:
        status, out, err = outcome(capsys, "vllm-config", "--cpu", "1MiB", "--chunk-blocks", "1", "--disk", disk)
        assert status == 0 and json.loads(out)
        return err.splitlines()[1:]

    (missing,) = notes("/none-of-this-name:64MB")
    assert "/none-of-this-name does not exist on this machine" in missing and "/ of this machine has " in missing
    (small,) = notes("/:5MB")
    assert "a budget of 5MB is less than a page of common models" in small
    path = tmp_path / "s"
    (unserved,) = notes(f"unix:{path}")
    assert f"nothing serves a store at {path} on this machine" in unserved
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as served:
        served.bind(str(path))
        served.listen()
        assert notes(f"unix:{path}") == []


def test_the_socket_of_a_served_directory_is_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(outcome(capsys, "vllm-config", "--cpu", "1MiB", "--disk", "unix:/run/pages.sock")[1])
    disk = offloading_settings(config["kv_connector_extra_config"]).disk
    assert disk is not None and disk.is_served and disk.path == "unix:/run/pages.sock"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--cpu"),
        (["--cpu", "lots"], "'lots' is not a size"),
        (["--cpu", "1KB"], "--cpu '1KB' is below the minimum of 4.0 KiB"),
        (["--cpu", "-5GB"], "--cpu '-5GB' is below the minimum of 4.0 KiB"),
        (["--cpu", "64"], "--cpu 64 means 64 bytes; add a unit, like 64GB"),
        (["--cpu", "0"], "--cpu '0' is below the minimum of 4.0 KiB (total CPU memory of all workers, like 64GB;"),
        (["--cpu", "0GB"], "--cpu '0GB' is below the minimum"),
        (["--cpu", "1GB", "--disk", "/nvme:500"], "--disk 500 means 500 bytes; add a unit"),
        (["--cpu", "1GB", "--disk", "/nvme"], "like /nvme:500GB"),
        (["--cpu", "1GB", "--disk", "nvme:500GB"], "like /nvme:500GB"),
        (["--cpu", "1GB", "--disk", "/nvme:big"], "'big' is not a size"),
        (["--cpu", "1GB", "--disk", "/nvme:1KB"], "--disk '1KB' is below the minimum of 1.0 MiB"),
        (["--cpu", "1GB", "--disk", "/nvme:4000TB"], "--disk '4000TB' is above the maximum of 64.0 TiB"),
        (["--cpu", "1GB", "--salt", "t"], "--salt applies to the disk"),
        (["--cpu", "1GB", "--key-file", "/key"], "--key-file applies to the disk"),
        (["--cpu", "1GB", "--always-load"], "--always-load applies to the disk"),
        (["--cpu", "1GB", "--chunk-blocks", "0"], "--chunk-blocks"),
        (["--cpu", "1GB", "--dsik", "/nvme:1GB"], "--disk is one"),
    ],
)
def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    assert named in refused(capsys, "vllm-config", *flags)
