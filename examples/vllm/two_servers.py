"""Two vLLM servers that share one store on disk. The second server loads pages that the first server computed.

    python examples/vllm/two_servers.py MODEL [more arguments of vLLM ...]

One process serves the directory of the store to both servers through a socket. The servers start one after the other,
on ports 8100 and 8101, and get the same prompt. For each server, the program prints how many tokens of the prompt were
cached.
"""

from __future__ import annotations

import contextlib
import json
import socket as socketlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HICACHE = "from hicache.cli import main; raise SystemExit(main())"  # the command `hicache`
PORTS = (8100, 8101)
PROMPT = "The keeper of the lighthouse wrote the weather of each day into a book. " * 20
START_S = 600  # maximum seconds for which a server may start


def connector(socket: str) -> dict[str, Any]:
    """Return the value of vLLM's flag `--kv-transfer-config`. It has no budget, because the process that serves the
    store has one."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MB", "disk": {"path": f"unix:{socket}"}},
    }


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program within the block, with its output on stderr. The program is ended at the end of the
    block."""
    running = subprocess.Popen([sys.executable, *arguments], stdout=sys.stderr)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


def cached_tokens(server: subprocess.Popen[bytes], port: int) -> tuple[int, int]:
    """Wait until the server answers, and send the prompt. Returns the number of prompt tokens, and how many of them
    were cached."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            model = ask(port, "/v1/models")["data"][0]["id"]
            break
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None or time.monotonic() > deadline_s:
                sys.exit(f"the server on port {port} did not start")
            time.sleep(0.5)
    usage = ask(port, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 8})["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"] or 0


def main(model: str, *more: str) -> None:
    for port in PORTS:
        with socketlib.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                sys.exit(f"port {port} is in use")  # its server would answer in place of the new one
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        socket, pages = f"{folder}/pages.sock", Path(folder, "pages")
        store = running.enter_context(
            process("-c", HICACHE, "store", "serve", f"lmdb://{pages}?budget=1GB", "--socket", socket)
        )
        while not Path(socket).exists():
            if store.poll() is not None:
                sys.exit("the store did not start")
            time.sleep(0.1)
        for port in PORTS:
            server = running.enter_context(
                process(
                    *("-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)),
                    *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector(socket)), *more),
                )
            )
            num_tokens, num_cached = cached_tokens(server, port)
            print(f"server on port {port}: {num_tokens} prompt tokens, {num_cached} of them cached", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
