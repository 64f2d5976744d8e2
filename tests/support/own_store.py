"""The function that opens a custom store, as docs/extending.md shows it."""

from hicache.storage import StoreError, StoreUrl
from memory_store import MemoryPageStore


def opener(url, *, identity, formats, cipher):
    if cipher is not None:
        raise StoreError("a store in memory does not encrypt pages; unset the key, or choose another store")
    return MemoryPageStore(**StoreUrl.parse(url).options(budget_bytes=1 << 30))
