"""`hicache vllm-config`: prints the value of vLLM's flag `--kv-transfer-config` for a CPU tier and a disk.

The value names `HiCacheConnector`, the recommended plug-in, or `HiCacheOffloadingSpec` under vLLM's own connector.
Imports nothing of vLLM: the command also runs on another machine than the server.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hicache.config.settings import Integer, as_flag, settings_of
from hicache.console import parse_bytes, rounded
from hicache.host.memory import available_bytes, free_bytes
from hicache.integrations.server_flags import (
    STORE_PROCESS,
    add_disk_flags,
    disk_settings,
    note,
    note_disk,
)
from hicache.integrations.vllm.offloading_settings import OffloadingSettings, offloading_settings
from hicache.integrations.vllm.region_files import shared_bytes

_PLUGINS = "hicache.integrations.vllm"
_take_cpu = as_flag(settings_of(OffloadingSettings)["cpu_bytes_to_use"])
_CONNECTORS: dict[
    str, tuple[dict[str, str], dict[str, str]]
] = {  # by --plugin: keys of the connector, keys of its extra config
    "connector": ({"kv_connector": "HiCacheConnector", "kv_connector_module_path": _PLUGINS}, {}),
    "spec": (
        {"kv_connector": "OffloadingConnector"},
        {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": _PLUGINS},
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache vllm-config`."""
    parser.add_argument(
        "--cpu", required=True, type=_cpu, metavar="SIZE",
        help="CPU memory of all workers, like 64GB; free: seven eighths of the free memory",
    )  # fmt: skip
    add_disk_flags(parser, "vLLM", is_required=False)
    parser.add_argument(
        "--chunk-blocks", type=as_flag(Integer("blocks", 1, 1 << 16)), metavar="NUMBER",
        help="vLLM blocks of a chunk, the unit of copies and disk operations (default 1); 4 if blocks have 16 tokens, "
        "as on most GPUs; 1 for models with recurrent or sliding-window layers",
    )  # fmt: skip
    parser.add_argument(
        "--plugin", choices=[*_CONNECTORS], default="connector",
        help="connector (default): HiCacheConnector; spec: HiCacheOffloadingSpec, which stores chunks when they are "
        "computed",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Print the JSON in one line. Returns 0. Raises `ConfigError` for settings that vLLM's start would refuse."""
    disk = disk_settings(flags)
    print(json.dumps(transfer_config(flags.cpu, disk, flags.chunk_blocks, flags.plugin)))
    free, shared = available_bytes(), shared_bytes()
    num_bytes = free_bytes("--cpu", min(free, shared)) if flags.cpu == "free" else parse_bytes(flags.cpu)
    store_process = f", and {STORE_PROCESS}" if disk and "budget" in disk else ""  # behind a socket it runs elsewhere
    note(f"memory: {rounded(num_bytes)} in /dev/shm for the CPU tier{store_process}, in addition to vLLM's own")
    if flags.chunk_blocks is None:
        note(
            "without --chunk-blocks, a chunk is one block of vLLM. This is right for models with recurrent or "
            "sliding-window layers. If all layers have full attention and blocks have 16 tokens, add --chunk-blocks 4: "
            "vLLM then copies, looks up, reads and writes a quarter as many chunks"
        )
    elif flags.chunk_blocks & (flags.chunk_blocks - 1):
        note(
            f"chunks of {flags.chunk_blocks} blocks are not packed, because the tokens of a chunk must be a power of "
            "two: choose 1, 2, 4 or 8"
        )
    if flags.plugin == "spec":
        note(
            "HiCacheOffloadingSpec stores chunks when they are computed: the CPU tier adds no hits unless it is larger "
            "than the GPU cache, which vLLM logs as `GPU KV cache size`"
        )
    exceeds_memory = num_bytes > free
    if exceeds_memory:
        note(
            f"this machine has {rounded(free)} of free memory and {rounded(shared)} in /dev/shm: choose a smaller "
            "--cpu if vLLM runs on this machine"
        )
    if disk:
        note_disk(disk)
    if num_bytes > shared and not exceeds_memory:
        needed = f"{-(-num_bytes // 2**30)}G"  # tmpfs knows no unit like GB
        note(
            f"/dev/shm of this machine has {rounded(shared)} free, and vLLM's CPU tier would need "
            f"{rounded(num_bytes)}: raise it (mount -o remount,size={needed} /dev/shm, or --shm-size={needed} of a "
            "container)"
        )
    return 0


def _cpu(text: str) -> str:
    _take_cpu(text)
    return text


def transfer_config(
    cpu: str, disk: dict[str, Any] | None, chunk_blocks: int | None = None, plugin: str = "connector"
) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config`. `cpu`: a size with its unit, or "free". `disk`: its settings; None: no
    disk. `plugin`: "connector" or "spec". Raises `ConfigError` for wrong values."""
    connector, spec = _CONNECTORS[plugin]
    extra: dict[str, Any] = {**spec, "cpu_bytes_to_use": cpu}
    if chunk_blocks is not None:
        extra["blocks_per_chunk"] = chunk_blocks
    if disk is not None:
        extra["disk"] = disk
    offloading_settings(extra)
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
