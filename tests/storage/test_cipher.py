"""The cipher of pages does not reveal its key. test_values.py tests how a codec decodes encrypted values."""

from __future__ import annotations

import copy
import sys

import pytest

from hicache.storage.base import StoreError
from hicache.storage.cipher import PageCipher

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def test_the_key_stays_inside() -> None:
    """Neither the text nor a copy of a cipher contains the key. The public name of a cipher is stable, and differs for
    another key."""
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


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package cryptography, creating a cipher raises an error that says what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(StoreError, match=r"pip install 'hicache\[encrypt\]'"):
        PageCipher(KEY)
