"""What a stored page belongs to, and how its bytes are ordered before compression."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType

from hicache.config import EngineConfig
from hicache.errors import IdentityError
from hicache.kernels.pack import PackFormat
from hicache.layout import PoolLayout
from hicache.storage.filters import PageFilter

PAGE_FORMAT_VERSION = 1


def identity_of(
    config: EngineConfig, layouts: Mapping[str, PoolLayout], packed: Mapping[str, PackFormat] = MappingProxyType({})
) -> dict[str, str | int]:
    """Everything that decides whether stored bytes may serve this engine, readable, for the store's own record.

    The salt is part of the page keys only: tenants may share a store, never a page. `layouts`: by component; `packed`:
    of those whose pages are packed. IdentityError without a model_id.
    """
    if not config.model_id:
        raise IdentityError(
            "model_id is empty: pages could be served to another model; set it to a digest of the weights"
        )
    fields: dict[str, str | int] = {
        "model": config.model_id,
        "dtype": config.dtype,
        "layout": _digests(layouts),
        "page_tokens": config.cache_page_size,
        "parallel": "tp=1/0,pp=1/0",
        "format": PAGE_FORMAT_VERSION,
    }
    if packed:
        fields["packing"] = _packing(packed)
    return fields


def namespace_digest(
    config: EngineConfig, layouts: Mapping[str, PoolLayout], packed: Mapping[str, PackFormat] = MappingProxyType({})
) -> bytes:
    """The digest of identity and salt that seeds every page key.

    An engine without a disk may leave model_id empty; its keys never leave the process.
    """
    fields: dict[str, str | int] = {"salt": config.salt, "layout": _digests(layouts)}
    if packed:
        fields["packing"] = _packing(packed)
    if config.model_id:
        fields.update(identity_of(config, layouts, packed))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def page_filter(layout: PoolLayout, *, is_packed: bool = False) -> PageFilter:
    """The filter for host pages. Packed ones stay as they are: zstd would cost a processor a second for each 0.8 GB."""
    if is_packed:
        return PageFilter("uncompressed")
    # Where element widths differ, the smallest: a larger one would mix numbers of two buffers.
    return PageFilter("byte_shuffle", min(spec.dtype.itemsize for spec in layout.buffers))


def _packing(packed: Mapping[str, PackFormat]) -> str:
    """Bits and shares of escapes of each component."""
    return ",".join(
        f"{name}={format.bits}/{'/'.join(f'{share:g}' for share in format.escapes)}"
        for name, format in sorted(packed.items())
    )


def _digests(layouts: Mapping[str, PoolLayout]) -> str:
    """Of the layout of each component."""
    return ",".join(f"{name}={layout.digest().hex()}" for name, layout in sorted(layouts.items()))
