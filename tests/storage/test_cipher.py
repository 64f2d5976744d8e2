"""The cipher of pages: only who has the key reads them, and only as they were stored; the key itself stays inside.

What a codec makes of an encrypted value: test_values.py.
"""

from __future__ import annotations

import copy

import pytest

from hicache.storage.base import StoreError
from hicache.storage.cipher import ENCRYPTION_BYTES, SCRATCH_SLACK_BYTES, PageCipher
from programs import output

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def test_ciphertext_is_tied_to_everything() -> None:
    """Bytes decrypt to what they were under the same key and context only; any flipped bit or cut is refused."""
    cipher, plain = PageCipher(KEY), bytes(range(100))
    scratch = memoryview(bytearray(len(plain) + SCRATCH_SLACK_BYTES))
    encrypted = bytes(cipher.encrypt(memoryview(plain), b"context", memoryview(bytearray(1000))))
    assert len(encrypted) == len(plain) + ENCRYPTION_BYTES
    decrypted = cipher.decrypt(memoryview(encrypted), b"context", scratch)
    assert decrypted is not None and bytes(decrypted) == plain
    for bit in range(8 * len(encrypted)):
        changed = bytearray(encrypted)
        changed[bit // 8] ^= 1 << bit % 8
        assert cipher.decrypt(memoryview(changed), b"context", scratch) is None
    for length in range(ENCRYPTION_BYTES, len(encrypted)):
        assert cipher.decrypt(memoryview(encrypted)[:length], b"context", scratch) is None
    assert cipher.decrypt(memoryview(encrypted), b"contexu", scratch) is None
    assert PageCipher(OTHER_KEY).decrypt(memoryview(encrypted), b"context", scratch) is None


def test_the_key_stays_inside() -> None:
    """Neither text nor copy of a cipher gives the key away; its public name is stable and another for another key."""
    cipher = PageCipher(KEY)
    assert cipher.key_id == "996e213e029e20fd" != PageCipher(OTHER_KEY).key_id
    assert repr(cipher) == str(cipher) == "PageCipher(key_id='996e213e029e20fd')"
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(StoreError):
            copied(cipher)


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(31), bytes(33), "x" * 32])
def test_wrong_keys_are_refused(key: bytes) -> None:
    """A key that is not 32 bytes is refused with a remedy that does not repeat it."""
    with pytest.raises(StoreError, match=r"os\.urandom") as caught:
        PageCipher(key)
    assert "xxx" not in str(caught.value)


def test_without_the_package() -> None:
    """Without cryptography building a cipher says what to install."""
    program = (
        "import sys; sys.modules['cryptography.hazmat.primitives.ciphers'] = None\n"
        "from hicache.storage import PageCipher, StoreError\n"
        "try:\n    PageCipher(bytes(32))\n"
        "except StoreError as error:\n    print(error)\n"
    )
    assert "pip install 'hicache[encrypt]'" in output(program)
