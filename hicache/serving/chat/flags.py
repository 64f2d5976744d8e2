"""The flags of `hicache chat`. They are in a separate module, so that `--help` works without the packages that the
command needs."""

from __future__ import annotations

import argparse

from hicache.config.settings import Integer, as_flag
from hicache.console import path_of
from hicache.serving.server.flags import add_server_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache chat`, and the flags of the server that the command starts if --url is not given."""
    parser.add_argument("files", nargs="*", type=path_of, metavar="FILE", help="texts that the chat is about")
    parser.add_argument("--url", metavar="URL", help="address of a running server (default: one is started here)")
    parser.add_argument(
        "--max-tokens", type=as_flag(Integer("a number of tokens", 1, 1 << 20)), default=256, metavar="TOKENS",
        help="maximum length of an answer (default 256)",
    )  # fmt: skip
    add_server_flags(parser, port=0)
