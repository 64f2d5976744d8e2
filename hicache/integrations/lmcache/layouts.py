"""What the bytes of an LMCache object are, as far as LMCache says: the shapes and dtypes of the tensors in it.

LMCache gives them with the buffers of a store or a load, and as a hint with a lookup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache.storage import PageFilter, PageFormat

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

_SHUFFLED_BYTES = (2, 4, 8)


@dataclass(frozen=True)
class ObjectLayout:
    """`dtype` and `shape`: of the tensors in an object, in words; both are "" where LMCache did not say."""

    dtype: str
    shape: str

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype | None]) -> ObjectLayout:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        same = set(names[1:]) <= set(names[:1])
        return cls(",".join(names[:1] if same else names), ",".join(str(list(shape)) for shape in shapes))

    @classmethod
    def of_description(cls, description: MemoryLayoutDesc) -> ObjectLayout:
        return cls.of(description.shapes, description.dtypes)

    @property
    def is_serialized(self) -> bool:
        """Whether objects are what one of LMCache's serializers made, whose lookups tell of the layout before it."""
        return self.dtype == "uint8"


@dataclass(frozen=True)
class ObjectKind:
    """The objects that one store holds: of one model, one layout and one size."""

    model: str
    layout: ObjectLayout
    num_bytes: int

    @classmethod
    def of(cls, key: ObjectKey, memory: MemoryObj) -> ObjectKind:
        meta = memory.metadata
        layout = ObjectLayout.of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
        return cls(key.model_name, layout, memory.get_size())

    @classmethod
    def of_description(cls, model: str, description: MemoryLayoutDesc) -> ObjectKind:
        pairs = zip(description.shapes, description.dtypes, strict=True)
        num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in pairs)
        return cls(model, ObjectLayout.of_description(description), num_bytes)

    @classmethod
    def of_identity(cls, identity: Mapping[str, str | int]) -> ObjectKind:
        """The kind whose `identity` this is."""
        layout = ObjectLayout(str(identity["dtype"]), str(identity["layout"]))
        return cls(str(identity["model"]), layout, int(identity["object_bytes"]))

    def identity(self, server: str) -> dict[str, str | int]:
        """For the store's own record. The chunk size is part of the layout; rank and world size are part of the key."""
        return {
            "server": server,
            "model": self.model,
            "dtype": self.layout.dtype,
            "layout": self.layout.shape,
            "object_bytes": self.num_bytes,
        }

    def page_format(self) -> PageFormat:
        """Numbers of two bytes or more compress better by bytes of a rank; what a serializer made is left as it is."""
        widths = {getattr(torch, name).itemsize for name in self.layout.dtype.split(",") if name}
        width = min(widths, default=1)
        if width not in _SHUFFLED_BYTES or self.num_bytes % width:
            return PageFormat(self.num_bytes)
        return PageFormat(self.num_bytes, PageFilter("byte_shuffle", width))


def name_of(key: ObjectKey) -> bytes:
    """What tells an object from the others of its kind. LMCache allows no "@" in a salt."""
    fields = (f"{key.kv_rank:x}", f"{key.object_group_id:x}", key.cache_salt, key.chunk_hash.hex())
    return "@".join(fields).encode()
