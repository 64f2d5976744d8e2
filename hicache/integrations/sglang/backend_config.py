"""`hicache sglang-config`: prints the value of SGLang's flag `--hicache-storage-backend-extra-config` for a disk.

The value names `HiCacheDisk`, the storage backend. Imports nothing of SGLang: the command also runs on another machine
than the server.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hicache.integrations.server_flags import STORE_PROCESS, add_disk_flags, disk_settings, note, note_disk
from hicache.integrations.server_store import server_store_config

_LOADED = {
    "backend_name": "hicache",
    "module_path": "hicache.integrations.sglang.storage",
    "class_name": "HiCacheDisk",
    "interface_v1": 1,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache sglang-config`."""
    add_disk_flags(parser, "SGLang", is_required=True)


def run(flags: argparse.Namespace) -> int:
    """Print the JSON in one line. Returns 0. Raises `ConfigError` for settings that SGLang's start would refuse."""
    disk = disk_settings(flags) or {}
    print(json.dumps(backend_config(disk)))
    store = f"{STORE_PROCESS} and 200 MB for pages on their way to it"
    if "budget" not in disk:  # the store process of a served directory runs elsewhere
        store = "200 MB for pages on their way to the served store"
    note(f"memory: for each rank {store}, in addition to SGLang's host pools")
    note_disk(disk)
    return 0


def backend_config(disk: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's `--hicache-storage-backend-extra-config`. Raises `ConfigError` for wrong settings of the disk."""
    server_store_config(disk, "--disk")
    return {**_LOADED, **disk}
