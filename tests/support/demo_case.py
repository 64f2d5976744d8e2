"""The demo in this process: its outcome for the flags of a command line."""

from __future__ import annotations

import argparse

from hicache.serving.demo import Outcome, converse
from hicache.serving.demo_flags import add_flags

SMALL = ("--documents", "4", "--turns", "2", "--document-tokens", "2400", "--max-new-tokens", "4")


def demo(*flags: str) -> Outcome:
    """The outcome of a small demo."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return converse(parser.parse_args([*SMALL, *flags]), lambda line: None)
