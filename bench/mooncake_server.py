"""A Mooncake master and a machine that lends memory, as two processes on loopback, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 60
_COMMAND = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or shutil.which("mooncake_master")
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
"""


def missing() -> str:
    """What has to be installed to run a server here; "" if nothing."""
    if _COMMAND is None or importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'hicache[mooncake]'"
    found = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "mooncake.store cannot be imported: apt-get install libibverbs1"


class MooncakeServer:
    """`master` and `owner` are running processes. The owner lends `segment_bytes`; without any it is not started.
    After another `start_owner`, `owner` is that one, and both lend."""

    def __init__(self, segment_bytes: int, *, client_ttl_s: int = 2, lease_ms: int = 1000) -> None:
        self._segment_bytes, self._client_ttl_s, self._lease_ms = segment_bytes, client_ttl_s, lease_ms
        self.port, self._metrics_port = _free_port(), _free_port()
        self.start_master()
        self._owners: list[subprocess.Popen[str]] = []
        if segment_bytes:
            self.start_owner()

    @property
    def owner(self) -> subprocess.Popen[str] | None:
        return self._owners[-1] if self._owners else None

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        assert _COMMAND is not None, missing()
        self.master = subprocess.Popen(
            [
                *(_COMMAND, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--logtostderr"),
                *(f"--metrics_port={self._metrics_port}", "--metrics_host=127.0.0.1"),
                *(f"--client_ttl={self._client_ttl_s}", f"--default_kv_lease_ttl={self._lease_ms}"),
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        give_up_s = time.monotonic() + PATIENCE_S
        while not _listens(self.port):
            assert self.master.poll() is None and time.monotonic() < give_up_s, "mooncake_master does not start"
            time.sleep(0.02)

    def start_owner(self) -> None:
        owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER, f"127.0.0.1:{self.port}", str(self._segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._owners.append(owner)
        assert owner.stdout is not None
        answer = owner.stdout.readline().strip()
        assert answer == "ready", f"the owner of the segment does not start: {answer}"

    def stop(self) -> None:
        """End all, whatever state they are in."""
        for owner in self._owners:
            kill(owner)
        kill(self.master)


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def running(segment_bytes: int, *, lease_ms: int = 1000) -> Iterator[MooncakeServer]:
    server = MooncakeServer(segment_bytes, lease_ms=lease_ms)
    try:
        yield server
    finally:
        server.stop()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
