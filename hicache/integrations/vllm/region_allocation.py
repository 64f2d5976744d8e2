"""Maps vLLM's shared region without allocating its memory, which hicache's workers allocate with several threads.

vLLM allocates the complete region with one thread, first in the worker's process and again in the scheduler's process,
where the same memory pages are already allocated. The start of vLLM waits for both.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

from vllm.v1.kv_offload.cpu import shared_offload_region

_Populate = Callable[[mmap.mmap, int, int], None]


@contextlib.contextmanager
def without_allocation() -> Iterator[None]:
    """Within the `with` block, vLLM maps a region without allocating its memory; memory is allocated when it is
    written. A private function of vLLM is replaced, because the class of the region (vLLM 0.32, 0.33) has no parameter
    for this."""
    own = shared_offload_region._get_populate_write_fn
    shared_offload_region._get_populate_write_fn = _allocate_nothing
    try:
        yield
    finally:
        shared_offload_region._get_populate_write_fn = own


def _allocate_nothing(mapping: mmap.mmap) -> _Populate:
    return lambda mapping, offset, length: None
