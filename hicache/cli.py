"""The command line: `hicache demo`, `hicache store`. Every error made on purpose is one line on stderr, exit status 2.

A command is a module with `add_flags(parser)` and `run(flags)`, loaded by name when it is called for: the demo's
imports take seconds, and what it needs, others need not have.

Exit status: 0 done, 1 the outcome of the demo is not identical or a store has faults, 2 wrong input, 130 interrupted.
May import everything.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn

from hicache.errors import ConfigError, HiCacheError
from hicache.storage.base import StoreError


@dataclass(frozen=True)
class _Command:
    module: str
    help: str
    description: str


_COMMANDS = {
    "demo": _Command(
        "hicache.serving.demo",
        "long conversations through device, host and disk, checked against a run without a cache",
        "Serve long documents over many turns with a device tier far too small for them, so that turns come back from "
        "device, host and disk; then serve the same prompts without any cache and compare every token.",
    ),
    "store": _Command(
        "hicache.store_command",
        "look after a store: stat, ls, verify, compact, evict, export, import",
        "Look at a store of pages, verify and mend it, shrink it, carry its pages elsewhere.",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and where the flags are listed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hicache: error: {message}; '{self.prog} --help' lists the flags\n")


def _parser(called: str | None) -> argparse.ArgumentParser:
    """The parser of all commands, with the flags of the one that is called."""
    parser = _Parser(
        prog="hicache",
        description="A hierarchical cache for the attention state (KV) of language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hicache {version('hicache')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        flags = commands.add_parser(name, help=command.help, description=command.description, allow_abbrev=False)
        if name == called:
            module = _load(command)
            module.add_flags(flags)
            flags.set_defaults(run=module.run)
    return parser


def _load(command: _Command) -> Any:
    """ConfigError where a package of the `serve` extra is missing."""
    try:
        return importlib.import_module(command.module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("transformers", "rich"):
            raise
        raise ConfigError(f"the demo needs the package {missing}: pip install 'hicache[serve]'") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Wrong flags and `--help` leave through SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        flags = _parser(next(iter(arguments), None)).parse_args(arguments)
        return int(flags.run(flags))
    except (HiCacheError, StoreError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("hicache: interrupted; what was stored stays", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"hicache: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
