"""Records the requests of a server as a trace. The server reports the arrival and the end of each request."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from hicache.errors import ConfigError
from hicache.pages.key import PageHasher, Tokens
from hicache.replay.trace import FORMAT, VERSION

_ID_BYTES, _ID_BITS = 8, 63

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Arrival:
    request_id: str
    time_s: float
    tokens: Tokens
    namespace: str
    session: str


@dataclass(frozen=True)
class _End:
    request_id: str
    output_tokens: int | None


@dataclass
class _Open:
    """A request whose line is not written. `output_tokens`: None until it has ended."""

    arrival: _Arrival
    output_tokens: int | None = None


_Message: TypeAlias = _Arrival | _End


class TraceRecorder:
    """Records requests to a new file in the format of `hicache.replay.trace`. A thread of the recorder hashes blocks
    and writes lines.

    Any thread may call `arrived` and `ended`, which are cheap. Lines are in order of arrival, so the line of a request
    is written when this request and all earlier requests have ended; `close` writes the remaining lines. A block has
    `block_tokens` tokens. The id of a block is a hash of the prompt up to the block's end, with a secret key that
    exists only during the recording. So equal prefixes in one file have equal ids, and the text cannot be recovered
    from ids.
    """

    def __init__(self, path: Path, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the file and start the thread. `block_tokens`: tokens of a block. `clock`: returns the current time in
        seconds. Raises ConfigError if the file exists, OSError if it cannot be created."""
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise ConfigError(f"{path} exists; record to another file, or remove it") from None
        self._path = path
        self._clock = clock
        self._hasher = PageHasher(secrets.token_bytes(32), block_tokens)
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._start_s = clock()
        self._failed = False
        self._num_bytes = self.num_written = 0
        self._write({"format": FORMAT, "version": VERSION, "block_tokens": block_tokens})
        self._thread = threading.Thread(target=self._run, name="hicache-recorder", daemon=True)
        self._thread.start()

    def arrived(self, request_id: str, tokens: Tokens, namespace: str = "", session: str = "") -> None:
        """Record the arrival of a request. `tokens`: int64 `[prompt]`, which the caller must not change any more.

        `request_id` must differ from the ids of all requests that have not ended."""
        self._messages.put(_Arrival(request_id, self._clock() - self._start_s, tokens, namespace, session))

    def ended(self, request_id: str, output_tokens: int | None) -> None:
        """Record the end of a request and the number of its generated tokens; an unknown id is ignored.

        `output_tokens`: None if the request was never admitted. The trace leaves such a request out."""
        self._messages.put(_End(request_id, output_tokens))

    def close(self) -> None:
        """Write the lines of all open requests and close the file. Idempotent."""
        self._messages.put(None)
        self._thread.join()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            if isinstance(message, _Arrival):
                self._open[message.request_id] = _Open(message)
            elif message.request_id in self._open:
                if message.output_tokens is None:
                    del self._open[message.request_id]
                else:
                    self._open[message.request_id].output_tokens = message.output_tokens
                self._write_front()
        for request in self._open.values():
            request.output_tokens = request.output_tokens or 0
        self._write_front()
        self._file.close()

    def _write_front(self) -> None:
        """Write the ended requests that arrived before every open request."""
        while self._open:
            request_id, request = next(iter(self._open.items()))
            if request.output_tokens is None:
                return
            del self._open[request_id]
            arrival = request.arrival
            keys = self._hasher.chain(self._hasher.seed(arrival.namespace), arrival.tokens)
            line = {
                "time_s": round(arrival.time_s, 6),
                "input_tokens": len(arrival.tokens),
                "output_tokens": request.output_tokens,
                "blocks": [int.from_bytes(key[:_ID_BYTES], "little") >> (8 * _ID_BYTES - _ID_BITS) for key in keys],
            }
            self.num_written += self._write({**line, "session": arrival.session} if arrival.session else line)

    def _write(self, line: object) -> bool:
        """Write one line completely or not at all. A disk error ends the recording, not the server."""
        if self._failed:
            return False
        data = left = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
            self._num_bytes += len(data)
        except OSError as error:
            self._failed = True
            log.warning("recording to %s stopped after a disk error: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.truncate(self._num_bytes)
        return not self._failed
