"""What a stored page belongs to. Fail-closed: an identity that leaves something open cannot be built.

May import layout, config and errors.
"""

from __future__ import annotations

import hashlib
import json

from hicache.config import EngineConfig
from hicache.errors import IdentityError
from hicache.layout import PoolLayout

PAGE_FORMAT_VERSION = 1


def identity_of(config: EngineConfig, layout: PoolLayout) -> dict[str, str | int]:
    """Everything that decides whether stored bytes may serve this engine, readable, for the store's own record.

    The salt enters page keys only: tenants may share a store, never a page.
    """
    if not config.model_id:
        raise IdentityError(
            "model_id is empty: pages could be served to another model; set it to a digest of the weights"
        )
    return {
        "model": config.model_id,
        "dtype": config.dtype,
        "layout": layout.digest().hex(),
        "page_tokens": config.cache_page_size,
        "parallel": "tp=1/0,pp=1/0",
        "format": PAGE_FORMAT_VERSION,
    }


def namespace_digest(config: EngineConfig, layout: PoolLayout) -> bytes:
    """The digest that seeds every page key: the identity and the caller's salt.

    An engine without a disk may leave model_id empty; its keys never leave the process.
    """
    fields: dict[str, str | int] = {"salt": config.salt, "layout": layout.digest().hex()}
    if config.model_id:
        fields.update(identity_of(config, layout))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
