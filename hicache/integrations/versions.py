"""The supported releases of each server. Interfaces of servers change between minor releases."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hicache.errors import ConfigError

VLLM = ("0.32", "0.33")
SGLANG = ("0.5.23",)


def require_version(server: str, version: str, tested: Sequence[str]) -> str:
    """Return the supported release that `version` belongs to, like "0.32" for "0.32.0+cpu".

    `tested`: the supported releases. A release of three numbers, like "0.5.23", includes its release candidates and
    post releases: 0.5.23rc1, 0.5.23.post1. Raises `ConfigError` for any other version, because an untested version
    might load wrong pages.
    """
    numbers = re.split(r"[^\d.]", version, maxsplit=1)[0].strip(".").split(".")
    for release in tested:
        if numbers[: len(release.split("."))] == release.split("."):
            return release
    raise ConfigError(
        f"{server} {version} was never tested with hicache, which supports {', '.join(tested)}; install one of these, "
        f"or a release of hicache that supports {server} {version}"
    )
