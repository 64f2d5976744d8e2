"""`hicache vllm-config`: prints the value of vLLM's flag `--kv-transfer-config` for a CPU tier and a disk.

The value names `HiCacheConnector`, the recommended plug-in, or `HiCacheOffloadingSpec` under vLLM's own connector.
Imports nothing of vLLM: the command also runs on another machine than the server.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hicache.config.settings import Integer, as_flag
from hicache.console import parse_bytes, say, sized
from hicache.errors import ConfigError
from hicache.integrations.vllm.offloading_settings import offloading_settings
from hicache.integrations.vllm.region_files import shared_bytes

_PLUGINS = "hicache.integrations.vllm"
_CONNECTORS: dict[
    str, tuple[dict[str, str], dict[str, str]]
] = {  # by --plugin: keys of the connector, keys of its extra config
    "connector": ({"kv_connector": "HiCacheConnector", "kv_connector_module_path": _PLUGINS}, {}),
    "spec": (
        {"kv_connector": "OffloadingConnector"},
        {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": _PLUGINS},
    ),
}
_FORM = "an absolute path, a colon and the size of all its stores, like /nvme:500GB"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache vllm-config`."""
    parser.add_argument("--cpu", required=True, type=_size, metavar="SIZE", help="CPU memory of all workers, like 64GB")
    parser.add_argument("--disk", type=_disk, metavar="PATH:SIZE", help=_FORM)
    parser.add_argument(
        "--salt", default="", metavar="TEXT", help="separates tenants, or weights that vLLM cannot read"
    )
    parser.add_argument("--key-file", default="", metavar="FILE", help="key that encrypts pages on disk")
    parser.add_argument(
        "--chunk-blocks", type=as_flag(Integer("blocks", 1, 1 << 16)), metavar="NUMBER",
        help="vLLM blocks of a chunk, the unit of copies and disk operations (default 1); 4 if blocks have 16 tokens, "
        "as on most GPUs; 1 for hybrid models",
    )  # fmt: skip
    parser.add_argument(
        "--plugin", choices=[*_CONNECTORS], default="connector",
        help="connector (default): HiCacheConnector; spec: HiCacheOffloadingSpec, with vLLM's order of stores",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Print the JSON in one line. Returns 0. Raises `ConfigError` for settings that vLLM's start would refuse."""
    if flags.disk is None and (flags.salt or flags.key_file):
        raise ConfigError(f"--{'salt' if flags.salt else 'key-file'} applies to the disk; add --disk PATH:SIZE")
    config = transfer_config(flags.cpu, flags.disk, flags.salt, flags.key_file, flags.chunk_blocks, flags.plugin)
    print(json.dumps(config))
    num_bytes, shared = parse_bytes(flags.cpu), shared_bytes()
    if num_bytes > shared:
        size = f"{-(-num_bytes // 2**30)}G"  # tmpfs knows no unit like GB
        say(
            f"hicache: note: /dev/shm of this machine has {sized(shared)} free, and vLLM's CPU tier would need "
            f"{sized(num_bytes)}: raise it (mount -o remount,size={size} /dev/shm, or --shm-size={size} of a container)"
        )
    return 0


def transfer_config(
    cpu: str,
    disk: tuple[str, str] | None,
    salt: str = "",
    key_file: str = "",
    chunk_blocks: int | None = None,
    plugin: str = "connector",
) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config`. `cpu`: a size with its unit. `disk`: path and budget; None: no disk.
    `plugin`: "connector" or "spec". Raises `ConfigError` for wrong values."""
    connector, spec = _CONNECTORS[plugin]
    extra: dict[str, Any] = {**spec, "cpu_bytes_to_use": cpu}
    if chunk_blocks is not None:
        extra["blocks_per_chunk"] = chunk_blocks
    if disk is not None:
        given = {"path": disk[0], "budget": disk[1], "salt": salt, "key_file": key_file}
        extra["disk"] = {name: value for name, value in given.items() if value}
    offloading_settings(extra)
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _disk(text: str) -> tuple[str, str]:
    path, _, budget = text.rpartition(":")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!a} is not {_FORM}")
    return path, _size(budget)
