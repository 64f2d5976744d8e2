"""The publisher: its queue and sequence numbers, the lines of its file, its bytes on the wire, and invalid settings."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from hicache.errors import ConfigError
from hicache.kv_events import EventBatch, EventPublisher, FileSink, ZmqSink, sink_of
from hicache.metrics import Metrics
from hicache.pages.events import AllRemoved, EventLog, PageChange, PagesRemoved, PagesStored
from hicache.pages.key import PromptPages
from waiting import BOUND_S


class HeldSink:
    """A sink that blocks the publisher's thread until `open()`. Then the sink raises for the batches in `fails`."""

    poll_s: float | None = None

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.batches: list[EventBatch] = []
        self.entered, self._opened = threading.Event(), threading.Event()
        self._fails, self.closed = fails, False

    def send(self, batch: EventBatch) -> None:
        self.entered.set()
        assert self._opened.wait(BOUND_S)
        if batch.sequence in self._fails:
            raise OSError("no space left on device")
        self.batches.append(batch)

    def serve(self) -> None:
        """Do nothing: no subscriber sends a request."""

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self.closed = True


def _keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") * 4 for number in range(first, first + count)]


def _pages(number: int) -> PromptPages:
    """Ten pages of a prompt that no other number has."""
    return PromptPages(_keys(10 * number, 10), None, np.arange(20, dtype=np.int64), "")


def test_a_frozen_sink_delays_no_call_and_losses_are_gaps() -> None:
    """While the sink hangs, every call returns. Events beyond the queue's limit, and events that fail, are missing and
    counted. All other events are in order. The stream begins and ends with a clear event."""
    log, metrics, sink = EventLog(), Metrics(), HeldSink(fails=[2])
    publisher = EventPublisher(log, sink, 100, metrics)
    publisher.start()
    assert sink.entered.wait(BOUND_S)
    for number in range(1, 41):
        log.stored(_pages(number), "GPU")
        publisher.publish()
        publisher.publish()  # no change, so no batch
    sink.open()
    assert publisher.close(BOUND_S) and sink.closed
    numbers = [batch.sequence for batch in sink.batches]
    counts = metrics.snapshot()
    assert numbers[:2] == [0, 1] and 2 not in numbers and numbers == sorted(numbers)
    assert sink.batches[0].changes == [AllRemoved()]
    assert counts["kv_events.failed_batches"] == 1 and counts["kv_events.dropped_batches"] >= 30
    assert counts["kv_events.sent_batches"] == len(numbers)
    assert len(numbers) + 1 + counts["kv_events.dropped_batches"] == 42
    assert publisher.close()


def _batch(sequence: int, changes: Sequence[PageChange]) -> EventBatch:
    return EventBatch(sequence, 1.5 + sequence, changes)


def _known_batch() -> EventBatch:
    """A batch that stores three pages of 2 tokens after another page, and removes one of them."""
    keys = _keys(1, 3)
    stored = PagesStored(keys, _keys(7, 1)[0], np.arange(6, dtype=np.int64), "", "CPU")
    return _batch(3, [stored, PagesRemoved(keys[1:2], "CPU"), AllRemoved()])


_KNOWN_EVENTS = [
    {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3],
        "parent_block_hash": 7,
        "token_ids": [0, 1, 2, 3, 4, 5],
        "block_size": 2,
        "medium": "CPU",
        "lora_id": None,
        "lora_name": None,
    },
    {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"},
    {"type": "AllBlocksCleared"},
]


def test_a_batch_on_the_wire_is_as_documented(tmp_path: Path) -> None:
    """A batch has three frames, live and replayed. A replay begins at the requested number and ends with the end
    mark."""
    sink = sink_of("tcp://127.0.0.1:0", "kv", "tcp://127.0.0.1:0")
    assert isinstance(sink, ZmqSink)
    context = zmq.Context()
    live, asking = context.socket(zmq.SUB), context.socket(zmq.REQ)
    try:
        address, replay = sink.addresses
        for sequence in range(3):
            sink.send(_batch(sequence, [AllRemoved()]))
        live.subscribe("kv")
        live.connect(address)
        asking.connect(replay)
        while not live.poll(10):
            sink.send(_known_batch())
        topic, number, payload = live.recv_multipart()
        assert (topic, number) == (b"kv", (3).to_bytes(8, "big"))
        assert msgspec.msgpack.decode(payload) == [4.5, _KNOWN_EVENTS, 0]
        asking.send((1).to_bytes(8, "big"))
        while not asking.poll(10):
            sink.serve()
        topic, number, payload = asking.recv_multipart()  # a REQ socket reads only one answer
        assert (topic, number) == (b"kv", (1).to_bytes(8, "big"))
        assert msgspec.msgpack.decode(payload) == [2.5, [{"type": "AllBlocksCleared"}], 0]
        asking_all = context.socket(zmq.DEALER)
        asking_all.connect(replay)
        for nonsense in ((b"",), (b"", b"all"), (b"", b"", b"", b"")):
            asking_all.send_multipart(nonsense)
            while not asking_all.poll(10):
                sink.serve()
            assert asking_all.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        asking_all.close()
    finally:
        context.destroy(linger=0)
        sink.close()


def test_batches_go_out_while_others_are_asked_for_again() -> None:
    """Batches are still published while others are replayed. However often all batches are requested, one call answers
    with few of them, and the next call comes at once. Each client gets all batches from its number on, in order,
    including the ones published meanwhile."""
    sink, context = ZmqSink("tcp://127.0.0.1:0", "", "tcp://127.0.0.1:0"), zmq.Context()
    asking, numbers, answers, num_calls = context.socket(zmq.DEALER), list(range(1000)), list[int](), 0
    try:
        for sequence in numbers:
            sink.send(_batch(sequence, [AllRemoved()]))
        asking.set_hwm(0)
        asking.connect(sink.addresses[1])
        for first in (0, 0, 900):
            asking.send_multipart([b"", first.to_bytes(8, "big")])
        while answers.count(-1) < 3:
            sink.serve()
            num_calls += 1
            if sink.poll_s == 0.0:  # a replay is not finished
                sink.send(_batch(len(numbers), [AllRemoved()]))
                numbers.append(len(numbers))
            while asking.poll(0 if sink.poll_s == 0.0 else 10):
                answers.append(int.from_bytes(asking.recv_multipart()[2], "big", signed=True))
    finally:
        context.destroy(linger=0)
        sink.close()
    ends = [at for at, number in enumerate(answers) if number == -1]
    parts = [answers[start:end] for start, end in zip([0, *(at + 1 for at in ends)], ends, strict=False)]
    assert [part[0] for part in parts] == [0, 0, 900] and all(part == numbers[part[0] :][: len(part)] for part in parts)
    assert [len(part) >= 1000 - part[0] for part in parts] == [True] * 3
    assert num_calls > 2100 // 256 and len(numbers) > 1000


def test_long_runs_become_events_of_few_blocks() -> None:
    """A long prompt becomes several events. The parent of each is the block before it, and together they are one
    chain."""
    keys = _keys(0, 300)
    stored = PagesStored(keys, None, np.arange(600, dtype=np.int64), "", "GPU")
    parts = list(stored.blocks(64))
    assert [len(part.block_hashes) for part in parts] == [64, 64, 64, 64, 44]
    assert [part.parent_block_hash for part in parts] == [None, 63, 127, 191, 255]
    assert [token for part in parts for token in part.token_ids] == list(range(600))


def test_lines_are_as_documented_and_appended(tmp_path: Path) -> None:
    """Lines are appended in the documented form. Because token ids reveal prompts, a new file is readable only by its
    user. The mode of an existing file is kept."""
    sink_of(f"file:{tmp_path}/new").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    path = tmp_path / "events"
    path.write_text("what was there\n")
    path.chmod(0o640)
    sink = FileSink(str(path))
    sink.send(_known_batch())
    sink.close()
    assert path.stat().st_mode & 0o777 == 0o640
    first, line = path.read_text().splitlines()
    assert first == "what was there"
    assert json.loads(line) == {"sequence": 3, "time_s": 4.5, "events": _KNOWN_EVENTS}


def test_a_full_disk_causes_a_gap_and_complete_lines_after_it() -> None:
    """A line that could not be written counts as failed, and the next line begins on a new line."""
    sink = FileSink("/dev/full")
    with pytest.raises(OSError, match="No space"):
        sink.send(_batch(0, [AllRemoved()]))
    reader, writer = os.pipe()
    os.dup2(writer, sink._file)
    os.close(writer)
    sink.send(_batch(1, [AllRemoved()]))
    sink.close()
    with os.fdopen(reader) as lines:
        assert next(lines) == "\n"


def test_addresses_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    """A port in use, an address of another machine, a folder, and a pipe without a reader are refused in one line with
    the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"kv_events={address}"):
            sink_of(address)
        with pytest.raises(ConfigError, match=f"kv_events_replay={address}"):
            sink_of("tcp://127.0.0.1:0", "", address)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "no" / "folder", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"kv_events=file:{path}"):
            sink_of(f"file:{path}")
    with pytest.raises(ConfigError, match="kv_events=tcp://nonsense: "):
        sink_of("tcp://nonsense")


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*hicache\[events\]"):
        sink_of("tcp://127.0.0.1:0")
