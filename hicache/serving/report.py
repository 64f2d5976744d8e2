"""The demo's output: a row per turn while it runs, the summary, and the results for `--json`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hicache.serving.audit import AuditCounts
from hicache.serving.request import RequestOutput

_COLUMNS = ("request", "prompt", "device", "host", "disk", "remote", "computed", "ttft ms", "recompute ms")
_WIDTHS = (28, 7, 7, 7, 7, 7, 9, 9, 13)
# The engine's counters of bytes that moved between two tiers.
_BYTES_MOVED = {
    "device_to_host": "backup.bytes",
    "host_to_device": "restore.bytes",
    "host_to_disk": "persist.bytes",
    "disk_to_host": "prefetch.bytes",
    "host_to_remote": "remote_persist.bytes",
    "remote_to_host": "remote_prefetch.bytes",
}


@dataclass(frozen=True)
class Row:
    """One turn: tokens, and milliseconds to the first one. `recompute_ms`: None until the turn ran without a cache."""

    name: str
    prompt: int
    device: int
    host: int
    disk: int
    remote: int
    computed: int
    ttft_ms: float
    recompute_ms: float | None = None

    def cells(self) -> tuple[str, ...]:
        numbers = (self.prompt, self.device, self.host, self.disk, self.remote, self.computed)
        recompute = "" if self.recompute_ms is None else f"{self.recompute_ms:.0f}"
        name = self.name if len(self.name) < _WIDTHS[0] else f"{self.name[: _WIDTHS[0] - 2]}…"
        return (name, *(str(number) for number in numbers), f"{self.ttft_ms:.0f}", recompute)


@dataclass
class Turn:
    """One turn of one conversation: its prompt, its output with the cache and, if that was run, without a cache.

    `generated`: the tokens of transformers' `generate`; None if it was not run.
    """

    name: str
    conversation: int
    number: int
    prompt: npt.NDArray[np.int64]
    cached: RequestOutput
    recomputed: RequestOutput | None = None
    generated: tuple[int, ...] | None = None

    @property
    def identical(self) -> bool:
        """Whether the generated tokens equal those of every other run that was made."""
        return (self.recomputed is None or self.recomputed.tokens == self.cached.tokens) and (
            self.generated is None or self.generated == self.cached.tokens
        )

    def row(self) -> Row:
        output, hit = self.cached, self.cached.hit
        return Row(
            name=self.name,
            prompt=output.prompt_tokens,
            device=hit.device,
            host=hit.host,
            disk=hit.disk,
            remote=hit.remote,
            computed=output.computed_tokens,
            ttft_ms=output.ttft_s * 1e3,
            recompute_ms=None if self.recomputed is None else self.recomputed.ttft_s * 1e3,
        )

    def as_dict(self) -> dict[str, Any]:
        row = self.row()
        return {
            "request": row.name,
            "turn": self.number + 1,
            "prompt_tokens": row.prompt,
            "hit_tokens": dataclasses.asdict(self.cached.hit),
            "computed_tokens": row.computed,
            "ttft_ms": {"cached": row.ttft_ms, "recompute": row.recompute_ms},
            "tokens": list(self.cached.tokens),
            "identical": self.identical,
        }


@dataclass(frozen=True)
class Report:
    """The outcome of a demo. `compared`: whether the run without a cache was made; `compared_generate`: whether
    transformers' `generate` was run."""

    turns: Sequence[Turn]
    audit: AuditCounts
    stats: Mapping[str, float]
    sizes: Mapping[str, int]
    model: str
    device: str
    seconds: float
    compared: bool
    compared_generate: bool = False

    @property
    def identical(self) -> bool:
        """Whether all compared tokens are equal and no page that came back differs from what was computed."""
        return self.audit.mismatched == 0 and all(turn.identical for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The results for `--json`. `ttft_ms`: medians over turns after the first, null if there are none."""
        later = [turn for turn in self.turns if turn.number]
        first = [turn for turn in self.turns if not turn.number]
        ttft = _ttft_ms(later)
        cached_ms, recompute_ms = ttft["cached"], ttft["recompute"]
        return {
            "identical": self.identical,
            "compared_with_recompute": self.compared,
            "compared_with_transformers": self.compared_generate,
            "requests": len(self.turns),
            "prompt_tokens": sum(len(turn.prompt) for turn in self.turns),
            "generated_tokens": sum(len(turn.cached.tokens) for turn in self.turns),
            "hit_tokens": self._hit_tokens(self.turns),
            "computed_tokens": sum(turn.cached.computed_tokens for turn in self.turns),
            "ttft_ms": ttft,
            "speedup": recompute_ms / cached_ms if cached_ms and recompute_ms else None,
            "first_turns": {"hit_tokens": self._hit_tokens(first), "ttft_ms": _ttft_ms(first)},
            "bytes_moved": {
                move: int(self.stats.get(name, 0))
                for move, name in _BYTES_MOVED.items()
                if self._has_remote or "remote" not in move
            },
            "pages": self.audit.as_dict(),
            "sizes": dict(self.sizes),
            "model": self.model,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "turns": [turn.as_dict() for turn in self.turns],
            "stats": dict(self.stats),
        }

    def summary(self) -> str:
        """The most important results, in a few lines of text."""
        results = self.to_json()
        hits, ttft, pages = results["hit_tokens"], results["ttft_ms"], self.audit
        prompt_tokens = max(1, results["prompt_tokens"])
        shares = ", ".join(f"{tier} {tokens} ({tokens / prompt_tokens:.0%})" for tier, tokens in hits.items())
        moved = ", ".join(f"{link.replace('_', ' ')} {size / 1e6:.0f}" for link, size in results["bytes_moved"].items())
        lines = [
            f"identical: {'yes' if self.identical else 'NO'}   {self._checked()}",
            f"KV pages that came back: {pages.compared} compared, {pages.mismatched} differ, "
            f"{pages.unrecorded} of an earlier run without a record",
            f"prompt tokens {results['prompt_tokens']}: {shares}, computed {results['computed_tokens']}",
            f"moved, MB: {moved}",
        ]
        if ttft["cached"] is not None:
            line = f"median time to first token after the first turn: {ttft['cached']:.0f} ms"
            if results["speedup"] is not None:
                line += f", recomputed {ttft['recompute']:.0f} ms: {results['speedup']:.1f} times shorter"
            lines.append(line)
        lines.append(f"{results['requests']} requests on {self.device} in {self.seconds:.1f} s")
        return "\n".join(lines)

    @property
    def _has_remote(self) -> bool:
        return any(name.startswith("remote.") for name in self.stats)

    def _hit_tokens(self, turns: Sequence[Turn]) -> dict[str, int]:
        tiers = ("device", "host", "disk", "remote") if self._has_remote else ("device", "host", "disk")
        return {tier: sum(getattr(turn.cached.hit, tier) for turn in turns) for tier in tiers}

    def _checked(self) -> str:
        if not self.compared and not self.compared_generate:
            return "(tokens not compared: --no-baseline)"
        different = [turn.name for turn in self.turns if not turn.identical]
        if different:
            return f"tokens differ in {', '.join(different)}"
        references = ["a run without a cache"] * self.compared + ["transformers' generate"] * self.compared_generate
        return f"every generated token equals that of {' and '.join(references)}, every page what was computed"


class View:
    """Shows rows as they arrive: in a table redrawn in place on a terminal, as plain lines elsewhere. Use it in a
    `with`."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(self._table(list(self._rows.values())))
            self._live.stop()

    def heading(self, text: str) -> None:
        """Print a line between plain rows; a table that is redrawn in place has none."""
        if not self._live:
            self._say(f"\n{text}")

    def show(self, row: Row) -> None:
        """Add a row, or replace the row of the same name."""
        self._rows[row.name] = row
        if self._live:
            # Rows that scroll out of the terminal cannot be redrawn: show only the newest until the end.
            max_rows = max(4, self._console.height - 6)
            self._live.update(self._table(self._newest(row, max_rows)), refresh=True)
        else:
            self._line(row.cells())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _newest(self, row: Row, max_rows: int) -> list[Row]:
        """The last `max_rows` rows up to `row`."""
        names = list(self._rows)
        end = max(names.index(row.name) + 1, min(max_rows, len(names)))
        return [self._rows[name] for name in names[max(0, end - max_rows) : end]]

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


def _ttft_ms(turns: Sequence[Turn]) -> dict[str, float | None]:
    cached = [turn.cached.ttft_s * 1e3 for turn in turns]
    recomputed = [turn.recomputed.ttft_s * 1e3 for turn in turns if turn.recomputed is not None]
    return {
        "cached": statistics.median(cached) if cached else None,
        "recompute": statistics.median(recomputed) if recomputed else None,
    }
