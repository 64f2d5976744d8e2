"""What the demo shows: a line a turn while it runs, a table on a terminal, and the summary.

May import rich and its own package's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

_COLUMNS = ("request", "prompt", "device", "host", "disk", "computed", "ttft ms", "recompute ms")
_WIDTHS = (28, 7, 7, 7, 7, 9, 9, 13)


@dataclass(frozen=True)
class Row:
    """One turn. Tokens, and milliseconds to the first one; `recompute_ms` None until the turn ran without a cache."""

    name: str
    prompt: int
    device: int
    host: int
    disk: int
    computed: int
    ttft_ms: float
    recompute_ms: float | None = None

    def cells(self) -> tuple[str, ...]:
        numbers = (self.prompt, self.device, self.host, self.disk, self.computed)
        recompute = "" if self.recompute_ms is None else f"{self.recompute_ms:.0f}"
        name = self.name if len(self.name) < _WIDTHS[0] else f"{self.name[: _WIDTHS[0] - 2]}…"
        return (name, *(str(number) for number in numbers), f"{self.ttft_ms:.0f}", recompute)


class View:
    """Rows as they come, in place on a terminal, as plain lines elsewhere. Use it in a `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Row] = {}
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        else:
            self._line(_COLUMNS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.update(self._table(list(self._rows.values())))
            self._live.stop()

    def heading(self, text: str) -> None:
        """A line between plain rows; a table that is redrawn in place needs none."""
        if not self._live:
            self._say(f"\n{text}")

    def show(self, row: Row) -> None:
        """Add a row, or put it in the place of the one of the same name."""
        self._rows[row.name] = row
        if self._live:
            # What does not fit above the prompt would scroll and could not be redrawn: show the newest, all at the end.
            fit = max(4, self._console.height - 6)
            self._live.update(self._table(self._newest(row, fit)), refresh=True)
        else:
            self._line(row.cells())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _newest(self, row: Row, fit: int) -> list[Row]:
        names = list(self._rows)
        end = max(names.index(row.name) + 1, min(fit, len(names)))
        return [self._rows[name] for name in names[max(0, end - fit) : end]]

    def _table(self, rows: Sequence[Row]) -> Table:
        table = Table()
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "request" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row.cells())
        return table

    def _line(self, cells: Sequence[str]) -> None:
        first, *rest = cells
        columns = "".join(f"{cell:>{width}}" for cell, width in zip(rest, _WIDTHS[1:], strict=True))
        self._say(f"{first:<{_WIDTHS[0]}}{columns}".rstrip())
