"""What a store says of itself: the identity of its pages, and the settings it was last opened with.

Both are in the file store.json, as JSON. The identity is compared at every opening: pages of another one are worthless.
The settings may change between openings; they are kept so that an operator can open a store without its engine.
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
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import NAMESPACE_BYTES

FORMAT = 1
KEY_ID_FIELD = "cipher_key"
MAX_FORMATS = 16


def identity_with_key(identity: Mapping[str, str | int], cipher: PageCipher | None) -> dict[str, str | int]:
    """The identity, with the id of the encryption key if pages are encrypted."""
    if KEY_ID_FIELD in identity:
        raise StoreError(f"an identity has no field {KEY_ID_FIELD!r} of its own; pass cipher instead")
    return {**identity, **({KEY_ID_FIELD: cipher.key_id} if cipher else {})}


def identity_without_key(identity: Mapping[str, str | int]) -> dict[str, str | int]:
    """The identity, without the id of the encryption key."""
    return {name: value for name, value in identity.items() if name != KEY_ID_FIELD}


def namespace_digest(identity: Mapping[str, str | int]) -> bytes:
    """SHA-256 over the identity as canonical JSON; its first 16 bytes go into every value."""
    return hashlib.sha256(_canonical(dict(identity)).encode()).digest()


@dataclass(frozen=True)
class IdentityRecord:
    """Whose pages a store holds. `identity` includes the id of the encryption key.

    `page_sizes`: the sizes that pages may have, in bytes, ascending.
    """

    identity: Mapping[str, str | int]
    page_sizes: tuple[int, ...]

    @property
    def key_id(self) -> str:
        """Id of the encryption key, "" for none."""
        return str(self.identity.get(KEY_ID_FIELD, ""))

    @property
    def namespace(self) -> bytes:
        """What every value of the store carries."""
        return namespace_digest(self.identity)[:NAMESPACE_BYTES]

    def require(self, path: Path, wanted: IdentityRecord) -> None:
        """Raises `StoreMismatch`, naming both sides of each difference, unless `wanted` names the pages stored here."""
        theirs, ours = self._flat(), wanted._flat()
        names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if not names:
            return
        differences = "; ".join(f"{n}: stored {theirs.get(n)!r}, now {ours.get(n)!r}" for n in names)
        remedy = "the key that it was made with" if names == [KEY_ID_FIELD] else "the same model and settings"
        raise StoreMismatch(
            f"the store {path} was made for something else ({differences}); use another disk path, or {remedy}"
        )

    def _flat(self) -> dict[str, Any]:
        """One level of names; no field of the identity can hide the store's own."""
        return {**self.identity, "store.page_bytes": list(self.page_sizes)}


@dataclass(frozen=True)
class Settings:
    """How a store was last opened for writing. `formats` ascend by page size."""

    budget_bytes: int
    formats: tuple[PageFormat, ...]
    durability: Durability = "relaxed"
    level: int = 1


def pack_store(identity: IdentityRecord, settings: Settings) -> bytes:
    """The content of store.json."""
    record = {"format": FORMAT, "identity": dict(identity.identity), "settings": dataclasses.asdict(settings)}
    return _canonical({**record, "xxh3_64": _checksum(record)}).encode()


def unpack_store(name: str, raw: bytes) -> tuple[IdentityRecord, Settings]:
    """The records that `name`, for messages, holds. Raises `StoreCorrupt`, and `StoreMismatch` for a format that this
    version does not read."""
    damaged = StoreCorrupt(f"{name} is damaged: its record cannot be read; remove the directory or choose another one")
    try:
        record = json.loads(raw)
        version, checksum = record["format"], record.pop("xxh3_64")
        if type(version) is int and version > FORMAT:
            raise StoreMismatch(f"{name} has format {version}, this version reads {FORMAT}; update hicache")
        fields = record["settings"]
        formats = tuple(PageFormat(one["page_bytes"], PageFilter(**one["filter"])) for one in fields["formats"])
        settings = Settings(**{**fields, "formats": formats})
        identity = IdentityRecord(record["identity"], tuple(format.page_bytes for format in formats))
        if version != FORMAT or checksum != _checksum(record) or not _is_sound(identity, settings):
            raise damaged
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged from error
    return identity, settings


def sorted_formats(formats: Sequence[PageFormat]) -> tuple[PageFormat, ...]:
    """The formats by ascending page size. `StoreError` unless there are 1 to `MAX_FORMATS`, all of different sizes."""
    page_sizes = [format.page_bytes for format in formats]
    if not 1 <= len(formats) <= MAX_FORMATS or len(set(page_sizes)) < len(formats):
        raise StoreError(f"formats of {page_sizes} bytes: give 1 to {MAX_FORMATS}, each of another page size")
    return tuple(sorted(formats, key=lambda format: format.page_bytes))


def _is_sound(identity: IdentityRecord, settings: Settings) -> bool:
    """Whether each field has its type and range: the checksum detects damage, not what another program wrote."""
    filters = [format.filter for format in settings.formats]
    shapes = (number for filter in filters for number in (filter.element_bytes, filter.tokens, filter.channels))
    numbers = (*identity.page_sizes, settings.budget_bytes, settings.level, *shapes)
    texts = (settings.durability, *(filter.kind for filter in filters), *identity.identity)
    sizes = list(identity.page_sizes)
    return (
        bool(identity.identity)
        and all(type(value) in (str, int) for value in identity.identity.values())
        and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and 1 <= len(sizes) <= MAX_FORMATS
        and sizes == sorted(set(sizes))
        and sizes[0] > 0
    )


def _checksum(record: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(_canonical(record).encode()))


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
