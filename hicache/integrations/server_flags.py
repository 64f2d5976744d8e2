"""Flags and notes that `hicache vllm-config` and `hicache sglang-config` share: the disk, its salt and its key.

Imports nothing of a server: the commands also run on another machine than the server.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from hicache.config.settings import SOCKET, as_flag, settings_of
from hicache.console import parse_bytes, rounded, say
from hicache.errors import ConfigError
from hicache.integrations.server_store import ServerStoreConfig

STORE_PROCESS = "200 MB for the store process"  # without memory that it shares with the server
_PAGE_BYTES = 8 << 20  # 64 tokens of Llama 3.1 8B in bfloat16
_take_budget = as_flag(settings_of(ServerStoreConfig)["budget"])
_FORM = "an absolute path, a colon and the size of all its stores, like /nvme:500GB"
_SOCKET_FORM = "or unix:SOCKET of `hicache store serve`"


def add_disk_flags(parser: argparse.ArgumentParser, server: str, *, is_required: bool) -> None:
    """Add the flags of the disk. `server`: its name in the help."""
    parser.add_argument(
        "--disk", required=is_required, type=_disk, metavar="PATH:SIZE", help=f"{_FORM}; {_SOCKET_FORM}"
    )
    parser.add_argument(
        "--salt", default="", metavar="TEXT", help=f"separates tenants, or weights that {server} cannot read"
    )
    parser.add_argument("--key-file", default="", metavar="FILE", help="key that encrypts pages on disk")
    parser.add_argument(
        "--always-load", action="store_true",
        help="load all cached pages, without the comparison with the time of computing them",
    )  # fmt: skip


def disk_settings(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings of the disk that these flags give; None: no disk. Raises `ConfigError` for a flag of the disk
    without a disk."""
    if flags.disk is None:
        given = {"--salt": flags.salt, "--key-file": flags.key_file, "--always-load": flags.always_load}
        if of_disk := [name for name, value in given.items() if value]:
            raise ConfigError(f"{of_disk[0]} applies to the disk; add --disk PATH:SIZE")
        return None
    given = {"path": flags.disk[0], "budget": flags.disk[1], "salt": flags.salt, "key_file": flags.key_file}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value}
    return settings | ({"prefill_tokens_per_s": 0} if flags.always_load else {})


def note_disk(disk: dict[str, Any]) -> None:
    """Print a note for each of these faults on this machine. There is no key file. Nothing serves at the socket. The
    budget is less than a page of common models. The directory does not exist and would be on the root disk. The budget
    exceeds the free space. A directory that does not exist yet is on the disk of its closest parent that exists."""
    if "key_file" in disk and not Path(disk["key_file"]).exists():
        note(f"the key file {disk['key_file']} is not on this machine; the server's start needs it")
    if "budget" not in disk:
        served = disk["path"].removeprefix(SOCKET)
        if not _is_served(served):
            note(f"nothing serves a store at {served} on this machine; start `hicache store serve` before the server")
        return
    path, budget = Path(disk["path"]), parse_bytes(disk["budget"])
    if budget < _PAGE_BYTES:
        note(
            f"a budget of {disk['budget']} is less than a page of common models: 64 tokens of an 8B model take "
            f"{rounded(_PAGE_BYTES)}"
        )
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    space = f"{folder} of this machine has {rounded(free)} free"
    space += f", less than the budget of {disk['budget']}" if budget > free else ""
    if folder != path and os.stat(folder).st_dev == os.stat("/").st_dev:
        note(f"{path} does not exist on this machine: without a mount there, pages fill the root disk; {space}")
    elif budget > free:
        note(space)


def _is_served(path: str) -> bool:
    """Return whether a process listens at the Unix socket `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def note(text: str) -> None:
    """Print a note on stderr, so that the output has nothing but the value of the server's flag."""
    say(f"hicache: note: {text}")


def _disk(text: str) -> tuple[str, str]:
    if text.startswith(f"{SOCKET}/"):
        return text, ""  # the served directory has its own budget
    path, _, budget = text.rpartition(":")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!a} is not {_FORM}, {_SOCKET_FORM}")
    _take_budget(budget)
    return path, budget
