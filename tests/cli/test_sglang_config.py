"""`hicache sglang-config`: JSON that the backend accepts, and one line for each wrong flag."""

from __future__ import annotations

import json

import pytest

from cli_case import outcome, refused
from hicache.integrations.server_store import server_store_config

LOADER_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}


@pytest.mark.parametrize(
    ("disk", "path", "budget"),
    [("/nvme/a:b:500GB", "/nvme/a:b", 500 * 10**9), ("unix:/run/pages.sock", "unix:/run/pages.sock", 8 << 30)],
)
def test_the_backend_accepts_what_is_printed(
    capsys: pytest.CaptureFixture[str], disk: str, path: str, budget: int
) -> None:
    """One line of JSON that names the backend; the other keys are settings of the disk. A note says the memory. The
    store process of a served directory runs elsewhere."""
    status, out, err = outcome(capsys, "sglang-config", "--disk", disk, "--salt", "t")
    assert status == 0 and out.count("\n") == 1
    assert "hicache: note: memory" in err and ("store process" in err) == disk.startswith("/")
    assert ("nothing serves a store at /run/pages.sock" in err) == disk.startswith("unix:")
    assert ("/nvme/a:b does not exist on this machine" in err) == disk.startswith("/")
    given = json.loads(out)
    assert given["module_path"] == "hicache.integrations.sglang.storage" and given["class_name"] == "HiCacheDisk"
    config = server_store_config({key: value for key, value in given.items() if key not in LOADER_KEYS}, "")
    assert config.path == path and config.budget == budget and config.salt == "t"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--disk"),
        (["--disk", "/nvme"], "like /nvme:500GB"),
        (["--disk", "/nvme:1KB"], "--disk '1KB' is below the minimum of 1.0 MiB"),
        (["--disk", "unix:pages.sock"], "unix:SOCKET"),
        (["--disk", "/nvme:1GB", "--cpu", "1GB"], "--cpu"),
    ],
)
def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    assert named in refused(capsys, "sglang-config", *flags)
