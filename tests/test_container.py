"""The image of the Dockerfile is built, run, probed, called, stopped and started again, without a network.

The base of the image uses this machine: /usr, the interpreter and its packages are mounted, so nothing is downloaded.
docs/deploying.md describes the base of a normal build.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import BOUND_S, eventually

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [path for path in sys.path if path.endswith("-packages")]
MOUNTED = ("/usr", "/etc/alternatives", sys.base_prefix, *PACKAGES)
ENVIRONMENT = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/usr/sbin", "PYTHONPATH": ":".join(PACKAGES)}
USERS = {"etc/passwd": "root:x:0:0::/:/bin/sh\n", "etc/group": "root:x:0:\n"}
OFFLINE = "[global]\nno-index = true\nno-build-isolation = false\n"
# Limits below the defaults of a container, because a sandbox may not grant the defaults.
LIMITS = ("--network", "none", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
SERVE = ("serve", "--model", "random", "--disk-path", "/data/pages", "--device-tokens", "4096", "--host-bytes", "8MiB")
ASK = """
import http.client, json
body = json.dumps({"prompt": "a long beginning " * 40, "max_tokens": 4})
connection = http.client.HTTPConnection("127.0.0.1", 8000)
connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
print(json.dumps(json.load(connection.getresponse())["usage"]["prompt_tokens_details"]["cached_tokens_details"]))
"""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("podman") is None, reason="no podman here: apt-get install podman runc"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here, which the image would download"),
]


class Podman:
    """Podman with its own images and containers, which are kept in `folder`. `run`: a folder with a path of at most 50
    characters."""

    def __init__(self, folder: Path, run: str) -> None:
        runtime = ("--runtime", "runc") if shutil.which("runc") else ()
        places = ("--root", folder / "root", "--runroot", run, "--cgroup-manager", "cgroupfs")
        self._command = ["podman", *map(str, places), *runtime]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)

    def __call__(self, *words: object) -> str:
        done = self.call(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def mounts(paths: dict[str, str]) -> list[str]:
    return [word for here, there in paths.items() for word in ("--volume", f"{here}:{there}:ro")]


MACHINE = mounts({path: path for path in MOUNTED})


def base_of(folder: Path) -> Path:
    """A base image with links into the mounted /usr, and with the files that are not in /usr."""
    with tarfile.open(folder / "base.tar", "w") as base:
        for name in ("bin", "sbin", "lib", "lib64"):
            base.add(f"/{name}", name, recursive=False)
        for name, text in USERS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            base.addfile(member, io.BytesIO(text.encode()))
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        base.addfile(temporary)
    return folder / "base.tar"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with the image `hicache`. Skips the tests if podman can run nothing, as in most sandboxes."""
    folder = tmp_path_factory.mktemp("podman")
    run = tempfile.mkdtemp()
    podman = Podman(folder, run)
    try:
        changes = [word for name, value in ENVIRONMENT.items() for word in ("--change", f"ENV {name}={value}")]
        podman("import", *changes, base_of(folder), "base")
        tried = podman.call("run", "--rm", *LIMITS, *MACHINE, "base", "/usr/bin/true")
        if tried.returncode:
            pytest.skip(f"podman runs nothing here: {tried.stderr.strip()[-300:]}")
        (folder / "pip.conf").write_text(OFFLINE)
        offline = ("--network", "none", *MACHINE, *mounts({str(folder / "pip.conf"): "/etc/pip.conf"}))
        podman("build", "--format", "docker", *offline, "--build-arg", "BASE=localhost/base", "--tag", "hicache", ROOT)
        yield podman
    finally:
        podman.call("rm", "--force", "--all", "--time", "0")
        podman.call("rmi", "--force", "--all")
        shutil.rmtree(run, ignore_errors=True)


def test_a_container_keeps_its_pages(podman: Podman) -> None:
    """The server does not run as root, is healthy when it serves, and ends with status 0 on SIGTERM although it is
    process 1. After a restart it finds the pages of its volume."""

    def asked() -> dict[str, Any]:
        return dict(json.loads(podman("exec", "server", "python3", "-c", ASK)))

    def wait_healthy() -> None:
        eventually(
            lambda: podman.call("healthcheck", "run", "server").returncode == 0, lambda: podman("logs", "server")
        )

    podman("run", "--detach", "--name", "server", *LIMITS, *MACHINE, "hicache", *SERVE)
    wait_healthy()
    assert podman("exec", "server", "id", "-u").strip() == "1000"
    assert asked()["device"] == 0 < asked()["device"]
    podman("stop", "--time", int(BOUND_S), "server")
    assert podman("inspect", "--format", "{{.State.ExitCode}}", "server").strip() == "0", podman("logs", "server")
    podman("start", "server")
    wait_healthy()
    assert asked()["disk"] > 0
