"""What a store says of itself: the identity of its pages, and the settings it was last opened with.

Both are JSON in the table `meta`. The identity is compared at every opening: pages of another one are worthless. The
settings may change between openings; they are kept so that an operator can open a store without its engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import Durability, StoreCorrupt, StoreError, StoreMismatch
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat

FORMAT = 1
STORE_KEY, SETTINGS_KEY = b"store", b"settings"
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

    `page_sizes`: the sizes that pages may have, in bytes, ascending. `has_slots`: whether values are in slot files,
    which is decided when a store is created.
    """

    identity: Mapping[str, str | int]
    page_sizes: tuple[int, ...]
    has_slots: bool = False

    @property
    def key_id(self) -> str:
        """Id of the encryption key, "" for none."""
        return str(self.identity.get(KEY_ID_FIELD, ""))

    def pack(self) -> bytes:
        record = {"format": FORMAT, "identity": dict(self.identity), "page_bytes": self.page_sizes}
        return _canonical({**record, "slots": self.has_slots}).encode()

    @classmethod
    def unpack(cls, path: Path, raw: bytes | None) -> IdentityRecord:
        """Raises `StoreCorrupt`, and `StoreMismatch` for a format that this version does not read."""
        if raw is None:
            raise StoreCorrupt(f"the store {path} has lost its identity record; choose another disk path")
        unreadable = StoreCorrupt(f"the store {path} has an unreadable identity record; choose another disk path")
        try:
            fields = json.loads(bytes(raw))
            version = fields["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise unreadable from error
        if type(version) is not int or version < 1:
            raise unreadable
        if version != FORMAT:
            raise StoreMismatch(
                f"the store {path} has format {version}, this version reads {FORMAT}; "
                "update hicache or use another disk path"
            )
        identity, page_sizes, has_slots = (fields.get(name) for name in ("identity", "page_bytes", "slots"))
        if not isinstance(identity, dict) or not isinstance(has_slots, bool) or not _are_page_sizes(page_sizes):
            raise unreadable
        return cls(identity, tuple(page_sizes), has_slots)

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

    def pack(self) -> bytes:
        return _canonical(dataclasses.asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes | None, page_sizes: Sequence[int], budget_bytes: int) -> Settings:
        """The recorded settings; without a readable record the defaults, with `budget_bytes`."""
        unfiltered = [{"page_bytes": page_bytes, "filter": {}} for page_bytes in page_sizes]
        try:
            fields = {"budget_bytes": budget_bytes, "formats": unfiltered, **json.loads(bytes(raw or b"{}"))}
            fields["formats"] = tuple(
                PageFormat(format["page_bytes"], PageFilter(**format["filter"])) for format in fields["formats"]
            )
            recorded = cls(**fields)
        except (ValueError, TypeError, KeyError):
            recorded = cls(budget_bytes, ())
        if [format.page_bytes for format in recorded.formats] == list(page_sizes):
            return recorded
        return cls(budget_bytes, tuple(map(PageFormat, page_sizes)))


def sorted_formats(formats: Sequence[PageFormat]) -> tuple[PageFormat, ...]:
    """The formats by ascending page size. `StoreError` unless there are 1 to `MAX_FORMATS`, all of different sizes."""
    page_sizes = [format.page_bytes for format in formats]
    if not 1 <= len(formats) <= MAX_FORMATS or len(set(page_sizes)) < len(formats):
        raise StoreError(f"formats of {page_sizes} bytes: give 1 to {MAX_FORMATS}, each of another page size")
    return tuple(sorted(formats, key=lambda format: format.page_bytes))


def _are_page_sizes(page_sizes: Any) -> bool:
    """Whether a record may name these sizes: 1 to `MAX_FORMATS` positive lengths in ascending order."""
    return (
        isinstance(page_sizes, list)
        and 1 <= len(page_sizes) <= MAX_FORMATS
        and all(type(page_bytes) is int and page_bytes > 0 for page_bytes in page_sizes)
        and page_sizes == sorted(set(page_sizes))
    )


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
