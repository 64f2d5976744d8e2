"""One block of CPU memory, pinned once, from which all host pages are cut.

Owns the mapping and its registration with CUDA. Pinning goes by chunks of whole pages: a copy must not cross a chunk's
end, because CUDA registers each on its own. May import torch, host.memory, config and errors.
"""

from __future__ import annotations

import mmap

import torch

from hicache.errors import OutOfMemory
from hicache.host.memory import require

_CHUNK_BYTES = 4 << 30


class PinnedArena:
    """`rows` rows of `row_bytes` bytes: `data` is uint8 [rows, row_bytes], page-locked when `pin`.

    Built and closed by the engine's thread; copies into it come from transfer streams and disk readers.
    """

    def __init__(self, rows: int, row_bytes: int, *, pin: bool, knob: str = "host_bytes") -> None:
        total = rows * row_bytes
        require(total, knob)
        self.rows_per_chunk = max(1, _CHUNK_BYTES // row_bytes)
        self._map = mmap.mmap(-1, max(total, 1))
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._pinned: list[int] = []
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[:total].view(rows, row_bytes)
        if pin:
            self._pin(knob)

    def _pin(self, knob: str) -> None:
        runtime = torch.cuda.cudart()
        rows, row_bytes = self.data.shape
        for first in range(0, rows, self.rows_per_chunk):
            start = self.data.data_ptr() + first * row_bytes
            length = min(self.rows_per_chunk, rows - first) * row_bytes
            status = runtime.cudaHostRegister(start, length, 0)
            if int(status) != 0:
                self.close()
                raise OutOfMemory(
                    f"cannot pin {length} bytes of CPU memory ({status}); lower {knob} or raise ulimit -l"
                )
            self._pinned.append(start)

    def close(self) -> None:
        """Unpin. The memory itself goes with the last tensor that refers to it."""
        runtime = torch.cuda.cudart() if self._pinned else None
        for start in self._pinned:
            assert runtime is not None
            runtime.cudaHostUnregister(start)
        self._pinned.clear()
