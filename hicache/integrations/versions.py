"""Which releases of a server a plug-in works with. Interfaces of servers change between minor releases."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.errors import ConfigError


def require_version(server: str, version: str, tested: Sequence[str]) -> str:
    """The minor release of `version`, like "0.32" of "0.32.0+cpu". `tested`: those that are supported; one with three
    numbers, like "0.5.23", stands for itself.

    `ConfigError` for every other: better no start than wrong pages.
    """
    numbers = version.split("+", maxsplit=1)[0].split(".")
    for release in tested:
        if numbers[: len(release.split("."))] == release.split("."):
            return release
    raise ConfigError(
        f"{server} {version} was never tested with hicache, which supports {', '.join(tested)}; install one of these, "
        f"or a release of hicache that supports {server} {version}"
    )
