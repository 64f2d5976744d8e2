"""Page keys: the names under which pages are known outside this process.

A page's key is a SHA-256 chain over an identity, a namespace and every token up to the page's end, so two pages share a
key only when model, layout, tenant and the whole prefix are the same:

    seed     = SHA-256(identity digest || namespace length, 8 bytes little endian || namespace, UTF-8)
    key[0]   = SHA-256(seed || tokens of page 0, int64 little endian)
    key[i]   = SHA-256(key[i-1] || tokens of page i)

May import numpy, layout, config and errors.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


def pack_tokens(tokens: npt.ArrayLike) -> Tokens:
    """Any sequence of token ids as one packed, contiguous int64 buffer; no copy when it already is one."""
    return np.ascontiguousarray(tokens, dtype=np.int64)


class PageHasher:
    """Computes page keys for one identity. Stateless but for `pages_hashed`; owned by the scheduler thread."""

    def __init__(self, identity_digest: bytes, page_size: int) -> None:
        self.page_size = page_size
        self.pages_hashed = 0
        self._identity = identity_digest

    def seed(self, namespace: str) -> bytes:
        raw = namespace.encode()
        return hashlib.sha256(self._identity + len(raw).to_bytes(8, "little") + raw).digest()

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        """Keys of the whole pages in `tokens`, given the key of the page before them (or the seed)."""
        step = self.page_size
        raw = tokens.astype("<i8", copy=False).view(np.uint8).data
        keys = []
        for start in range(0, len(tokens) - step + 1, step):
            previous = hashlib.sha256(previous + raw[start * 8 : (start + step) * 8]).digest()
            keys.append(previous)
        self.pages_hashed += len(keys)
        return keys
