"""The release of vLLM in this process."""

from __future__ import annotations

from hicache.integrations.versions import VLLM, require_version


def vllm_release() -> str:
    """Like "0.32". `ConfigError` for a release that is not in `VLLM`."""
    from vllm.version import __version__

    return require_version("vLLM", __version__, VLLM)
