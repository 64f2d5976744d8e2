"""What a stored page belongs to, and how its bytes are ordered before compression."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

from hicache.config import EngineConfig
from hicache.config.stores import Filter
from hicache.errors import ConfigError, IdentityError
from hicache.layout import PoolLayout
from hicache.storage.filters import PageFilter

PAGE_FORMAT_VERSION = 1


def identity_of(config: EngineConfig, layouts: Mapping[str, PoolLayout]) -> dict[str, str | int]:
    """Everything that decides whether stored bytes may serve this engine, readable, for the store's own record.

    The salt is part of the page keys only: tenants may share a store, never a page. `layouts`: by component.
    IdentityError without a model_id.
    """
    if not config.model_id:
        raise IdentityError(
            "model_id is empty: pages could be served to another model; set it to a digest of the weights"
        )
    return {
        "model": config.model_id,
        "dtype": config.dtype,
        "layout": _digests(layouts),
        "page_tokens": config.cache_page_size,
        "parallel": "tp=1/0,pp=1/0",
        "format": PAGE_FORMAT_VERSION,
    }


def namespace_digest(config: EngineConfig, layouts: Mapping[str, PoolLayout]) -> bytes:
    """The digest of identity and salt that seeds every page key.

    An engine without a disk may leave model_id empty; its keys never leave the process.
    """
    fields: dict[str, str | int] = {"salt": config.salt, "layout": _digests(layouts)}
    if config.model_id:
        fields.update(identity_of(config, layouts))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def page_filter(wanted: Filter, layout: PoolLayout, page_tokens: int) -> PageFilter:
    """The filter for host pages of `page_tokens` tokens.

    "auto" shuffles by the bytes of an element, which compresses nearly as well as shuffling by channels and
    decompresses twice as fast. ConfigError for channels unless every buffer is [page_tokens, channels] of one size.
    """
    widths = {spec.dtype.itemsize for spec in layout.buffers}
    rows = {(spec.per, math.prod(spec.shape)) for spec in layout.buffers}
    [(per, channels), *others] = rows
    uniform = len(widths) == 1 and not others and per == "token"
    if wanted == "none":
        return PageFilter()
    if wanted != "channel_byte_shuffle":
        # Where element widths differ, the smallest: a larger one would mix numbers of two buffers.
        return PageFilter("byte_shuffle", min(widths))
    if not uniform:
        raise ConfigError(
            "disk filter='channel_byte_shuffle' needs buffers of one shape, a row a token; set it to 'auto'"
        )
    return PageFilter("channel_byte_shuffle", widths.pop(), page_tokens, channels)


def _digests(layouts: Mapping[str, PoolLayout]) -> str:
    """Of the layout of each component."""
    return ",".join(f"{name}={layout.digest().hex()}" for name, layout in sorted(layouts.items()))
