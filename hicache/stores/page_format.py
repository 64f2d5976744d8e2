"""The identity of stored pages, and the reordering of their bytes before compression."""

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
    """Return the fields that decide whether an engine may use stored pages, in readable form for the store's record.

    The salt is not included, because it is part of each page key: tenants with different salts may share a store but
    never a page. `layouts`: the layout of each component. `packed`: the format of each component whose pages are
    packed. Raises IdentityError without a model_id.
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
    """Return the digest of identity and salt that seeds every page key.

    An engine without a store may leave model_id empty, because its keys never leave the process.
    """
    fields: dict[str, str | int] = {"salt": config.salt, "layout": _digests(layouts)}
    if packed:
        fields["packing"] = _packing(packed)
    if config.model_id:
        fields.update(identity_of(config, layouts, packed))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def page_filter(layout: PoolLayout, *, is_packed: bool = False) -> PageFilter:
    """Return the filter for host pages. Packed pages are not compressed, because zstd would need one second of CPU time
    for 0.8 GB."""
    if is_packed:
        return PageFilter("uncompressed")
    # If buffers differ in element width, the smallest width is used, because a larger width would join numbers of a
    # narrower buffer.
    return PageFilter("byte_shuffle", min(spec.dtype.itemsize for spec in layout.buffers))


def _packing(packed: Mapping[str, PackFormat]) -> str:
    """Return the exponent bits and the shares of escapes of each packed component, as text."""
    return ",".join(
        f"{name}={format.bits}/{'/'.join(f'{share:g}' for share in format.escapes)}"
        for name, format in sorted(packed.items())
    )


def _digests(layouts: Mapping[str, PoolLayout]) -> str:
    """Return the digest of each component's layout, as text."""
    return ",".join(f"{name}={layout.digest().hex()}" for name, layout in sorted(layouts.items()))
