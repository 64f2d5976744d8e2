"""Which file stands behind memory, as vLLM's CPU tier has one in /dev/shm whose name is gone."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile

import numpy as np

from hicache.integrations.vllm.shared_memory import descriptor_of

NUM_BYTES = 4 * mmap.PAGESIZE


def test_the_file_of_a_shared_mapping_is_found_by_its_memory() -> None:
    """Without a name too, so that another mapping of it has the same bytes; not from its middle, nor where it is
    private, nor where there is none."""
    with tempfile.TemporaryFile() as file:
        file.truncate(NUM_BYTES)
        shared, private = (
            np.frombuffer(mmap.mmap(file.fileno(), NUM_BYTES, flags=flags), dtype=np.uint8)
            for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
        )
        found = descriptor_of(shared)
        others = [shared[mmap.PAGESIZE :], private, np.zeros(NUM_BYTES, dtype=np.uint8)]
        assert [descriptor_of(memory) for memory in others] == [None] * 3
    assert found is not None
    with contextlib.closing(mmap.mmap(found, NUM_BYTES)) as again:
        shared[5] = 7
        assert again[5] == 7
    os.close(found)
