"""LMCache's own objects, keys and waiting, around an adapter of ours. Needs LMCache."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from waiting import eventually

SHAPE = torch.Size([2, 4, 64, 128])  # K and V, layers, tokens, channels


def adapter_spec(path: Path | str, /, **params: object) -> dict[str, Any]:
    """What a user writes after --l2-adapter."""
    return {
        "type": "plugin",
        "module_path": "hicache.integrations.lmcache.adapter",
        "class_name": "HiCacheL2Adapter",
        "adapter_params": {"path": str(path), "budget": "256MB", **params},
    }


def opened(spec: dict[str, Any]) -> L2AdapterInterface:
    """The adapter that LMCache makes of a spec."""
    return create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec))


def key_of(n: int, **changed: Any) -> ObjectKey:
    fields = {"chunk_hash": n.to_bytes(32, "big"), "model_name": "org/model", "kv_rank": 0x01000100}
    return ObjectKey(**{**fields, **changed})


def layout(shape: torch.Size = SHAPE, dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([shape], [dtype])


def memory(seed: int | None, shape: torch.Size = SHAPE, dtype: torch.dtype = torch.bfloat16) -> TensorMemoryObj:
    """An object of random bytes; of zeros without a seed."""
    num_bytes = shape.numel() * dtype.itemsize
    raw = torch.zeros(num_bytes, dtype=torch.uint8)
    if seed is not None:
        raw.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    meta = MemoryObjMetadata(
        shape=shape, dtype=dtype, address=0, phy_size=num_bytes, ref_count=1, fmt=MemoryFormat.KV_2LTD
    )
    return TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None)


def _wait(descriptor: int, take: Callable[[], Any]) -> Any:
    """What `take` gives, once the descriptor has said that there is something."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not (result := take()):
        eventually(lambda: poller.poll(0))
        consume_fd(descriptor)
    return result


def store(adapter: L2AdapterInterface, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> L2StoreResult:
    task_id = adapter.submit_store_task(list(keys), list(objects))
    return _wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task_id]


def look_up(adapter: L2AdapterInterface, keys: Sequence[ObjectKey], *layouts: MemoryLayoutDesc) -> list[int]:
    """The places of the keys that are found. `layouts`: of the groups, from 0 on."""
    task_id = adapter.submit_lookup_and_lock_task(list(keys), dict(enumerate(layouts or (layout(),))))
    return _places(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task_id))


def load(adapter: L2AdapterInterface, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> list[int]:
    """The places of the objects that were loaded."""
    task_id = adapter.submit_load_task(list(keys), list(objects))
    return _places(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task_id))


def _places(descriptor: int, take: Callable[[], Bitmap | None]) -> list[int]:
    found: list[Bitmap] = _wait(descriptor, lambda: [bitmap] if (bitmap := take()) is not None else [])
    return list(found[0].get_indices_list())


def loaded_seeds(adapter: L2AdapterInterface, numbers: Sequence[int], **changed: Any) -> list[int]:
    """Which of the objects of `numbers`, stored with these seeds under these keys, come back; their bytes are right."""
    objects = [memory(None) for _ in numbers]
    places = load(adapter, [key_of(n, **changed) for n in numbers], objects)
    for place in places:
        assert torch.equal(objects[place].raw_data, memory(numbers[place]).raw_data)
    return [numbers[place] for place in places]


def store_seeds(adapter: L2AdapterInterface, numbers: Sequence[int], **changed: Any) -> bool:
    result = store(adapter, [key_of(n, **changed) for n in numbers], [memory(n) for n in numbers])
    return bool(result.is_successful())
