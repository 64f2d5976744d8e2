"""The tested releases of each server. An untested release causes one warning, and does not share stores with other
releases."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence

from hicache.errors import ConfigError
from hicache.integrations.probes import Features, missing_features, wrong_overrides

log = logging.getLogger(__name__)

VLLM = ("0.32", "0.33")
SGLANG = ("0.5.23",)
_MAX_NAMED = 3


def tested_release(version: str, tested: Sequence[str]) -> str | None:
    """Return the tested release that includes `version`, like "0.32" for "0.32.0+cpu"; None if no tested release
    includes it.

    A release of three numbers, like "0.5.23", includes its release candidates and post releases: 0.5.23rc1,
    0.5.23.post1.
    """
    numbers = re.split(r"[^\d.]", version, maxsplit=1)[0].strip(".").split(".")
    return next((release for release in tested if numbers[: len(release.split("."))] == release.split(".")), None)


def release_name(version: str, tested: Sequence[str]) -> str:
    """Return the release for the identity of a store. All patches of a tested release have one name. An untested
    release has a separate name, so no other release serves its pages. If the release is tested later, its name changes,
    and pages under the old name are not served any more."""
    return tested_release(version, tested) or f"{version} untested"


@functools.cache
def warn_untested(server: str, version: str, tested: tuple[str, ...]) -> None:
    """Log one warning in this process if the release was not tested."""
    if tested_release(version, tested) is None:
        log.warning(
            "%s %s was never tested with hicache; %s were. Its interface has all that hicache uses, so the plug-in "
            "runs, and keeps its pages in stores of its own. Compare some answers with those of a server without it",
            server,
            version,
            ", ".join(tested),
        )


def require_features(server: str, version: str, tested: Sequence[str], features: Sequence[Features]) -> None:
    """Raise `ConfigError` if the server lacks a feature."""
    _refuse(server, version, tested, missing_features(features))


def require_overrides(
    server: str, version: str, tested: Sequence[str], features: Sequence[Features], package: str
) -> None:
    """Raise `ConfigError` if a class of the plug-in's `package` does not match its base class in the server."""
    _refuse(server, version, tested, wrong_overrides(features, package))


def _refuse(server: str, version: str, tested: Sequence[str], missing: Sequence[str]) -> None:
    if missing:
        others = f", and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ConfigError(
            f"{server} {version} has not the interface that hicache uses: {'; '.join(missing[:_MAX_NAMED])}{others}. "
            f"Install {server} {' or '.join(tested)}, or a release of hicache that supports {server} {version}"
        )
