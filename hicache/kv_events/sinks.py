"""Sinks of KV events: a file of JSON lines, or ZeroMQ sockets that the routers of vLLM and SGLang subscribe to.

Both write the same events: maps with `type` and the field names of vLLM's event classes. docs/events.md defines the
format.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from hicache.console import path_text
from hicache.errors import ConfigError
from hicache.kv_events.publisher import EventBatch, EventSink
from hicache.pages.events import BlockStored, KVCacheEvent

_RANK = 0  # data-parallel rank
_EVENT_BLOCKS = 64  # maximum blocks of one event, because encoding an event in C holds the GIL
_POLL_S = 0.05  # time between two polls for replay requests
_LINGER_MS = 500  # maximum time that `close` waits for subscribers to receive queued batches
_MAX_UNREAD = 4096  # maximum batches queued for one slow subscriber; ZeroMQ drops further ones
_REPLAY_BATCHES, _REPLAY_BYTES = 4096, 64 << 20
# maximum batches that one call of `serve` replays: new batches can only be sent between two calls
_ANSWER_BATCHES = 256
_END = (-1).to_bytes(8, "big", signed=True)


def sink_of(address: str, topic: str = "", replay: str = "") -> EventSink:
    """Return the sink for an address of the setting `kv_events`. `topic`: topic of ZeroMQ messages. `replay`: address
    of the socket from which subscribers request missed batches; empty: no such socket. Raises `ConfigError` if an
    address cannot be used."""
    if address.startswith("file:"):
        return FileSink(path_in(address))
    return ZmqSink(address, topic, replay)


def path_in(address: str) -> str:
    """Return the path in `file:PATH`. Raises `ConfigError` if there is none."""
    try:
        return path_text(address if address.startswith("file://") else address.removeprefix("file:"))
    except ConfigError as error:
        raise ConfigError(f"kv_events={address!a} {error}; give file:PATH") from None


def events_of(batch: EventBatch) -> Iterator[dict[str, Any]]:
    """Return the events of a batch, each as a map of `type` and its fields."""
    for change in batch.changes:
        for event in change.blocks(_EVENT_BLOCKS):
            yield _as_map(event)


def _as_map(event: KVCacheEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__, **vars(event)}
    if isinstance(event, BlockStored):
        fields |= {"lora_id": None, "lora_name": None}  # fields that vLLM's class requires
    return fields


class FileSink:
    """Appends one line for each batch: `{"sequence": 0, "time_s": 1.5, "events": [...]}`. A new file is readable for
    its owner only, because events contain token ids of prompts.

    If the path is a FIFO, a reader must have opened it before the engine is built.
    """

    poll_s: float | None = None

    def __init__(self, path: str) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"kv_events=file:{path}: {error.strerror}; give a file that can be written") from error
        os.set_blocking(self._file, True)
        self._is_line_incomplete = False

    def send(self, batch: EventBatch) -> None:
        events = ",".join(json.dumps(event, separators=(",", ":")) for event in events_of(batch))
        line = f'{{"sequence":{batch.sequence},"time_s":{batch.time_s},"events":[{events}]}}\n'
        # After a partial write to a full disk, begin a new line, so that only the partial line is unreadable.
        left = memoryview((("\n" if self._is_line_incomplete else "") + line).encode())
        self._is_line_incomplete = True
        while left:
            left = left[os.write(self._file, left) :]
        self._is_line_incomplete = False

    def serve(self) -> None:
        """Do nothing, because a file gets no requests of subscribers."""

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class ZmqSink:
    """A PUB socket, and with `replay` a ROUTER socket from which subscribers request missed batches.

        PUB     topic, sequence number (8 bytes, big endian), msgpack of [time, events, rank]
    ROUTER  a request is an empty frame and a sequence number. The answer is every kept batch from that number on, each
                as an empty frame and the three frames of PUB, and at the end an empty topic and number -1

    The PUB socket binds `address`, or connects to it if `address` begins with `connect:`. No call waits for a
    subscriber.
    """

    def __init__(self, address: str, topic: str = "", replay: str = "") -> None:
        """Create the sockets. Raises `ConfigError` if an address cannot be used or a package is missing."""
        zmq, self._pack = _packages()
        self._zmq = zmq
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._buffer_bytes = 0
        # the client of the replay in progress, and the next sequence number for it
        self._asked: tuple[bytes, bytes] | None = None
        try:
            self._publisher = self._socket(zmq.PUB, address, "kv_events", _MAX_UNREAD)
            self._router = self._socket(zmq.ROUTER, replay, "kv_events_replay", 0) if replay else None
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def addresses(self) -> tuple[str, str]:
        """The bound addresses of the PUB and the ROUTER socket, with the port that the system chose for port 0. The
        ROUTER's address is empty without `kv_events_replay`."""
        bound = self._zmq.LAST_ENDPOINT
        router = "" if self._router is None else self._router.getsockopt_string(bound)
        return self._publisher.getsockopt_string(bound), router

    @property
    def poll_s(self) -> float | None:
        if self._router is None:
            return None
        return _POLL_S if self._asked is None else 0.0

    def send(self, batch: EventBatch) -> None:
        number = batch.sequence.to_bytes(8, "big")
        payload = self._pack([batch.time_s, list(events_of(batch)), _RANK])
        self._publisher.send_multipart((self._topic, number, payload), copy=False)
        if self._router is not None:
            self._keep(number, payload)

    def serve(self) -> None:
        """Continue the replay in progress, or begin the next requested one."""
        if self._router is None:
            return
        if self._asked is None and self._router.poll(0):
            client, *frames = self._router.recv_multipart()
            self._asked = client, frames[-1] if frames and len(frames[-1]) == len(_END) else _END
        if self._asked is None:
            return
        client, number = self._asked
        due = list(islice((kept for kept in self._buffer if kept[0] >= number), _ANSWER_BATCHES))
        for at, payload in due:
            self._answer(client, self._topic, at, payload)
        if len(due) < _ANSWER_BATCHES:
            self._answer(client, b"", _END, b"")
            self._asked = None
        else:
            self._asked = client, (int.from_bytes(due[-1][0], "big") + 1).to_bytes(len(_END), "big")

    def close(self) -> None:
        self._context.destroy(linger=_LINGER_MS)

    def _answer(self, client: bytes, *frames: bytes) -> None:
        assert self._router is not None
        with contextlib.suppress(self._zmq.Again):  # the client's queue is full; it requests the rest later
            self._router.send_multipart((client, b"", *frames), self._zmq.DONTWAIT)

    def _keep(self, number: bytes, payload: bytes) -> None:
        self._buffer.append((number, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > _REPLAY_BATCHES or self._buffer_bytes > _REPLAY_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft()[1])

    def _socket(self, kind: int, address: str, setting: str, max_unread: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, max_unread or 2 * _REPLAY_BATCHES)
        socket.setsockopt(self._zmq.IPV6, int("[" in address))
        try:
            if address.startswith("connect:"):
                socket.connect(address.removeprefix("connect:"))
            else:
                socket.bind(address)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"{setting}={address}: {error.strerror}; give an address that is free") from error
        return socket


def _packages() -> tuple[Any, Any]:
    """Return the module of ZeroMQ, and msgpack's encoder. Raises `ConfigError` if a package is missing."""
    try:
        return importlib.import_module("zmq"), importlib.import_module("msgspec").msgpack.encode
    except ImportError as error:
        raise ConfigError(
            f"kv_events over ZeroMQ needs the package {error.name} of hicache[events]: pip install '.[events]' in its "
            "clone"
        ) from error
