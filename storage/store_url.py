"""The URL of a store in parts, and its options. No message and no `repr` shows a user name or a password."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache.sizes import parse_bytes
from hicache.storage.base import StoreError

SCHEME = r"[a-z][a-z0-9+.-]*(?=://)"
_UNIT = re.compile("_(bytes|s|file)$")


@dataclass(frozen=True)
class StoreUrl:
    """`scheme://user:password@host:port/path?options` in parts, without percent-escapes; "" and None for what is not
    there."""

    scheme: str
    user: str = field(repr=False)
    password: str = field(repr=False)
    host: str
    port: int | None
    path: str
    given: Mapping[str, str]

    def __str__(self) -> str:
        """Without user, password and options."""
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{self.host}{port}{self.path}"

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Raises `StoreError`."""
        scheme = scheme_of(url)
        try:
            parts = urlsplit(url)
            host, port = unquote(parts.hostname or ""), parts.port
            host.encode("idna")
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        except ValueError:  # which would show what it could not read
            raise _unreadable(scheme) from None
        if parts.fragment or "@" in parts.query or len(dict(given)) < len(given):
            raise _unreadable(scheme)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(scheme, user, password, host, port, unquote(parts.path), dict(given))

    def options(self, **defaults: int | float | str) -> dict[str, Any]:
        """`defaults`, replaced by the options given. An option is named without its unit, and read as its default is:
        `timeout_s=1.0` is `timeout`, a time in seconds above 0, `budget_bytes=0` is `budget`, a size like 8GiB, other
        integers are at least 0, and text is taken as it is. Raises `StoreError` for unknown options and bad values."""
        names = {_UNIT.sub("", name): name for name in defaults}
        options: dict[str, Any] = dict(defaults)
        for option, text in self.given.items():
            if option not in names:
                known = ", ".join(sorted(names))
                raise StoreError(f"a URL of {self.scheme} has no option {option!r}; its options are {known}")
            name = names[option]
            read, meaning = _reader(name, defaults[name])
            try:
                options[name] = read(text)
            except ValueError:
                raise StoreError(f"{option}={text!r} in a URL of {self.scheme}: give {meaning}") from None
        return options


def scheme_of(url: str) -> str:
    """In lower case. Raises `StoreError`."""
    match = re.match(SCHEME, url, re.IGNORECASE | re.ASCII)
    if match is None:
        raise StoreError("a store's URL begins with its scheme, like lmdb:///path or redis://host")
    return match[0].lower()


def _reader(name: str, default: float | str) -> tuple[Callable[[str], object], str]:
    """How the text of an option is read, ValueError where it cannot be, and what it should be."""
    if name.endswith("_bytes"):
        return parse_bytes, "a size like 100GB or 8GiB"
    if isinstance(default, str):
        return str, "text"
    return (_seconds, "a number of seconds above 0") if isinstance(default, float) else (_whole, "a whole number")


def _whole(text: str) -> int:
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError(text)
    return float(text)


def _unreadable(scheme: str) -> StoreError:
    return StoreError(
        f"cannot read a URL of {scheme}: write it as {scheme}://user:password@host:port/path?name=value&name=value, "
        "each option once, with %XX for characters such as / ? # @ in a name or password"
    )
