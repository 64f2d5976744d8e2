"""What a store says of itself: the identity that its pages belong to, and the settings it was last opened with.

Both are JSON in the table `meta`. The identity is compared at every opening: pages of another one are worthless. The
settings may change between openings; they are kept so that an operator can open a store without its engine. Owns both
records and the version of the format.
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


def sealed_identity(identity: Mapping[str, str | int], cipher: PageCipher | None) -> dict[str, str | int]:
    """The identity with the id of the key that its pages are encrypted with, if they are."""
    if KEY_ID_FIELD in identity:
        raise StoreError(f"an identity has no field {KEY_ID_FIELD!r} of its own; pass cipher instead")
    return {**identity, **({KEY_ID_FIELD: cipher.key_id} if cipher else {})}


def namespace_digest(identity: Mapping[str, str | int]) -> bytes:
    """SHA-256 over the identity as canonical JSON; its first 16 bytes go into every value."""
    return hashlib.sha256(_canonical(dict(identity)).encode()).digest()


@dataclass(frozen=True)
class IdentityRecord:
    """Whose pages a store holds. `identity` includes the key's id where they are encrypted.

    `page_sizes`: the sizes that pages may have, in bytes, ascending. `has_slots`: whether values are in slot files; a
    store keeps to one way from its making on.
    """

    identity: Mapping[str, str | int]
    page_sizes: tuple[int, ...]
    has_slots: bool = False

    @property
    def key_id(self) -> str:
        """Id of the key that the pages are encrypted with, "" for none."""
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
        if not isinstance(identity, dict) or not isinstance(has_slots, bool) or not _are_sizes(page_sizes):
            raise unreadable
        return cls(identity, tuple(page_sizes), has_slots)

    def require(self, path: Path, wanted: IdentityRecord) -> None:
        """Raises `StoreMismatch`, naming both sides of each difference, unless pages of `wanted` are what is stored."""
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
        """One level of names; the store's own fields cannot be hidden by the identity's."""
        return {**self.identity, "store.page_bytes": list(self.page_sizes)}


@dataclass(frozen=True)
class Settings:
    """How a store was opened for writing the last time. `formats` ascend by their page size."""

    budget_bytes: int
    formats: tuple[PageFormat, ...]
    durability: Durability = "relaxed"
    level: int = 1

    def pack(self) -> bytes:
        return _canonical(dataclasses.asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes | None, page_sizes: Sequence[int], budget_bytes: int) -> Settings:
        """What was recorded. Nothing, or nothing readable: the defaults, with `budget_bytes`."""
        plain = [{"page_bytes": page_bytes, "filter": {}} for page_bytes in page_sizes]
        try:
            fields = {"budget_bytes": budget_bytes, "formats": plain, **json.loads(bytes(raw or b"{}"))}
            fields["formats"] = tuple(
                PageFormat(one["page_bytes"], PageFilter(**one["filter"])) for one in fields["formats"]
            )
            recorded = cls(**fields)
        except (ValueError, TypeError, KeyError):
            recorded = cls(budget_bytes, ())
        if [one.page_bytes for one in recorded.formats] == list(page_sizes):
            return recorded
        return cls(budget_bytes, tuple(map(PageFormat, page_sizes)))


def formats_of(formats: Sequence[PageFormat]) -> tuple[PageFormat, ...]:
    """The formats by ascending size. `StoreError` unless there are 1 to `MAX_FORMATS`, all of different sizes."""
    page_sizes = [one.page_bytes for one in formats]
    if not 1 <= len(formats) <= MAX_FORMATS or len(set(page_sizes)) < len(formats):
        raise StoreError(f"formats of {page_sizes} bytes: give 1 to {MAX_FORMATS}, each of another page size")
    return tuple(sorted(formats, key=lambda one: one.page_bytes))


def _are_sizes(page_sizes: Any) -> bool:
    """Whether they are what a record may name: 1 to `MAX_FORMATS` lengths in ascending order."""
    return (
        isinstance(page_sizes, list)
        and 1 <= len(page_sizes) <= MAX_FORMATS
        and all(type(page_bytes) is int and page_bytes > 0 for page_bytes in page_sizes)
        and page_sizes == sorted(set(page_sizes))
    )


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
