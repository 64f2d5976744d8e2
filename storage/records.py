"""The record of a store, store.json: the identity of its pages, and the settings with which the store was last opened.

The identity is compared at every opening, because pages of another identity are useless. The settings may change
between openings; they are recorded so that an operator can open a store without its engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hicache.storage.base import Durability, StoreCorrupt, StoreError, StoreMismatch
from hicache.storage.cipher import ENCRYPTION_BYTES, PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import NAMESPACE_BYTES
from hicache.storage.memory import round_up
from hicache.storage.slot_file import BLOCK_BYTES

FORMAT = 1
KEY_ID_FIELD = "cipher_key"
NAME_FIELD = "model_name"
# Fields that inform operators about the writer of the pages. Two identities that differ only in these fields count as
# equal.
RECORDED_FIELDS = {NAME_FIELD, "release", "device"}
MAX_FORMATS = 16


def identity_with_key(identity: Mapping[str, str | int], cipher: PageCipher | None) -> dict[str, str | int]:
    """Add the id of the encryption key to the identity if pages are encrypted."""
    return {**identity, **({KEY_ID_FIELD: cipher.key_id} if cipher else {})}


def decisive(identity: Mapping[str, str | int]) -> dict[str, str | int]:
    """Return the fields of an identity that determine the content of pages: all but `RECORDED_FIELDS`."""
    return {name: value for name, value in identity.items() if name not in RECORDED_FIELDS}


def namespace_digest(identity: Mapping[str, str | int]) -> bytes:
    """Return the SHA-256 of the decisive fields as canonical JSON. Every stored value contains the first 16 bytes of
    this digest."""
    return hashlib.sha256(_canonical(decisive(identity)).encode()).digest()


@dataclass(frozen=True)
class StoreRecord:
    """The identity of a store, and its settings when it was last opened for writing. `identity` includes the id of the
    encryption key; `formats` are sorted by page size."""

    identity: Mapping[str, str | int]
    formats: tuple[PageFormat, ...]
    budget_bytes: int
    durability: Durability = "relaxed"
    level: int = 1

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return tuple(format.page_bytes for format in self.formats)

    @property
    def key_id(self) -> str:
        """The id of the encryption key, "" for none."""
        return str(self.identity.get(KEY_ID_FIELD, ""))

    @property
    def namespace(self) -> bytes:
        """The first 16 bytes of the identity's digest, which every value of the store has in its header."""
        return namespace_digest(self.identity)[:NAMESPACE_BYTES]

    def max_slot_bytes(self, page_bytes: int) -> int:
        """Return the slot length in bytes of an uncompressed page of `page_bytes`."""
        return BLOCK_BYTES + round_up(page_bytes + (ENCRYPTION_BYTES if self.key_id else 0))

    def require(self, path: Path, expected: StoreRecord) -> None:
        """Raise `StoreMismatch` unless `expected` has the identity and the formats of this record. The message names
        both values of each field that differs."""
        # Each record becomes one flat dict. "store.page_bytes" is the last field, so an identity field of this name
        # cannot hide the page sizes.
        stored, configured = (
            {**decisive(one.identity), "store.page_bytes": list(one.page_sizes)} for one in (self, expected)
        )
        names = sorted(name for name in stored.keys() | configured.keys() if stored.get(name) != configured.get(name))
        if not names:
            return
        differences = "; ".join(f"{n}: stored {stored.get(n)!r}, now {configured.get(n)!r}" for n in names)
        remedy = "the key that it was made with" if names == [KEY_ID_FIELD] else "the same model and settings"
        raise StoreMismatch(
            f"the store {path} was made for other pages ({differences}); use another disk path, or {remedy}"
        )

    def pack(self) -> bytes:
        settings = dataclasses.asdict(self)
        record = {"format": FORMAT, "identity": dict(settings.pop("identity")), "settings": settings}
        return _canonical({**record, "xxh3_64": _checksum(record)}).encode()

    @classmethod
    def unpack(cls, name: str, raw: bytes) -> StoreRecord:
        """Parse a record. `name` names the record in messages. Raises `StoreCorrupt` if the record is damaged, and
        `StoreMismatch` if its format is newer than this version reads."""
        damaged = StoreCorrupt(f"{name} is damaged: its record cannot be read; remove the directory or choose another")
        try:
            content = json.loads(raw)
            checksum, version, settings = content.pop("xxh3_64"), content["format"], content["settings"]
            if type(version) is int and version > FORMAT:
                raise StoreMismatch(f"{name} has format {version}, this version reads {FORMAT}; update hicache")
            formats = tuple(PageFormat(one["page_bytes"], PageFilter(**one["filter"])) for one in settings["formats"])
            record = cls(content["identity"], **{**settings, "formats": formats})
            if version != FORMAT or checksum != _checksum(content) or not record._is_sound():
                raise damaged
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged from error
        return record

    def _is_sound(self) -> bool:
        """Return whether each field has a valid type and range. The checksum detects damage, but not invalid fields
        that another program wrote."""
        filters, sizes = [format.filter for format in self.formats], list(self.page_sizes)
        widths = (filter.element_bytes for filter in filters)
        numbers = (*sizes, self.budget_bytes, self.level, *widths)
        texts = (self.durability, *(filter.kind for filter in filters))
        return (
            bool(self.identity)
            and all(type(value) in (str, int) for value in self.identity.values())
            and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
            and all(isinstance(text, str) for text in texts)
            and 1 <= len(sizes) <= MAX_FORMATS
            and sizes == sorted(set(sizes))
            and sizes[0] > 0
        )


def sorted_formats(formats: Sequence[PageFormat]) -> tuple[PageFormat, ...]:
    """Sort formats by page size. Raises `StoreError` unless there are 1 to `MAX_FORMATS`, all of different sizes."""
    page_sizes = [format.page_bytes for format in formats]
    if not 1 <= len(formats) <= MAX_FORMATS or len(set(page_sizes)) < len(formats):
        raise StoreError(f"formats of {page_sizes} bytes: give 1 to {MAX_FORMATS}, each of another page size")
    return tuple(sorted(formats, key=lambda format: format.page_bytes))


def _checksum(record: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(_canonical(record).encode()))


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
