"""What a store says of itself: the identity that its pages belong to, and the settings it was last opened with.

Both are JSON in the table `meta`. The identity is compared at every opening: pages of another one are worthless. The
settings may change between openings; they are kept so that an operator can open a store without its engine. Owns both
records and the format's version. May import the standard library, base, cipher,
direct_read and filters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import Durability, StoreCorrupt, StoreError, StoreMismatch
from hicache.storage.cipher import PageCipher
from hicache.storage.direct_read import ALIGNMENT
from hicache.storage.filters import PageFilter

# 1 had no settings, and values of version 1; 2 has all values in its tables, 3 has them in slots. A program that knows
# only an older one must not open a newer: it would drop all pages.
READABLE_FORMATS = (1, 2, 3)
STORE_KEY, SETTINGS_KEY = b"store", b"settings"
KEY_ID_FIELD = "cipher_key"


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

    `slot_bytes`: size of a slot where values are kept in slots; 0 where they are in the tables. A store keeps to one
    from its making on.
    """

    identity: Mapping[str, str | int]
    page_bytes: int
    format: int = 2
    slot_bytes: int = 0

    @property
    def key_id(self) -> str:
        """Id of the key that the pages are encrypted with, "" for none."""
        return str(self.identity.get(KEY_ID_FIELD, ""))

    @property
    def current_format(self) -> int:
        """What this version writes for such a store."""
        return 3 if self.slot_bytes else 2

    def pack(self) -> bytes:
        record = {"format": self.current_format, "page_bytes": self.page_bytes, "identity": dict(self.identity)}
        return _canonical(record | ({"slot_bytes": self.slot_bytes} if self.slot_bytes else {})).encode()

    @classmethod
    def unpack(cls, path: Path, raw: bytes | None) -> IdentityRecord:
        """Raises `StoreCorrupt`, and `StoreMismatch` for a format that this version does not read."""
        if raw is None:
            raise StoreCorrupt(f"the store {path} has lost its identity record; choose another disk path")
        try:
            fields = json.loads(bytes(raw))
            version, page_bytes, identity = fields["format"], fields["page_bytes"], dict(fields["identity"])
            slot_bytes = fields.get("slot_bytes", 0)
        except (ValueError, TypeError, KeyError, AttributeError):
            version = page_bytes = slot_bytes = identity = None
        if not isinstance(version, int) or version < 1:
            raise StoreCorrupt(f"the store {path} has an unreadable identity record; choose another disk path")
        if version not in READABLE_FORMATS:
            raise StoreMismatch(
                f"the store {path} has format {version}, this version reads up to {READABLE_FORMATS[-1]}; "
                "update hicache or use another disk path"
            )
        lengths = isinstance(page_bytes, int) and page_bytes > 0 and isinstance(slot_bytes, int) and slot_bytes >= 0
        slots_fit = (
            lengths and not slot_bytes % ALIGNMENT and (page_bytes <= slot_bytes if version == 3 else not slot_bytes)
        )
        if not slots_fit or not isinstance(identity, dict):
            raise StoreCorrupt(f"the store {path} has an unreadable identity record; choose another disk path")
        return cls(identity, page_bytes, version, slot_bytes)

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
        return {**self.identity, "store.page_bytes": self.page_bytes}


@dataclass(frozen=True)
class Settings:
    """How a store was opened for writing the last time."""

    budget_bytes: int
    durability: Durability = "relaxed"
    level: int = 1
    filter: PageFilter = PageFilter()  # noqa: RUF009

    def pack(self) -> bytes:
        return _canonical(dataclasses.asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes | None, budget_bytes: int) -> Settings:
        """What was recorded. Nothing, or nothing readable: the defaults, with `budget_bytes`."""
        try:
            fields = json.loads(bytes(raw or b"{}"))
            how = PageFilter(**fields.pop("filter", {}))
            return cls(**{"budget_bytes": budget_bytes, **fields, "filter": how})
        except (ValueError, TypeError, AttributeError):
            return cls(budget_bytes)


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
