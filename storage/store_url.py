"""Parses the URL of a store and its options. No message and no `repr` shows a user name or a password."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache.console import parse_bytes
from hicache.storage.base import StoreError

_SCHEME = r"[a-z][a-z0-9+.-]*(?=://)"
_UNIT = re.compile("_(bytes|s|url)$")
_MAX_NUMBER, _MAX_SECONDS = 1 << 53, 1_000_000  # limits of clients and servers
_HTTP_URL = re.compile(r"https?://(\[[\da-f:.]+\]|[\w.-]+)(:\d+)?(/[\w./~-]*)?", re.ASCII)
_MAX_SHOWN = 80


@dataclass(frozen=True)
class StoreUrl:
    """The parts of `scheme://user:password@host:port/path?options`, without percent-escapes; "" or None for a missing
    part."""

    scheme: str
    user: str = field(repr=False)
    password: str = field(repr=False)
    host: str
    port: int | None
    path: str
    given: Mapping[str, str]

    def __str__(self) -> str:
        """Return the URL without user, password and options."""
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{self.host}{port}{self.path}"

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL. Raises `StoreError`."""
        scheme = scheme_of(url)
        try:
            parts = urlsplit(url)
            host, port = unquote(parts.hostname or ""), parts.port
            host.encode("idna")
            query = parts.query.replace("+", "%2B")  # a plus sign means itself and not a space
            given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError:  # the message of this error may contain the password
            raise _unreadable(scheme) from None
        has_gaps = re.search(r"\s", url) or re.search(r"[\x00-\x1f\x7f]", unquote(url))
        if has_gaps or parts.fragment or "@" in parts.query or len(dict(given)) < len(given):
            raise _unreadable(scheme)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        # paths are decoded like file names of the operating system
        path = unquote(parts.path, errors="surrogateescape")
        return cls(scheme, user, password, host, port, path, dict(given))

    def options(self, **defaults: int | float | str) -> dict[str, Any]:
        """Return `defaults`, replaced by the options in the URL. The URL names an option without its unit, and the name
        and type of the default decide how it is parsed: `timeout_s=1.0` is `timeout`, a time in seconds above 0;
        `budget_bytes=1` is `budget`, a size like 8GiB; `endpoint_url=""` is `endpoint`, a URL of HTTP; other texts must
        not be empty. A number may be 0 only if its default is 0, or if the option is `level`. Raises `StoreError` for
        unknown options and bad values."""
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
                shown = "..." if "@" in text else repr(text[:_MAX_SHOWN])  # a text with "@" may contain a password
                raise StoreError(f"{option}={shown} in a URL of {self.scheme}: give {meaning}") from None
        return options


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case. Raises `StoreError`."""
    match = re.match(_SCHEME, url, re.IGNORECASE | re.ASCII)
    if match is None:
        raise StoreError("a store's URL begins with its scheme, like lmdb:///path or s3://bucket")
    return match[0].lower()


def _reader(name: str, default: float | str) -> tuple[Callable[[str], object], str]:
    """Return a function that parses the text of an option and raises ValueError for invalid text, and a description of
    valid values."""
    if isinstance(default, str):
        return (_http_url, "http://host:9000 or https://host") if name.endswith("_url") else (_not_empty, "text")
    least = 0 if not default or name == "level" else 1
    if name.endswith("_bytes"):
        return partial(_between, parse_bytes, least, _MAX_NUMBER), f"a size like 100GB or 8GiB, from {least} to 8192TiB"
    if isinstance(default, int):
        return partial(_between, int, least, _MAX_NUMBER), f"an integer from {least} to {_MAX_NUMBER}"
    return partial(_between, float, math.ulp(0.0), _MAX_SECONDS), f"a number of seconds above 0, at most {_MAX_SECONDS}"


def _between(read: Callable[[str], float], least: float, most: float, text: str) -> float:
    if not least <= read(text) <= most:
        raise ValueError(text)
    return read(text)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _http_url(text: str) -> str:
    if not _HTTP_URL.fullmatch(text) or urlsplit(text).port == 0:
        raise ValueError(text)
    return text


def _unreadable(scheme: str) -> StoreError:
    return StoreError(
        f"cannot read a URL of {scheme}: write it as {scheme}://user:password@host:port/path?name=value&name=value, "
        "each option once, with %XX for spaces, and for characters such as / ? # @ in a name or password"
    )
