"""The installed release of vLLM, and the check that this release has all features that a plug-in uses."""

from __future__ import annotations

from collections.abc import Callable

from hicache.integrations.versions import VLLM, release_name, require_features, require_overrides, warn_untested
from hicache.integrations.vllm.features import PLUG_INS


def vllm_release() -> str:
    """Return the release of vLLM in the identity of a store, for example "0.32"; see `release_name`."""
    return release_name(_version(), VLLM)


def load_plug_in(name: str, load: Callable[[str], object]) -> object:
    """Return the plug-in `name`, which `load` imports. Raises `ConfigError` if this vLLM lacks a feature that the
    plug-in uses, or would call methods of the plug-in with other arguments."""
    require_features("vLLM", _version(), VLLM, PLUG_INS[name])
    found = load(name)
    require_overrides("vLLM", _version(), VLLM, PLUG_INS[name], __name__.removesuffix("release"))
    return found


def warn_of_untested_vllm() -> None:
    """Log one warning if this release of vLLM was not tested. Call this function only in the scheduler's process."""
    warn_untested("vLLM", _version(), VLLM)


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)
