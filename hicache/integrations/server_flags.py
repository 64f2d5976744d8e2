"""Flags and notes that `hicache vllm-config` and `hicache sglang-config` share: the disk, its salt and its key.

Imports nothing of a server: the commands also run on another machine than the server.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from hicache.config.settings import SOCKET
from hicache.console import parse_bytes, rounded, say
from hicache.errors import ConfigError

STORE_PROCESS = "200 MB for the store process"  # without memory that it shares with the server
_MIN_PLAIN_BYTES = 1 << 20  # a smaller number lacks its unit, because no tier is so small
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
    """Print a note if this machine lacks the key file, or if the budget exceeds the free space of the disk on this
    machine. A directory that does not exist yet is on the disk of its closest parent that exists."""
    if "key_file" in disk and not Path(disk["key_file"]).exists():
        note(f"the key file {disk['key_file']} is not on this machine; the server's start needs it")
    if "budget" not in disk:
        return  # a served directory, which may be on another machine
    folder = next(parent for parent in (Path(disk["path"]), *Path(disk["path"]).parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if parse_bytes(disk["budget"]) > free:
        note(f"{folder} of this machine has {rounded(free)} free, less than the budget of {disk['budget']}")


def size(text: str) -> str:
    """Return the text of a size with its unit, for argparse. Refuses a small number without a unit, such as 64."""
    try:
        num_bytes = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if num_bytes == 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0, like 64GB")
    if text.isdecimal() and num_bytes < _MIN_PLAIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} means {text} bytes; add a unit, like {text}GB")
    return text


def note(text: str) -> None:
    """Print a note on stderr, so that the output has nothing but the value of the server's flag."""
    say(f"hicache: note: {text}")


def _disk(text: str) -> tuple[str, str]:
    if text.startswith(f"{SOCKET}/"):
        return text, ""  # the served directory has its own budget
    path, _, budget = text.rpartition(":")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!a} is not {_FORM}, {_SOCKET_FORM}")
    return path, size(budget)
