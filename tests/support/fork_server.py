"""A Python process that has imported the library, and forks itself for each program that a test runs.

programs.py starts it once per test run. The server has one thread, so a fork is safe. The forked child leaves the loop
and runs its program in the namespace of this file. The child ends as any interpreter does: it joins its threads, calls
its exit functions and returns its status. Tearing down imported modules takes half a second of the processor, so only
programs that request it, or that end by an error, do it. Each program has one connection. The server receives the
request with three standard files over it, sends the pid, and at the end of the program its exit status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from array import array
from typing import Any

import torch

# Programs need these imports; the imports take seconds, but happen only once.
from hicache import *  # noqa: F403

_MAX_REQUEST_BYTES = 1 << 20
# Additional imports by the name of the fork server. The server "serving" has the imports of `hicache serve`, `chat` and
# `demo`.
_IMPORTED = {
    "hicache": (),
    "serving": (
        "hicache.serving.server.command",
        "hicache.serving.chat.command",
        "hicache.serving.demo",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    ),
}


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the request for a program and the descriptors of its standard input, output and error."""
    data, ancillary, _, _ = connection.recvmsg(_MAX_REQUEST_BYTES, socket.CMSG_SPACE(3 * 4))
    files = array("i")
    for _, _, value in ancillary:
        files.frombytes(value)
    while not data.endswith(b"\n"):
        data += connection.recv(_MAX_REQUEST_BYTES)
    return json.loads(data), list(files)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Give the forked child the files, environment, folder and arguments that a new interpreter would have."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        if file > 2:
            os.close(file)
    # The server's own file objects cache whether their files can seek, so the child needs new ones.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background processes ignore SIGINT
    sys.argv[:] = request["arguments"]
    if not sys.flags.safe_path:  # with safe_path, sys.path has no entry for the program's folder
        sys.path[0] = request["path"]


def _serve(address: str, owner: int) -> dict[str, Any]:
    """Serve until the process `owner` ends. Returns in forked children only, with the request of their program."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # a client that finds this path can connect
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(os.pidfd_open(owner), selectors.EVENT_READ, owner)
    gc.collect()
    gc.freeze()
    while True:
        for key, _ in selector.select():
            if key.data == owner:
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = _receive(connection)
                child = os.fork()
                if not child:
                    selector.close()
                    listener.close()
                    connection.close()
                    _become(request, files)
                    return request
                for file in files:
                    os.close(file)
                connection.send(str(child).encode())
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
                continue
            child, connection = key.data
            selector.unregister(key.fileobj)
            os.close(int(key.fileobj))  # type: ignore[arg-type]
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):  # the client that started the program may have ended
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _run(request: dict[str, Any], main: dict[str, Any]) -> None:
    """Run a program as __main__. The program's namespace has no names of this file, so this function imports the
    modules that it uses."""
    import atexit
    import gc
    import os
    import sys
    import threading

    code = compile(request["code"], request["name"], "exec")
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    if request["name"] == "-c":
        del main["__file__"]  # `python -c` sets no __file__; processes that it spawns rely on that
    else:
        main["__file__"] = request["name"]
    status: Any = 0
    try:
        exec(code, main)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        gc.unfreeze()  # libraries report objects that are left at the exit
        raise
    if isinstance(status, int) and not request["is_torn_down"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)
    gc.unfreeze()
    sys.exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _module in _IMPORTED[sys.argv[3]]:
        importlib.import_module(_module)
    _run(_serve(sys.argv[1], int(sys.argv[2])), globals())
