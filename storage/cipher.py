"""Encryption of pages at rest: AES-256-GCM with one key per store.

An encrypted payload is a random nonce of 12 bytes for each value, the ciphertext, and a tag of 16 bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
from functools import partial
from typing import Any

from hicache.storage.base import StoreError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
ENCRYPTION_BYTES = NONCE_BYTES + TAG_BYTES  # bytes added to each payload
SCRATCH_SLACK_BYTES = 15  # `update_into` requires space for almost one more block than it fills
_KEY_ID_LABEL = b"hicache.storage page key"


class PageCipher:
    """Encrypts and decrypts payloads with one key; any threads concurrently.

    `key_id` names the key without revealing it: 16 hex digits of an HMAC-SHA-256 under the key.
    """

    def __init__(self, key: bytes) -> None:
        try:
            ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
            self._gcm: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers.modes").GCM
            self._invalid_tag: Any = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError:
            raise StoreError(
                "encrypted pages need cryptography of hicache[encrypt]: pip install 'hicache[encrypt]'"
            ) from None
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise StoreError(f"an encryption key is {KEY_BYTES} bytes; os.urandom({KEY_BYTES}) makes one")
        self._cipher: Any = partial(ciphers.Cipher, ciphers.algorithms.AES(key))
        self.key_id = hmac.new(key, _KEY_ID_LABEL, hashlib.sha256).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"PageCipher(key_id={self.key_id!r})"

    def __reduce__(self) -> str:
        raise StoreError(
            "a cipher contains a key and cannot be pickled; create another one from the key in the other process"
        )

    def encrypt(self, plain: memoryview, associated: bytes, target: memoryview) -> memoryview:
        """Encrypt `plain` into `target`. Returns a view of the start of `target` with nonce, ciphertext and tag. The
        view is `ENCRYPTION_BYTES` longer than `plain`.

        `associated` bytes are authenticated but not stored; decryption requires the same bytes.
        """
        nonce, end = os.urandom(NONCE_BYTES), len(plain) + ENCRYPTION_BYTES
        encryptor = self._cipher(self._gcm(nonce)).encryptor()
        encryptor.authenticate_additional_data(associated)
        encryptor.update_into(plain, target[NONCE_BYTES:])
        encryptor.finalize()
        target[:NONCE_BYTES], target[end - TAG_BYTES : end] = nonce, encryptor.tag
        return target[:end]

    def decrypt(self, encrypted: memoryview, associated: bytes, scratch: memoryview) -> memoryview | None:
        """Decrypt `encrypted` into `scratch`, and return the plaintext as a view of `scratch`. Returns None unless
        `encrypt` produced every bit of `encrypted` with this key.

        `encrypted` has at least `ENCRYPTION_BYTES`; `scratch` is `SCRATCH_SLACK_BYTES` longer than the plaintext.
        """
        nonce, tag = bytes(encrypted[:NONCE_BYTES]), bytes(encrypted[-TAG_BYTES:])
        decryptor = self._cipher(self._gcm(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(associated)
        num_bytes = decryptor.update_into(encrypted[NONCE_BYTES:-TAG_BYTES], scratch)
        try:
            decryptor.finalize()
        except self._invalid_tag:
            return None
        return scratch[:num_bytes]
