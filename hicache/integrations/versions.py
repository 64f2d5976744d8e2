"""Which releases of a server a plug-in works with. Interfaces of servers change between minor releases."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hicache.errors import ConfigError

VLLM = ("0.32", "0.33")
SGLANG = ("0.5.23",)


def require_version(server: str, version: str, tested: Sequence[str]) -> str:
    """The release of `version`, like "0.32" of "0.32.0+cpu". `tested`: those that are supported; one with three
    numbers, like "0.5.23", stands for itself and what comes before and after it, as 0.5.23rc1 and 0.5.23.post1.

    `ConfigError` for every other: better no start than wrong pages.
    """
    numbers = re.split(r"[^\d.]", version, maxsplit=1)[0].strip(".").split(".")
    for release in tested:
        if numbers[: len(release.split("."))] == release.split("."):
            return release
    raise ConfigError(
        f"{server} {version} was never tested with hicache, which supports {', '.join(tested)}; install one of these, "
        f"or a release of hicache that supports {server} {version}"
    )
