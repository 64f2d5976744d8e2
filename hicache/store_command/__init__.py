"""`hicache store`: what an operator does to a store of pages, without an engine and without its model.

Owns the flags. May import storage, disk, config, errors and serving.interrupt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from hicache.config import MAX_STORE_BYTES
from hicache.serving.interrupt import CalmInterrupt
from hicache.settings import Size, Whole, as_flag
from hicache.store_command import verbs
from hicache.store_command.carry import STREAM
from hicache.store_command.console import Bars, Heard
from hicache.terminal import printable


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The verbs of `hicache store`, each with its flags."""
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add(commands, verbs.stat, "stat", "what a store holds; works beside a writer")

    listing = _add(commands, verbs.list_pages, "ls", "keys, sizes and codecs in use order; works beside a writer")
    limit = Whole("at most so many pages", minimum=1)
    listing.add_argument("--limit", type=as_flag(limit), metavar="N", help=limit.help)
    listing.add_argument("--newest", action="store_true", help="most recently used first (default: least recently)")
    _takes_key(listing)

    verifying = _add(commands, verbs.verify_pages, "verify", "read every page and index; status 1 when faults are left")
    verifying.add_argument("--repair", action="store_true", help="drop bad pages, build indexes anew")
    _takes_key(verifying)

    _takes_key(_add(commands, verbs.compact, "compact", "give free space back to the file system"))

    evicting = _add(commands, verbs.evict_pages, "evict", "drop the least recently used pages, then compact")
    _takes_size(evicting, "--to", "what the store may need, like 2GB; 0 empties it", required=True)
    _takes_key(evicting)

    exporting = _add(commands, verbs.export_pages, "export", "write all pages to an archive; works beside a writer")
    exporting.add_argument("file", metavar="FILE", help="the archive, - for the standard output")
    exporting.add_argument("--force", action="store_true", help="replace FILE if it exists")
    _takes_key(exporting)

    importing = _add(commands, verbs.import_pages, "import", "take pages from an archive; status 1 if some are refused")
    importing.add_argument("file", metavar="FILE", help="the archive, - for the standard input")
    _takes_size(importing, "--budget", "of a store that is made anew (default: the archive's)")
    _takes_size(importing, "--max-budget", "what an archive may ask for without --budget (default 64GiB)", 64 << 30)
    _takes_size(importing, "--max-page", "what a page of a new store may have (default 256MiB)", 256 << 20)
    _takes_key(importing)


def run(flags: argparse.Namespace) -> int:
    """Run one verb; returns the exit status. Raises what the verb raises."""
    with Heard() as heard, CalmInterrupt() as calm:
        outcome: verbs.Outcome = flags.run_verb(verbs.Task(flags, Bars(calm, wanted=not flags.json), heard))
    for message in heard.messages:
        print(printable(f"hicache: warning: {' '.join(message.split())}"), file=sys.stderr)
    text = json.dumps(outcome.figures) if flags.json else outcome.text
    streams_out = flags.verb == "export" and flags.file == STREAM
    if text:
        print(text, file=sys.stderr if streams_out else sys.stdout, flush=True)
    return outcome.status


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    run_verb: Callable[[verbs.Task], verbs.Outcome],
    name: str,
    help: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    parser.add_argument("path", metavar="DIR", help="the directory of the store")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run_verb=run_verb)
    return parser


def _takes_size(
    parser: argparse.ArgumentParser, flag: str, help: str, default: int | None = None, required: bool = False
) -> None:
    size = as_flag(Size(help, maximum=MAX_STORE_BYTES))
    parser.add_argument(flag, type=size, default=default, required=required, metavar="SIZE", help=help)


def _takes_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key-file", default="", metavar="FILE", help="key of an encrypted store, or HICACHE_DISK_KEY")
