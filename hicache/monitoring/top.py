"""`hicache top URL`: a live view of a running server in a terminal. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from hicache.config.settings import Number, as_flag
from hicache.errors import NoServer, NotOurServer
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.frame import frame
from hicache.monitoring.readings import History

_WINDOW_S = 10.0  # that the column "now" covers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache top`."""
    parser.add_argument("url", metavar="URL", help="address of the server, as 'hicache serve' prints it")
    parser.add_argument(
        "--interval", type=as_flag(Number("seconds", 0.1, 3600)), default=1.0, metavar="SECONDS",
        help="between two readings (default 1)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one reading and end")


def run(flags: argparse.Namespace) -> int:
    """Show the server until Ctrl-C. Returns 0. Raises NoServer or NotOurServer if the first reading fails."""
    client, console = MetricsClient(flags.url), Console()
    history = History(client.read(), _WINDOW_S)
    if flags.once:
        console.print(frame(client.server, history))
        return 0
    with contextlib.suppress(KeyboardInterrupt), _display(console) as show:
        trouble = ""
        while True:
            show(frame(client.server, history, trouble))
            time.sleep(flags.interval)
            trouble = _read_next(client, history)
    return 0


def _read_next(client: MetricsClient, history: History) -> str:
    """Read the figures again and add them to `history`. Returns the reason if that failed, else an empty text."""
    try:
        history.add(client.read())
    except (NoServer, NotOurServer) as error:
        return f"{error.reason}; trying again"
    return ""


@contextlib.contextmanager
def _display(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows a frame: on a terminal on a separate screen, elsewhere below the frame before."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)
