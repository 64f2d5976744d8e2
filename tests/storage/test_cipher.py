"""Encrypted pages: only who has the key reads them, and only as they were stored, where they were stored."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from hicache.storage.base import StoreError
from hicache.storage.cipher import ENCRYPTION_BYTES, SCRATCH_SLACK_BYTES, PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, associated_data
from storage_pages import WholeCodec, is_compressed, page_of, value_of

PAGE = 512
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
BYTE_SHUFFLE = PageFilter("byte_shuffle", 2)


def codec_of(key: bytes | None = KEY, level: int = 1, filter: PageFilter = BYTE_SHUFFLE) -> WholeCodec:
    cipher = None if key is None else PageCipher(key)
    return WholeCodec(PageFormat(PAGE, filter), b"n" * 16, level, cipher)


def with_right_checksum(key: bytes, value: bytes) -> bytes:
    """The value with the checksum that whoever changed it, without the cipher's key, would give it."""
    return value_of(key, value[:FIELD_BYTES], value[HEADER_BYTES:])


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


@pytest.mark.parametrize("kind", ["random", "normal", "flat"])
@pytest.mark.parametrize("level", [0, 1])
def test_roundtrip(level: int, kind: str) -> None:
    """What was encrypted, raw or compressed, decodes to the same bytes, and no value is larger than the codec says."""
    codec, page, back = codec_of(level=level), page_of(4, PAGE, kind), np.zeros(PAGE, dtype=np.uint8)
    value = codec.encode(b"key", page)
    assert codec.decode_into(b"key", value, back) == ""
    np.testing.assert_array_equal(back, page)
    assert len(value) <= codec.max_value_bytes
    assert is_compressed(value) or len(value) == codec.max_value_bytes


def test_nothing_shows() -> None:
    """A value holds no run of its page, and the same page under the same key is another value each time."""
    page = page_of(1, PAGE)
    values = {codec_of(level=0).encode(b"key", page) for _ in range(50)}
    assert len(values) == 50
    assert len({value[HEADER_BYTES : HEADER_BYTES + 12] for value in values}) == 50
    for value in values:
        assert not any(page[at : at + 8].tobytes() in value for at in range(PAGE - 8))


@pytest.mark.parametrize("level", [0, 1])
def test_a_forged_header_does_not_decrypt(level: int) -> None:
    """No changed bit of the header, under a checksum recomputed, and no changed payload byte yields a page."""
    codec, back = codec_of(level=level), np.empty(PAGE, dtype=np.uint8)
    value = codec.encode(b"key", page_of(0, PAGE, "flat"))
    assert is_compressed(value) == (level == 1)
    for at in range(len(value)):
        for bit in range(8):
            changed = bytearray(value)
            changed[at] ^= 1 << bit
            assert codec.decode_into(b"key", bytes(changed), back)
            if not FIELD_BYTES <= at < HEADER_BYTES:
                assert codec.decode_into(b"key", with_right_checksum(b"key", bytes(changed)), back)


def test_a_header_that_would_pass_does_not_decrypt() -> None:
    """Another filter, plausible in every rule, is refused by the cipher alone."""
    codec, back = codec_of(), np.empty(PAGE, dtype=np.uint8)
    value = bytearray(codec.encode(b"key", page_of(0, PAGE, "flat")))
    value[17] = 4  # element width
    reason = codec.decode_into(b"key", with_right_checksum(b"key", bytes(value)), back)
    assert reason == "page does not decrypt: changed, or of another key"


def test_a_moved_value_does_not_decrypt() -> None:
    """A value copied under another key, with a right checksum, is refused."""
    codec, back = codec_of(), np.empty(PAGE, dtype=np.uint8)
    value = codec.encode(b"mine", page_of(0, PAGE, "flat"))
    moved = with_right_checksum(b"yours", value)
    assert codec_of(None).verify_stored(b"yours", moved) == ""
    assert codec.decode_into(b"yours", moved, back) == "page does not decrypt: changed, or of another key"
    assert codec.decode_into(b"mine", value, back) == ""


def test_no_downgrade() -> None:
    """A plain value is refused where a key is set; an encrypted one where none or another is."""
    page, back = page_of(0, PAGE, "flat"), np.empty(PAGE, dtype=np.uint8)
    plain, secret = codec_of(None).encode(b"key", page), codec_of().encode(b"key", page)
    assert codec_of(None).decode_into(b"key", plain, back) == ""
    assert codec_of().decode_into(b"key", plain, back) == "unencrypted page in an encrypted store"
    assert codec_of().verify_stored(b"key", plain) == "unencrypted page in an encrypted store"
    assert codec_of(None).decode_into(b"key", secret, back) == "encrypted page; open the store with its key"
    assert codec_of(OTHER_KEY).decode_into(b"key", secret, back) == "page does not decrypt: changed, or of another key"


def test_integrity_without_the_key() -> None:
    """`verify_stored` without a cipher accepts intact encrypted values and finds every flipped byte and cut."""
    value, verifier = codec_of().encode(b"key", page_of(2, PAGE, "normal")), codec_of(None)
    assert verifier.verify_stored(b"key", value) == ""
    assert verifier.verify_stored(b"kex", value) == "checksum differs"
    for at in range(len(value)):
        changed = bytearray(value)
        changed[at] ^= 0x10
        assert verifier.verify_stored(b"key", bytes(changed))
        assert verifier.verify_stored(b"key", value[:at])


def test_checksum_is_over_the_stored_bytes() -> None:
    """The checksum of an encrypted value is XXH3_64 over the bytes as stored; key and fields are its seed."""
    value = codec_of().encode(b"key", page_of(2, PAGE, "normal"))
    stated = int.from_bytes(value[FIELD_BYTES:HEADER_BYTES], "little")
    seed = xxhash.xxh3_64_intdigest(b"\x03\x00key" + value[:FIELD_BYTES])
    assert stated == xxhash.xxh3_64_intdigest(value[HEADER_BYTES:], seed)
    assert associated_data(b"key", value[:FIELD_BYTES]) == b"\x03\x00key" + value[:FIELD_BYTES]


def test_the_key_stays_inside() -> None:
    """Neither text nor copy of a cipher gives the key away; its public name is stable and another for another key."""
    cipher = PageCipher(KEY)
    assert cipher.key_id == "996e213e029e20fd" != PageCipher(OTHER_KEY).key_id
    assert repr(cipher) == str(cipher) == "PageCipher(key_id='996e213e029e20fd')"
    with pytest.raises(StoreError, match="not to be copied"):
        copy.deepcopy(cipher)
    with pytest.raises(StoreError, match="not to be copied"):
        copy.copy(cipher)


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(31), bytes(33), "x" * 32])
def test_wrong_keys_are_refused(key: bytes) -> None:
    """A key that is not 32 bytes is refused with a remedy that does not repeat it."""
    with pytest.raises(StoreError, match=r"32 bytes; os\.urandom") as caught:
        PageCipher(key)
    assert "xxx" not in str(caught.value)


def test_without_the_package() -> None:
    """Without cryptography the package imports, and building a cipher says what to install."""
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from hicache.storage.cipher import PageCipher\n"
        "from hicache.storage.base import StoreError\n"
        "try:\n    PageCipher(bytes(32))\n"
        "except StoreError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "pip install 'hicache[encrypt]'" in done.stdout
