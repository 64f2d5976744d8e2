"""The release of vLLM installed in this process, and whether it has what a plug-in uses."""

from __future__ import annotations

from collections.abc import Callable

from hicache.integrations.versions import VLLM, release_name, require_features, require_overrides, warn_untested
from hicache.integrations.vllm.features import PLUG_INS


def vllm_release() -> str:
    """The release of vLLM in the identity of a store, like "0.32"; see `release_name`."""
    return release_name(_version(), VLLM)


def load_plug_in(name: str, load: Callable[[str], object]) -> object:
    """Return a public name of the package, which `load` imports. Raises `ConfigError` if this vLLM lacks a feature that
    the plug-in uses, or would call its methods with other arguments."""
    require_features("vLLM", _version(), VLLM, PLUG_INS[name])
    found = load(name)
    require_overrides("vLLM", _version(), VLLM, PLUG_INS[name], __name__.removesuffix("release"))
    return found


def warn_of_untested_vllm() -> None:
    """Log one warning if this release of vLLM was not tested. Called in the scheduler's process only."""
    warn_untested("vLLM", _version(), VLLM)


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)
