"""Clients that send random frames, lengths, requests and descriptors to a served store process."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import socket
import struct
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

from hicache.storage.process import frames
from hicache.storage.process.frames import Kind, Pages
from hicache.storage.process.jobs import FindJob, ReadClass, RemoveJob, WriteJob
from process_case import PAGE_BYTES, request

KEYS = (b"a", b"bb" * 16, b"k" * 511)
_MEMORY_BYTES = 4 * PAGE_BYTES
_ODD: tuple[object, ...] = (None, -1, 0, 1 << 70, 1e308, "x", "\udcff", [], {}, [[]], True, float("nan"), "../..")


class Nonsense:
    """One client with its own random numbers. `send_all` returns after the client has disconnected, or was
    disconnected."""

    def __init__(self, path: str, seed: int) -> None:
        self._rng, self._path = random.Random(seed), path

    def send_all(self) -> None:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(self._path)
            connected.settimeout(60)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if self._rng.random() < 0.7:
                    self._ask_for_a_store(connected)
                for _ in range(self._rng.randrange(1, 6)):
                    self._send(connected, self._message())
                if self._rng.random() < 0.5:
                    connected.shutdown(socket.SHUT_WR)
                    while connected.recv(1 << 16):
                        continue

    def _ask_for_a_store(self, connected: socket.socket) -> None:
        """Request a store, with a correct request more often than not, and share memory, which the client truncates in
        half of the cases."""
        rng = self._rng
        about = json.loads(request("", identity={"model": rng.choice(("toy", "another"))}).pack())
        if rng.random() < 0.4:
            self._spoil(about)
        memory = _memory(_MEMORY_BYTES)
        with _closed(memory), _closed(_memory(4096)) as status:
            with _closed(self._descriptor()) as other:
                shared = memory if rng.random() < 0.8 else other
                socket.send_fds(connected, [frames.memory(1, _MEMORY_BYTES)], [shared])
            socket.send_fds(connected, [frames.frame(Kind.OPEN, json.dumps(about).encode())], [status])
            with contextlib.suppress(OSError, struct.error):
                while connected.recv(5)[4:] not in (b"", bytes([Kind.OPENED]), bytes([Kind.FAILED])):
                    continue
            if rng.random() < 0.5:
                os.ftruncate(memory, 0)
                os.ftruncate(status, 0)

    def _spoil(self, about: dict) -> None:
        """Replace a value at some places of a request by an odd value."""
        for _ in range(self._rng.randrange(1, 3)):
            at: object = about
            while isinstance(at, dict | list) and at:
                keys = list(at) if isinstance(at, dict) else range(len(at))
                key, into = self._rng.choice(list(keys)), at
                at = at[key]  # type: ignore[index]
                if self._rng.random() < 0.4:
                    break
            into[key] = copy.deepcopy(self._rng.choice(_ODD))  # type: ignore[index]

    def _message(self) -> bytes:
        rng = self._rng
        draw = rng.randrange(5)
        if draw == 0:
            return rng.randbytes(rng.randrange(1, 200))
        if draw == 1:
            return frames.frame(rng.choice(list(Kind)), rng.randbytes(rng.randrange(80)))
        if draw == 2:
            return frames.frame(Kind.OPEN, rng.choice((b"[" * 100000, b"1" * 5000, b'{"version":3}', b"\xff", b"{}")))
        message = bytearray(self._job())
        if draw == 3:
            for _ in range(rng.randrange(1, 4)):
                message[rng.randrange(len(message))] = rng.randrange(256)
        return bytes(message[: rng.randrange(1, len(message))] if rng.random() < 0.2 else message)

    def _job(self) -> bytes:
        rng = self._rng
        keys = tuple(rng.choices(KEYS, k=rng.randrange(4)))
        offsets = array("Q", [rng.choice((0, 1, PAGE_BYTES, _MEMORY_BYTES, (1 << 64) - 1)) for _ in keys])
        pool_pages = Pages(rng.choice((1, 1, 1, 0, 7)), rng.choice((PAGE_BYTES, PAGE_BYTES, 0, 1)), offsets)
        job = frames.of_jobs([WriteJob(rng.randrange(-5, 5), keys, ())], pool_pages)
        kind = rng.choice((Kind.WRITE, Kind.READ, Kind.READ, Kind.USED, Kind.KEEP, Kind.CANCEL, Kind.NOTE, Kind.CLOSE))
        if kind in (Kind.WRITE, Kind.READ):
            return job[:4] + bytes([kind]) + job[5:]
        if rng.random() < 0.3:
            return frames.of_jobs(
                [rng.choice((FindJob(1, keys, ReadClass.LOOKUP), RemoveJob(1, keys)))], frames.NO_PAGES
            )
        if kind is Kind.KEEP:
            return frames.keep(keys, rng.choice((0.0, math.inf, math.nan)))
        body = frames.keys_of(keys) if kind is Kind.USED else rng.randbytes(12)
        return frames.frame(kind, body)

    def _send(self, connected: socket.socket, message: bytes) -> None:
        """Send the message, sometimes with descriptors."""
        with contextlib.ExitStack() as held:
            number = self._rng.choice((0, 0, 1, 3, 20))
            sent = [held.enter_context(_closed(self._descriptor())) for _ in range(number)]
            done = socket.send_fds(connected, [message], sent)
            connected.sendall(message[done:])

    def _descriptor(self) -> int:
        """A descriptor of a file that is no memory, or of memory that may be too small."""
        kind = self._rng.randrange(5)
        if kind == 0:
            return os.open("/dev/null", os.O_RDWR)
        if kind == 1:
            return os.open(tempfile.gettempdir(), os.O_RDONLY)
        if kind == 2:
            ends = os.pipe()
            os.close(ends[0])
            return ends[1]
        if kind == 3:
            return socket.socket(socket.AF_UNIX).detach()
        return _memory(self._rng.choice((0, 1, _MEMORY_BYTES)))


def held_by(pid: int) -> tuple[int, int, int]:
    """Numbers of descriptors, mapped memfds of clients, and threads of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = sum("memfd:fuzz" in line or "memfd:pages" in line for line in maps)
    return len(os.listdir(f"/proc/{pid}/fd")), mapped, len(os.listdir(f"/proc/{pid}/task"))


def _memory(num_bytes: int) -> int:
    descriptor = os.memfd_create("fuzz")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


@contextlib.contextmanager
def _closed(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
