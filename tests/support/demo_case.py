"""Run the demo in this process and return its outcome for the flags of a command line."""

from __future__ import annotations

import argparse

from hicache.serving.demo import Outcome, Say, converse
from hicache.serving.demo_flags import add_flags

SMALL = ("--documents", "4", "--turns", "2", "--document-tokens", "2000", "--max-new-tokens", "4")


def demo(*flags: str, say: Say = lambda line: None) -> Outcome:
    """The outcome of a small demo, which prints with `say`."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return converse(parser.parse_args([*SMALL, *flags]), say)
