"""The tiers below memory as an engine sees them: identity and byte order of its pages, and the client of their
store."""

from hicache.config.secret import cipher_of, key_of
from hicache.stores.page_format import identity_of, namespace_digest, page_filter
from hicache.stores.tier import StoreTier, given_tier, open_tier

__all__ = [
    "StoreTier",
    "cipher_of",
    "given_tier",
    "identity_of",
    "key_of",
    "namespace_digest",
    "open_tier",
    "page_filter",
]
