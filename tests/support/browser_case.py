"""A page in headless Chromium. The test controls it over the pipes of the browser's DevTools protocol."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import BOUND_S, eventually

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_ABOVE_FD = 10  # the browser uses descriptors 3 and 4 for the protocol


class Page:
    """A page of the browser. `errors`: errors on the console, and exceptions; `urls`: every address that the page
    requested."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last_id = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def dark(self) -> None:
        """Make the user prefer dark pages from now on."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, converted through JSON."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until the JavaScript expression is true."""
        eventually(
            lambda: self.value(expression), lambda: (expression, self.errors, self.value("document.body.innerText"))
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")) or (
            method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
        ):
            self.errors.append(str(params))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], BOUND_S)[0], "the browser does not answer"
            news = os.read(self._from, 1 << 20)
            assert news, "the browser has ended"
            self._buffer += news
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """Open an empty page of a browser that keeps its files under `profile`. Call this function only if `BROWSER` is
    set."""
    assert BROWSER is not None
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_above(fd)) for fd in (*os.pipe(), *os.pipe())]
        theirs_in, ours_out, ours_in, theirs_out = (file.fileno() for file in files)
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", BROWSER, *_FLAGS]
        process = subprocess.Popen(
            [*command, "--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1300,1300"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            files[3].close()
            yield Page(ours_out, ours_in)
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def _above(given: int) -> io.FileIO:
    """Duplicate the descriptor to a number above those of the browser, and close the given one."""
    fd = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _ABOVE_FD)
    os.close(given)
    return io.FileIO(fd, "w" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_WRONLY else "r")
