"""The release of vLLM in this process."""

from __future__ import annotations

from hicache.integrations.versions import require_version

TESTED = ("0.32", "0.33")


def vllm_release() -> str:
    """Like "0.32". `ConfigError` for a release that is not in `TESTED`."""
    from vllm.version import __version__

    return require_version("vLLM", __version__, TESTED)
