"""The slot files of a store: one for each length of slot that a page of each size has needed so far."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hicache.storage.directory import slots_file, slots_files, sync_directory
from hicache.storage.records import StoreRecord
from hicache.storage.slot_file import BLOCK_BYTES, SlotFile, SlotLength

_NAME = re.compile(r"pages-(\d+)-(\d+)\.dat")


class SlotFiles:
    """The open files by the length of their slots; any thread, but only the writer makes new ones. OSError for what
    cannot be opened."""

    def __init__(self, path: Path, record: StoreRecord) -> None:
        self._path, self.record = path, record
        self._open: dict[SlotLength, SlotFile] = {}
        self._held = contextlib.ExitStack()
        try:
            for file in slots_files(path):
                found = _NAME.fullmatch(file.name)
                length = SlotLength(*map(int, found.groups())) if found else SlotLength(0, 0)
                longest = SlotLength.of(length.page_bytes, max(1, length.slot_bytes - BLOCK_BYTES))
                if length.page_bytes in record.page_sizes and length == longest:
                    self._open_one(length)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.close()

    def items(self) -> list[tuple[SlotLength, SlotFile]]:
        """All files, in order."""
        return sorted(self._open.items())

    def __getitem__(self, length: SlotLength) -> SlotFile:
        return self._open[length]

    def get(self, length: SlotLength) -> SlotFile | None:
        """The file with such slots; None where there is none."""
        return self._open.get(length)

    def make(self, length: SlotLength) -> SlotFile:
        """A new file for such slots, which outlives a power failure."""
        file = self._open_one(length)
        sync_directory(self._path)
        return file

    def disk_bytes(self) -> int:
        return sum(file.disk_bytes() for _, file in self.items())

    def num_slots(self) -> int:
        """How many slots the files reach into."""
        return sum(file.num_slots() for _, file in self.items())

    def _open_one(self, length: SlotLength) -> SlotFile:
        file = SlotFile(slots_file(self._path, *length), length.slot_bytes)
        self._open[length] = self._held.enter_context(contextlib.closing(file))
        return file
