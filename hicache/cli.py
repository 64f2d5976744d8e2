"""The command line: `hicache demo`, `hicache store`. Every error made on purpose is one line on stderr, exit status 2.

Exit status: 0 done, 1 the outcome of the demo is not identical or a store has faults, 2 wrong input, 130 interrupted.
May import everything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from hicache import store_command
from hicache.errors import HiCacheError
from hicache.storage.base import StoreError

try:
    from hicache.serving import demo
except ImportError as error:
    if error.name is None or error.name.split(".")[0] not in ("transformers", "rich"):
        raise
    _missing: str | None = error.name.split(".")[0]
else:
    _missing = None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and where the flags are listed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hicache: error: {message}; '{self.prog} --help' lists the flags\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hicache",
        description="A hierarchical cache for the attention state (KV) of language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hicache {version('hicache')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "demo",
        help="long conversations through device, host and disk, checked against a run without a cache",
        description=(
            "Serve long documents over many turns with a device tier far too small for them, so that turns come back "
            "from device, host and disk; then serve the same prompts without any cache and compare every token."
        ),
        allow_abbrev=False,
    )
    if _missing is None:
        demo.add_flags(serve)
        serve.set_defaults(run=demo.run)
    store = commands.add_parser(
        "store",
        help="look after a store: stat, ls, verify, compact, evict, export, import",
        description="Look at a store of pages, verify and mend it, shrink it, carry its pages elsewhere.",
        allow_abbrev=False,
    )
    store_command.add_flags(store)
    store.set_defaults(run=store_command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Wrong flags and `--help` leave through SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if _missing is not None and arguments[:1] == ["demo"]:
        return _fail(f"the demo needs the package {_missing}: pip install 'hicache[serve]'")
    flags = _parser().parse_args(arguments)
    try:
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
