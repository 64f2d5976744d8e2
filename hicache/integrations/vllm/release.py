"""The release of vLLM installed in this process."""

from __future__ import annotations

from hicache.integrations.versions import VLLM, require_version


def vllm_release() -> str:
    """The release of vLLM, like "0.32". Raises `ConfigError` for a release that is not in `VLLM`."""
    from vllm.version import __version__

    return require_version("vLLM", __version__, VLLM)
