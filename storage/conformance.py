"""Tests of the contract that every page store must pass, for the stores of hicache and for custom ones.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def make_store(self, tmp_path):
            return functools.partial(opener, f"my-store://{tmp_path}")

Running these tests needs pytest. These tests do not cover failing or slow stores: a store's own tests must cause
failures and delays.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from hicache.storage.base import PageBuffer, PageStore, StoreError, StoreMismatch
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat

MakeStore: TypeAlias = Callable[..., PageStore]

IDENTITY: dict[str, str | int] = {"model": "conformance", "page_size": 64}
SMALL_BYTES, LARGE_BYTES = 1000, 40960
FORMATS = (PageFormat(SMALL_BYTES), PageFormat(LARGE_BYTES))
_NUM_HISTORIES, _NUM_STEPS, _NUM_KEYS = 4, 40, 12
_NUM_FILLING = 450  # number of large pages that fill a store: 18 MB


class StoreConformance:
    """Tests of the contract `PageStore`, for a pytest class that defines the fixture `make_store`.

    `make_store(identity=…, formats=…, cipher=…)` opens the store under test, as an opener of URLs does
    (`hicache.storage.urls`). Within one test it opens one store at a time, always on the same medium, which is empty at
    first and has a capacity of a few MiB. If the capacity is below 18 MB, a full store is tested too.
    """

    outlives_close = True
    """True if pages stay stored when the store is closed and opened again."""
    knows_identity = True
    """True if the store separates pages of different identities. If not, it relies on the keys, which also name
    the model."""

    copies_values = True
    """True if the store has `get_value` and `put_values`, without which its pages are not copied to another
    store."""

    def test_a_batch_is_answered_key_by_key(self, make_store: MakeStore) -> None:
        """Absent keys are misses and hide no present key; a batch may have a key twice, or be empty."""
        with _open(make_store) as store:
            assert store.page_sizes in ((), (SMALL_BYTES, LARGE_BYTES)), "not the sizes of the formats"
            assert store.put([]) == [] and store.contains([]) == [] and store.get_into([], []) == []
            assert store.delete([]) == 0
            store.touch([])
            assert store.put([(b"a", page(0)), (b"b", page(2))]) == [True, True]
            assert store.contains([b"x", b"a", b"y", b"b", b"a"]) == [False, True, False, True, True]
            requested = {b"x": page(0), b"a": page(0), b"y": page(2), b"b": page(2)}
            assert _found(store, requested) == [False, True, False, True]
            buffers = [np.empty(SMALL_BYTES, np.uint8) for _ in range(2)]
            assert store.get_into([b"a", b"a"], buffers) == [True, True]
            assert all(np.array_equal(buffer, page(0)) for buffer in buffers)

    def test_a_present_key_keeps_its_page(self, make_store: MakeStore) -> None:
        """A put of a present key returns True and changes nothing, also with other bytes or another page size. A page
        of another size than the buffer is a miss and stays stored."""
        with _open(make_store) as store:
            store.put([(b"a", page(0))])
            assert store.put([(b"a", page(2)), (b"b", page(4)), (b"a", page(1))]) == [True, True, True]
            assert store.get_into([b"a"], [np.empty(LARGE_BYTES, np.uint8)]) == [False]
            assert all(_found(store, {b"a": page(0), b"b": page(4)}))
            assert store.put([(b"c", page(6)), (b"c", page(6))]) == [True, True]
            assert all(_found(store, {b"c": page(6)}))
            assert store.stats().corrupt == 0

    def test_keys_are_any_1_to_511_bytes(self, make_store: MakeStore) -> None:
        """Keys of 1 to 511 arbitrary bytes name different pages; other lengths raise `StoreError`."""
        keys = [b"\0", b"\0\0", b"a", b"A", b"a\0", b"a/b", b"/", b".", b"..", b"%2F", b"a\r\nb", b"*", b"{a}", b"\xff"]
        keys += [bytes(range(256)), b"k" * 510, b"k" * 511, b"\xff" * 511]
        with _open(make_store) as store:
            pages = {key: page(2 * n) for n, key in enumerate(keys)}
            assert store.put(list(pages.items())) == [True] * len(keys)
            assert all(_found(store, pages))
            for key in (b"", b"k" * 512):
                for call in _calls(store, key, page(0)):
                    assert _raises(call), f"a key of {len(key)} bytes was accepted"
            assert store.delete(keys[::2]) == len(keys[::2])
            assert store.contains(keys) == [n % 2 == 1 for n in range(len(keys))]

    def test_wrong_buffers_raise(self, make_store: MakeStore) -> None:
        """A buffer that is not contiguous uint8 of a declared size, or is not writable, raises; nothing is stored."""
        read_only = page(0)
        read_only.flags.writeable = False
        wrong: dict[str, Any] = {
            "two-dimensional": np.zeros((10, 100), np.uint8),
            "of another type": np.zeros(SMALL_BYTES, np.int8),
            "not contiguous": np.zeros(2 * SMALL_BYTES, np.uint8)[::2],
        }
        with _open(make_store) as store:
            if store.page_sizes:
                wrong["of another size"] = np.zeros(SMALL_BYTES + 1, np.uint8)
            for what, buffer in wrong.items():
                assert _raises(partial(store.put, [(b"a", page(0)), (b"b", buffer)])), what
                assert _raises(partial(store.get_into, [b"a"], [buffer])), what
            assert _raises(partial(store.get_into, [b"a"], [read_only])), "read-only"
            assert _raises(partial(store.get_into, [b"a"], [])), "fewer buffers than keys"
            assert store.contains([b"a", b"b"]) == [False, False]
            assert store.put([(b"a", read_only)]) == [True]
            assert all(_found(store, {b"a": page(0)}))

    def test_after_its_deadline_a_call_does_nothing(self, make_store: MakeStore) -> None:
        """After its deadline, a call reads and stores no page, reports each key as absent, and does not raise."""
        with _open(make_store) as store:
            store.put([(b"a", page(0))])
            past_s = time.monotonic() - 1
            assert store.put([(b"b", page(0))], deadline_s=past_s) == [False]
            assert store.get_into([b"a", b"b"], [page(2), page(2)], deadline_s=past_s) == [False, False]
            assert not store.contains([b"a", b"b"], deadline_s=past_s)[1]
            assert store.contains([b"a", b"b"], deadline_s=time.monotonic() + 60) == [True, False]
            assert all(_found(store, {b"a": page(0)}))

    def test_pages_may_lie_anywhere(self, make_store: MakeStore) -> None:
        """`put` and `get_into` accept pages in registered and other memory, at any offset, and change no byte outside
        of the page."""
        with _open(make_store) as store:
            for number in range(6):
                content, memory = page(number), np.zeros(2 * LARGE_BYTES, np.uint8)
                if number < 4:
                    store.register_memory(memory)
                key, view = b"%d" % number, memory[7 + number : 7 + number + len(content)]
                view[:] = content
                filled = memory.copy()
                assert store.put([(key, view)]) == [True]
                assert np.array_equal(memory, filled), "put changed its page"
                view[:] = 0
                assert store.get_into([key], [view]) == [True]
                assert np.array_equal(memory, filled), "get_into filled other bytes"

    def test_threads_read_during_writes(self, make_store: MakeStore) -> None:
        """While another thread puts and deletes, threads read only bytes that were put, and no call raises."""
        pages = {b"%d" % n: page(n) for n in range(24)}
        written = threading.Event()

        def read(seed: int) -> None:
            keys = random.Random(seed).sample(list(pages), len(pages))
            is_last = False
            while not is_last:
                is_last = written.is_set()
                _found(store, {key: pages[key] for key in keys})
                store.contains(keys)
                store.touch(keys[:3])

        with _open(make_store) as store, ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read, seed) for seed in range(3)]
            try:
                for item in pages.items():
                    store.put([item])
                store.delete([b"0", b"1"])
                store.put([(key, pages[key]) for key in (b"0", b"1")])
            finally:
                written.set()
            for reader in readers:
                reader.result()
            assert all(_found(store, pages))

    def test_it_counts(self, make_store: MakeStore) -> None:
        """The store counts hits, misses and pages written, does not write present keys again, and counts no failure."""
        with _open(make_store) as store:
            store.put([(b"a", page(0)), (b"b", page(2))])
            store.put([(b"a", page(0))])
            store.get_into([b"a", b"x", b"b"], [page(4), page(4), page(4)])
            store.get_into([b"x"], [page(4)])
            stats = store.stats()
            assert stats.puts == 2, f"2 pages were written, puts={stats.puts}"
            assert (stats.hits, stats.misses) == (2, 2), stats
            assert (stats.corrupt, stats.read_errors, stats.write_errors, stats.read_only) == (0, 0, 0, False), stats
            assert store.thread_read_errors() == 0 and store.reopen() is True

    def test_values_are_copied_as_they_are(self, make_store: MakeStore) -> None:
        """`put_values` stores the bytes that `get_value` returned: the store then has the same pages and values, also
        after it is closed and opened again. Keys that are present keep their value."""
        if not self.copies_values:
            return
        pages = {b"%d" % n: page(n) for n in range(6)}
        keys = list(pages)
        with _open(make_store) as store:
            assert store.put_values([]) == [] and store.get_value(b"absent") is None
            store.put(list(pages.items()))
            values = {key: store.get_value(key) or b"" for key in keys}
            assert store.delete(keys) == len(keys) and store.get_value(keys[0]) is None
            assert store.put_values(list(values.items())) == [True] * len(keys)
            assert all(_found(store, pages)) and {key: store.get_value(key) for key in keys} == values
            num_puts = store.stats().puts
            assert store.put_values([*values.items(), *values.items()]) == [True] * 2 * len(keys)
            assert store.stats().puts == num_puts and store.stats().corrupt == 0
            assert not store.stats().read_errors and not store.stats().write_errors
        if self.outlives_close:
            with _open(make_store) as store:
                assert all(_found(store, pages))

    def test_values_of_another_page_are_refused(self, make_store: MakeStore) -> None:
        """`put_values` refuses a value that is damaged, cut, empty or of another key, and stores the other values of
        the call."""
        if not self.copies_values:
            return
        with _open(make_store) as store:
            store.put([(b"a", page(0)), (b"b", page(2))])
            value, other = store.get_value(b"a") or b"", store.get_value(b"b") or b""
            store.delete([b"a", b"b"])
            wrong = [b"", value[:20], value[:-1], value + b"x", other, bytes(len(value))]
            wrong += [value[:n] + bytes([value[n] ^ 1]) + value[n + 1 :] for n in (0, 9, 30, len(value) - 1)]
            for each in wrong:
                assert store.put_values([(b"a", each), (b"b", other)]) == [False, True]
                assert store.contains([b"a", b"b"]) == [False, True] and store.get_value(b"a") is None
            assert store.put_values([(b"a", value)]) == [True] and all(_found(store, {b"a": page(0), b"b": page(2)}))
            for key in (b"", b"k" * 512):
                assert _raises(partial(store.get_value, key)) and _raises(partial(store.put_values, [(key, value)]))
        assert _raises(partial(store.get_value, b"a")) and _raises(partial(store.put_values, [(b"a", value)]))

    def test_another_identity_finds_nothing(self, make_store: MakeStore) -> None:
        """Opening another identity on the same medium raises, or finds no page and changes no page of the first one."""
        if not self.knows_identity:
            return
        with _open(make_store) as store:
            store.put([(b"a", page(0))])
        with contextlib.suppress(StoreMismatch), _open(make_store, {**IDENTITY, "model": "another"}) as other:
            assert other.contains([b"a"]) == [False] and other.get_into([b"a"], [page(2)]) == [False]
            assert other.put([(b"a", page(4))]) == [True]
            assert all(_found(other, {b"a": page(4)}))
        if self.outlives_close:
            with _open(make_store) as store:
                assert all(_found(store, {b"a": page(0)}))

    def test_pages_under_a_key_need_it(self, make_store: MakeStore) -> None:
        """A store refuses an encryption key, or returns no page to a store opened without this key."""
        if find_spec("cryptography") is None:
            return
        cipher, other = PageCipher(bytes(32)), PageCipher(bytes(range(32)))
        try:
            store = make_store(identity=IDENTITY, formats=FORMATS, cipher=cipher)
        except StoreError:
            return
        with contextlib.closing(store):
            assert store.put([(b"a", page(0))]) == [True]
            assert all(_found(store, {b"a": page(0)}))
        for wrong in (None, other):
            with contextlib.suppress(StoreError), _open(make_store, cipher=wrong) as store:
                assert store.get_into([b"a"], [page(2)]) == [False], (
                    "a page was read without the key that it was put with"
                )
        if self.outlives_close:
            with _open(make_store, cipher=cipher) as store:
                assert all(_found(store, {b"a": page(0)}))

    def test_what_was_stored_is_there(self, make_store: MakeStore) -> None:
        """A page for which `put` returned True can be read directly afterwards, even if the store is full."""
        content = np.random.default_rng(0).integers(0, 256, LARGE_BYTES + _NUM_FILLING).astype(np.uint8)
        with _open(make_store) as store:
            for n in range(_NUM_FILLING):
                key, one = b"%d" % n, content[n : n + LARGE_BYTES]
                assert store.put([(key, one)]) == _found(store, {key: one})

    def test_a_closed_store_is_closed(self, make_store: MakeStore) -> None:
        """A second `close` does nothing. After `close`, `stats` answers and all other calls raise `StoreError`."""
        store = make_store(identity=IDENTITY, formats=FORMATS, cipher=None)
        store.put([(b"a", page(0))])
        store.close()
        store.close()
        assert store.stats().puts == 1
        for call in (*_calls(store, b"a", page(2)), store.reopen):
            assert _raises(call), f"{call} does not raise after close"

    def test_histories_are_those_of_a_dict(self, make_store: MakeStore) -> None:
        """After each of many random calls, in batches or single, the store has the same pages as a dictionary, also
        after it is closed and opened again."""
        model: dict[bytes, PageBuffer] = {}
        for seed in range(_NUM_HISTORIES):
            draw = random.Random(seed)
            with _open(make_store) as store:
                for _ in range(_NUM_STEPS):
                    self._step(store, model, draw)
                store.sync()
                assert all(_found(store, model))
            if not self.outlives_close:
                model = {}

    def _step(self, store: PageStore, model: dict[bytes, PageBuffer], draw: random.Random) -> None:
        keys = [b"%d" % draw.randrange(_NUM_KEYS) for _ in range(draw.randrange(1, 6))]
        verb = draw.choice(("put", "put", "get", "delete", "touch"))
        print(verb, keys)  # pytest shows this output if a step fails
        if verb == "put":
            items = {key: page(draw.randrange(1000)) for key in keys}
            assert store.put(list(items.items()), lag=draw.choice((0.0, 0.6, 1.0))) == [True] * len(items)
            for key, content in items.items():
                model.setdefault(key, content)
        elif verb == "get":
            assert store.contains(keys) == [key in model for key in keys]
            requested = {key: model.get(key, page(0)) for key in keys}
            assert _found(store, requested) == [key in model for key in requested]
        elif verb == "delete":
            num_present = sum(model.pop(key, None) is not None for key in set(keys))
            assert store.delete(list(set(keys))) == num_present
            assert not any(store.contains(keys))
        else:
            store.touch(keys)


def page(number: int) -> PageBuffer:
    """Return a page for a number: even numbers have `SMALL_BYTES`, odd numbers `LARGE_BYTES`; some pages of either size
    are compressible."""
    generator = np.random.default_rng(number)
    num_bytes = LARGE_BYTES if number % 2 else SMALL_BYTES
    highest = (256, 4, 1)[number // 2 % 3]
    return generator.integers(number % 97, number % 97 + highest, num_bytes).astype(np.uint8)


def _found(store: PageStore, pages: Mapping[bytes, PageBuffer]) -> list[bool]:
    """Return, for each of `pages`, whether the store has it; asserts that each page that the store returns has the
    expected bytes."""
    buffers = [np.empty(len(content), np.uint8) for content in pages.values()]
    found = store.get_into(list(pages), buffers)
    for (key, content), buffer, hit in zip(pages.items(), buffers, found, strict=True):
        assert not hit or np.array_equal(buffer, content), f"wrong bytes under {key!r}"
    return found


@contextlib.contextmanager
def _open(
    make_store: MakeStore, identity: Mapping[str, str | int] = IDENTITY, cipher: PageCipher | None = None
) -> Iterator[PageStore]:
    with contextlib.closing(make_store(identity=identity, formats=FORMATS, cipher=cipher)) as store:
        yield store


def _calls(store: PageStore, key: bytes, buffer: PageBuffer) -> list[Callable[[], object]]:
    """Return every method that takes a key, bound to `key`."""
    return [
        partial(store.contains, [key]),
        partial(store.get_into, [key], [buffer]),
        partial(store.put, [(key, buffer)]),
        partial(store.delete, [key]),
        partial(store.touch, [key]),
    ]


def _raises(call: Callable[[], object]) -> bool:
    """Return whether the call raises StoreError."""
    try:
        call()
    except StoreError:
        return True
    return False
