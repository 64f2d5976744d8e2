"""Maps vLLM's shared region without allocating its memory, which hicache's workers allocate with several threads.

vLLM allocates the complete region with one thread in each process that maps it: first the worker, then the scheduler,
which only maps the same memory pages again. A start of vLLM waits for both.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

from vllm.v1.kv_offload.cpu import shared_offload_region

_Populate = Callable[[mmap.mmap, int, int], None]


@contextlib.contextmanager
def without_allocation() -> Iterator[None]:
    """Within the block, a region of vLLM that this process maps has no memory until it is written. Its private function
    is replaced because the class of the region (0.32, 0.33) has no parameter for that."""
    own = shared_offload_region._get_populate_write_fn
    shared_offload_region._get_populate_write_fn = _allocate_nothing
    try:
        yield
    finally:
        shared_offload_region._get_populate_write_fn = own


def _allocate_nothing(mapping: mmap.mmap) -> _Populate:
    return lambda mapping, offset, length: None
