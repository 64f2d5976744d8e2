"""One frame of `hicache top`: tables of a server's figures, for a terminal of 80 columns or more."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hicache.console import printable
from hicache.monitoring.readings import Change, History, Reading

_NONE = "-"


def frame(server: str, history: History, trouble: str = "") -> RenderableType:
    """All of it. "now" is the window of `history`, if it has two readings. `trouble`: why no newer one is there."""
    reading, change = history.last, history.change
    sides = Table.grid(padding=(0, 2))
    sides.add_row(
        _stacked(_tokens(reading, change), _counts("prefetch and gate", reading, change, "prefetch", "gate")),
        _stacked(_transfers(reading, change), _counts("evicted tokens", reading, change, "evicted_tokens")),
    )
    parts = [Text(printable(trouble), style="bold red")] if trouble else []
    return Group(_header(server, reading), _faults(reading), *parts, Text(), _tiers(reading, change), Text(), sides)


def _stacked(*tables: Table) -> RenderableType:
    """Those that have rows, with a line between them."""
    shown = [table for table in tables if table.rows]
    return Group(*(part for table in shown for part in ((Text(), table) if table is not shown[0] else (table,))))


def _header(server: str, reading: Reading) -> Text:
    up_s = time.time() - reading.get("server.start_time_s")
    requests = "   ".join(f"{label} {reading.get(figure):.0f}" for figure, label in reading.group("requests"))
    hidden = "" if reading.hidden_share is None else f"   loads hidden under compute {_percent(reading.hidden_share)}"
    return Text.assemble((printable(server), "bold"), f"   up {_duration(up_s)}\nrequests   {requests}{hidden}")


def _faults(reading: Reading) -> Text:
    """Those that happened since the server's start."""
    found = [
        f"{label} {_number(reading.get(figure))}" for figure, label in reading.group("faults") if reading.get(figure)
    ]
    return Text(f"faults     {'   '.join(found) or 'none'}", style="bold red" if found else "")


def _tiers(reading: Reading, change: Change | None) -> Table:
    table = _table("tier", "used", "of", "", "hits now", "since start")
    for tier in reading.tiers:
        used, total = reading.get(f"used.{tier}"), reading.get(f"total.{tier}")
        amount = _bytes if tier == "disk" else _number
        # A store of one's own may have no budget.
        bar = ProgressBar(total=total, completed=min(used, total), width=14, pulse=False) if total else ""
        of = f"{amount(total)}{'' if tier == 'disk' else ' tokens'}" if total else _NONE
        now = None if change is None else change.hit_rate(tier)
        table.add_row(tier, amount(used), of, bar, _percent(now), _percent(reading.hit_rate(tier)))
    return table


def _tokens(reading: Reading, change: Change | None) -> Table:
    table = _table("tokens", "now", "total")
    for figure, label in reading.group("tokens"):
        now = _NONE if change is None else f"{_number(change.per_s(figure))}/s"
        table.add_row(label, now, _number(reading.get(figure)))
    return table


def _transfers(reading: Reading, change: Change | None) -> Table:
    """`speed`: of the copies alone, while `now` is over the whole time."""
    table = _table("transfers", "now", "speed", "total")
    for figure, label in reading.group("moved_bytes"):
        now = _NONE if change is None else f"{_bytes(change.per_s(figure))}/s"
        total, seconds = reading.get(figure), reading.get(f"moved_s.{label}")
        table.add_row(label, now, f"{_bytes(total / seconds)}/s" if seconds else _NONE, _bytes(total))
    return table


def _counts(title: str, reading: Reading, change: Change | None, *groups: str) -> Table:
    table = _table(title, "now", "total")
    for figure, label in (row for group in groups for row in reading.group(group)):
        table.add_row(label, _NONE if change is None else _number(change.of(figure)), _number(reading.get(figure)))
    return table


def _table(*headers: str) -> Table:
    """The first column on the left, figures on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.1%}"


def _number(value: float) -> str:
    """`950`, `12.3 k`, `4.0 M`."""
    return _scaled(value, ("", " k", " M", " G", " T"))


def _bytes(value: float) -> str:
    """`950 B`, `12.3 GB`: decimal units, as rates have them."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.1f}{units[power]}" if power or value % 1 else f"{value:.0f}{units[power]}"


def _duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 3 min`, `5 d 2 h`."""
    for large, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {large} {int(seconds % size // part)} {small}"
    return f"{max(0, int(seconds))} s"
