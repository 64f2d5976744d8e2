"""Pages encrypted at rest: AES-256-GCM, one key for a whole store.

A sealed payload is a nonce of 12 bytes, drawn anew for each value, the encrypted bytes, and a tag of 16. Owns the key
while the store is open. May import cryptography (optional), numpy, the standard library, base and packages.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.packages import cipher_algorithms, cipher_modes, ciphers, crypto_errors

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
# `update_into` wants room for one more block than it fills.
SLACK_BYTES = 15
_KEY_ID_LABEL = b"hicache.storage page key"


class PageCipher:
    """A key and what is done with it; any thread, many at a time.

    `key_id` names the key and tells nothing about it: 16 hex digits of an HMAC-SHA-256 under the key.
    """

    def __init__(self, key: bytes) -> None:
        if ciphers is None:
            raise StoreError("encrypted pages need the package cryptography: pip install 'hicache[encrypt]'")
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise StoreError(f"an encryption key is {KEY_BYTES} bytes; os.urandom({KEY_BYTES}) makes one")
        self._algorithm = cipher_algorithms.AES(key)
        self.key_id = hmac.new(key, _KEY_ID_LABEL, hashlib.sha256).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"PageCipher(key_id={self.key_id!r})"

    def __reduce__(self) -> str:
        raise StoreError("a cipher holds a key and is not to be copied out of the process; build it from the key there")

    def seal(self, plain: bytes | memoryview, bound_to: bytes, scratch: PageBuffer) -> tuple[bytes, memoryview, bytes]:
        """Nonce, encrypted bytes and tag of `plain`; the middle one lies in `scratch` and is valid until its next use.

        `bound_to` is not stored, and unsealing demands the same. `scratch`: uint8, `SLACK_BYTES` more than `plain`.
        """
        nonce = os.urandom(NONCE_BYTES)
        encryptor = ciphers.Cipher(self._algorithm, cipher_modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(bound_to)
        num_bytes = encryptor.update_into(plain, scratch.data)
        encryptor.finalize()
        return nonce, scratch.data[:num_bytes], encryptor.tag

    def unseal(self, sealed: memoryview, bound_to: bytes, scratch: PageBuffer) -> memoryview | None:
        """The plain bytes, in `scratch` until its next use; None unless every bit is what `seal` made under this key.

        `sealed` has at least `SEAL_BYTES`; `scratch` has room for the rest and `SLACK_BYTES`.
        """
        nonce, tag = bytes(sealed[:NONCE_BYTES]), bytes(sealed[-TAG_BYTES:])
        decryptor = ciphers.Cipher(self._algorithm, cipher_modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(bound_to)
        num_bytes = decryptor.update_into(sealed[NONCE_BYTES:-TAG_BYTES], scratch.data)
        try:
            decryptor.finalize()
        except crypto_errors.InvalidTag:
            return None
        return scratch.data[:num_bytes]
