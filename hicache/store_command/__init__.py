"""The command `hicache store`: an operator inspects and maintains a store of pages without an engine or a model."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Callable

from hicache.config.settings import Integer, Size, as_flag
from hicache.config.stores import MAX_STORE_BYTES
from hicache.console import path_flag, path_of, say
from hicache.process.logs import text_lines
from hicache.serving.interrupt import DeferredInterrupt
from hicache.storage.process.serve import serve
from hicache.storage.process.settings import BACKUPS, RemoteSettings
from hicache.storage.urls import disk_of
from hicache.store_command import commands, shared
from hicache.store_command.reporting import LogCapture, Steps
from hicache.store_command.smaller_budget import asks_on_terminal, confirm_smaller_budget

_MAX_SHARED_BYTES = 1 << 60
_SHARED_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.ASCII | re.IGNORECASE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `hicache store` with their flags."""
    subparsers = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    _add(subparsers, commands.stat, "stat", "contents of a store; of an open one, its record only")

    listing = _add(subparsers, commands.ls, "ls", "keys, sizes and codecs in use order")
    limit = Integer("maximum pages to list (default: all)", minimum=1)
    listing.add_argument("--limit", type=as_flag(limit), metavar="N", help=limit.help)
    listing.add_argument("--newest", action="store_true", help="most recently used first (default: least recently)")
    _takes_key(listing)

    verifying = _add(
        subparsers, commands.verify_pages, "verify", "read every page and index; status 1 when faults are left"
    )
    verifying.add_argument("--repair", action="store_true", help="delete bad pages, rebuild indexes")
    _takes_key(verifying)

    _takes_key(_add(subparsers, commands.compact, "compact", "return free space to the file system"))

    evicting = _add(subparsers, commands.evict_pages, "evict", "evict the least recently used pages, then compact")
    size = Size(
        "maximum disk space of the store with its unit, like 2GB; 0 empties it",
        maximum=MAX_STORE_BYTES,
        needs_unit=True,
    )
    evicting.add_argument("--to", type=as_flag(size), required=True, metavar="SIZE", help=size.help)
    _takes_key(evicting)

    pruning = _add(
        subparsers, commands.prune_stores, "prune", "remove complete stores of a path that no process has open"
    )
    days = Integer("remove stores that no engine has used for this many days; 0: all", minimum=0, maximum=36500)
    budget = Size(
        "of a shared store: remove the pages used longest ago until this size with its unit, like 20TB, is kept; 0: "
        "remove all pages",
        maximum=_MAX_SHARED_BYTES,
        needs_unit=True,
    )
    choice = pruning.add_mutually_exclusive_group()
    choice.add_argument("--unused-days", type=as_flag(days), metavar="N", help=days.help)
    choice.add_argument("--budget", type=as_flag(budget), metavar="SIZE", help=budget.help)
    pruning.add_argument("--model", metavar="NAME", help="remove stores of this model only, as `stat` names it")

    copying = _add(subparsers, commands.copy, "copy", "copy stores, also open ones, to another disk path; a backup")
    copying.add_argument("target", type=path_of, metavar="TARGET", help="the directory that gets the copies")

    rekeying = _add(subparsers, commands.rekey, "rekey", "encrypt every page with another key")
    _takes_key(rekeying)
    rekeying.add_argument("--new-key-file", required=True, metavar="FILE", help="the new key, in a form of --key-file")

    help = "serve a store to the engines and servers of this machine, until SIGTERM"
    serving = subparsers.add_parser("serve", help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    serving.add_argument("url", metavar="URL", help="the store, like lmdb:///var/lib/hicache?budget=100GiB")
    serving.add_argument("--remote", default="", metavar="URL", help="remote store, like s3://bucket/prefix")
    backup = (
        "pages that are copied to the remote store; used: pages that are used again or slow to compute (default: used)"
    )
    serving.add_argument("--backup", choices=BACKUPS, default="used", help=backup)
    serving.add_argument(
        "--socket",
        required=True,
        type=path_of,
        metavar="PATH",
        help="socket of the store; the disk path of an engine is then unix:PATH",
    )
    serving.add_argument(
        "--yes",
        action="store_true",
        help="evict pages without asking or waiting if the new budget is less than half of the last budget",
    )


def run(flags: argparse.Namespace) -> int:
    """Run one subcommand. Returns the exit status. Passes on the subcommand's exceptions."""
    if flags.verb == "serve":
        with text_lines("%(asctime)s %(levelname)s %(message)s", logging.INFO):
            at = disk_of(flags.url)
            if at is not None and not flags.yes:
                confirm_smaller_budget(*at, ask=asks_on_terminal())
            is_closed = serve(flags.url, flags.socket, RemoteSettings(flags.remote, flags.backup))
        if not is_closed:
            os._exit(0)  # the interpreter would wait for the threads that hang
        return 0
    with LogCapture() as log, DeferredInterrupt() as interrupt:
        progress = Steps(interrupt, is_shown=not flags.json)
        task = commands.Task(flags, progress, log)
        outcome = shared.run(task) if _SHARED_URL.match(flags.path) else flags.run_command(task)
    for message in log.messages:
        say(f"hicache: warning: {message}")
    text = json.dumps(outcome.stats) if flags.json else outcome.text
    if text:
        print(text, flush=True)
    return outcome.status


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    run_command: Callable[[commands.Task], commands.Outcome],
    name: str,
    help: str,
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    help = "the directory of the store, or of its path"
    if name in shared.COMMANDS:
        help = f"{help}, or the URL of a shared store, like dir:///mnt/shared/kv or s3://bucket/prefix"
    parser.add_argument("path", type=_path_or_url, metavar="DIR", help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run_command=run_command)
    return parser


def _path_or_url(text: str) -> str:
    return text if _SHARED_URL.match(text) else path_flag(text)


def _takes_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key-file", default="", metavar="FILE", help="key of an encrypted store, or HICACHE_DISK_KEY")
