"""`hicache top URL`: a live view of a running server, for a terminal of 80 columns or more. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hicache.config.settings import Number, as_flag
from hicache.console import NONE, duration, percent, printable, scaled, table
from hicache.errors import NoServer, NotOurServer
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.readings import Change, History, Reading

_WINDOW_S = 10.0  # seconds that the column "now" covers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache top`."""
    parser.add_argument("url", metavar="URL", help="address of 'hicache serve', or of a vLLM or SGLang with hicache")
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
        error = ""
        while True:
            show(frame(client.server, history, error))
            time.sleep(flags.interval)
            error = _read_next(client, history)
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
    """Yield a function that shows a frame. A terminal shows it on a separate screen; elsewhere it is printed below the
    frame before."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)


def frame(server: str, history: History, error: str = "") -> RenderableType:
    """Return all tables of the last reading. The column "now" covers the window of `history`, if `history` has two
    readings. `error`: the reason why the last attempt to read failed, with the server's name; empty if the attempt
    succeeded."""
    reading, change = history.last, history.change
    sides = Table.grid(padding=(0, 2))
    sides.add_row(
        _stacked(_tokens(reading, change), _counts("prefetch and gate", reading, change, "prefetch", "gate")),
        _stacked(
            _transfers(reading, change),
            _counts("evicted tokens", reading, change, "evicted_tokens"),
            _counts("computed, by reason", reading, change, "missed_tokens"),
            _drive(reading),
        ),
    )
    status = Text(printable(error), style="bold red") if error else _about(server, reading)
    head = Table.grid(padding=(0, 3, 0, 0))
    head.add_row("requests", _requests(reading))
    head.add_row("latency", _latency(reading, change))
    head.add_row("faults", _faults(reading))
    return Group(status, head, _tiers(reading, change), Text(), sides)


def _stacked(*tables: Table) -> RenderableType:
    """Return the tables that have rows, with an empty line between them."""
    shown = [table for table in tables if table.rows]
    return Group(*(part for table in shown for part in ((Text(), table) if table is not shown[0] else (table,))))


def _about(server: str, reading: Reading) -> Text:
    start_s = reading.get("server.start_time_s")
    model = f"   {printable(reading.about['model'])}" if "model" in reading.about else ""
    up = f"   up {duration(time.time() - start_s)}" if start_s else ""
    return Text.assemble((printable(server), "bold"), f"{model}{up}", no_wrap=True, overflow="ellipsis")


def _requests(reading: Reading) -> Text:
    requests = "   ".join(f"{label} {reading.get(figure):.0f}" for figure, label in reading.group("requests"))
    overlap = (
        ""
        if reading.overlapped_share is None
        else f"   loads overlapped with computing {percent(reading.overlapped_share)}"
    )
    return Text(f"{requests}{overlap}")


def _latency(reading: Reading, change: Change | None) -> Text:
    """Return the median and 99th percentile of each latency over the window, or since the server's start if there is
    only one reading."""
    now, shown = change or reading, []
    for group, label in (("first_token_s", "first token"), ("between_tokens_s", "between tokens")):
        median, p99 = (now.quantile(group, share) for share in (0.5, 0.99))
        shown.append(f"{label} {_brief(median)}, p99 {_brief(p99)}")
    return Text("   ".join(shown))


def _brief(seconds: float | None) -> str:
    """Return a short duration like `12 ms` or `3.4 s`; `-` for None."""
    if seconds is None:
        return NONE
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _faults(reading: Reading) -> RenderableType:
    """Return the kinds of faults that happened since the server's start, with their numbers."""
    found = [
        f"{label} {scaled(reading.get(figure))}" for figure, label in reading.group("faults") if reading.get(figure)
    ]
    return Columns([Text(text, style="bold red") for text in found], padding=(0, 3)) if found else Text("none")


def _tiers(reading: Reading, change: Change | None) -> Table:
    rows = []
    for tier in reading.tiers:
        kind = "_bytes" if f"used_bytes.{tier}" in reading.figures else ""
        used, total = reading.get(f"used{kind}.{tier}"), reading.get(f"total{kind}.{tier}")
        unit, after = ("B", "") if kind or tier == "disk" else ("", " tokens")
        # The tier has no total if it is a store object without a budget.
        bar = ProgressBar(total=total, completed=min(used, total), width=10, pulse=False) if total else ""
        now = None if change is None else change.hit_rate(tier)
        of = f"{scaled(total, unit)}{after}" if total else NONE
        held = scaled(used, unit) if f"used{kind}.{tier}" in reading.figures else NONE
        saved = duration(reading.get(f"saved_s.{tier}")) if f"saved_s.{tier}" in reading.figures else NONE
        rows.append((tier, held, of, bar, percent(now), percent(reading.hit_rate(tier)), saved))
    return table(("tier", "used", "of", "", "hits now", "since start", "saved"), rows, framed=False)


def _tokens(reading: Reading, change: Change | None) -> Table:
    rows = []
    for figure, label in reading.group("tokens"):
        now = NONE if change is None else f"{scaled(change.per_s(figure))}/s"
        rows.append((label, now, scaled(reading.get(figure))))
    return table(("tokens", "now", "total"), rows, framed=False)


def _transfers(reading: Reading, change: Change | None) -> Table:
    """Return the rows of transfers between tiers. The column `now` has the bytes copied per second of the window. The
    column `speed` has the bytes per second while a copy runs."""
    rows = []
    for figure, label in reading.group("moved_bytes"):
        now = NONE if change is None else f"{scaled(change.per_s(figure), 'B')}/s"
        total, seconds = reading.get(figure), reading.get(f"moved_s.{label}")
        rows.append((label, now, f"{scaled(total / seconds, 'B')}/s" if seconds else NONE, scaled(total, "B")))
    return table(("transfers", "now", "speed", "total"), rows, framed=False)


def _drive(reading: Reading) -> Table:
    """Return the rows on the wear of the drive. There are none if no page was written or the size of the drive is
    unknown."""
    shares = [(label, reading.get(figure)) for figure, label in reading.group("drive")]
    found = [(label, f"{percent(share)} of its size") for label, share in shares if share]
    return table(("drive", ""), found, framed=False)


def _counts(title: str, reading: Reading, change: Change | None, *groups: str) -> Table:
    rows = []
    for figure, label in (row for group in groups for row in reading.group(group)):
        rows.append((label, NONE if change is None else scaled(change.of(figure)), scaled(reading.get(figure))))
    return table((title, "now", "total"), rows, framed=False)
