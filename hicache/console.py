"""Formats sizes, figures, columns, tables and progress bars for all commands, benchmarks and messages. Also reads and
writes files that users name, like FILE in `--json FILE`.

Stores import this module to parse the sizes in their URLs. Only functions that make a table or a bar import rich: this
import is slow, and the command line must handle Ctrl-C from the start.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

Step: TypeAlias = Callable[[int, "int | None"], None]

NONE = "-"  # text shown for an unknown figure
_NO_TERMINAL_COLUMNS = 1_000  # assumed width of a file or a pipe, so that no line is folded
_NAME_COLUMNS = 20  # minimum width of the first column on a narrow terminal
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE | re.ASCII)
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_MAX_SHOWN = 80
_MIN_PLAIN_BYTES = 1 << 20  # a smaller size of a tier lacks its unit, because no tier is so small
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size like '512MiB', '2GB' or '100000', in decimal or binary units. A fraction of a byte is
    cut off."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _not_a_size(text)
    digits, letter, binary, byte = match.groups()
    # K alone and KiB mean 1024; KB means 1000.
    base = 1000 if byte and not binary else 1024
    try:
        exact = Fraction(digits) * Fraction(base) ** " KMGT".index(letter.upper() or " ")
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise _not_a_size(text) from None
    if (binary and not letter) or (not letter and exact.denominator != 1):
        raise _not_a_size(text)
    return math.floor(exact)


def parse_tier_bytes(text: str) -> int:
    """Return `parse_bytes(text)` for the size of a tier. Refuses a small number without a unit, such as 64, except
    0."""
    num_bytes = parse_bytes(text)
    if text.strip()[-1].isdigit() and 0 < num_bytes < _MIN_PLAIN_BYTES:
        raise ConfigError(f"{num_bytes} means {num_bytes} bytes; add a unit, like {num_bytes}GB")
    return num_bytes


def _not_a_size(text: str) -> ConfigError:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return ConfigError(f"{shown!r} is not a size in bytes; write it like 512MiB, 2GB or 1000000")


def printable(text: str) -> str:
    r"""Return `text` with an escape such as `\x1b` or `\ud800` for each non-printable character.

    Non-printable are control characters including line breaks, characters that change the direction of writing, and
    characters that cannot be encoded.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(message: str) -> None:
    """Print one line on stderr, with escapes for control characters. Errors of writing to stderr are ignored."""
    with contextlib.suppress(OSError):
        print(printable(" ".join(message.split())), file=sys.stderr, flush=True)


def announce(text: str) -> None:
    """Print text on stdout. The process continues without output if stdout is a closed pipe or on a full disk."""
    try:
        print(text, flush=True)
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard output that cannot be written. The interpreter would otherwise try to write it again at exit, and
    fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rounded(num_bytes: int) -> str:
    """Return a readable size: `3.2 GiB`; a size below 1 KiB as `512 bytes`."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    power = min(len(_BINARY), (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.1f} {_BINARY[power - 1]}"


def sized(num_bytes: int) -> str:
    """Return a size that is readable and exact: `3.2 GiB (3435973836 bytes)`; a size below 1 KiB as `512 bytes`."""
    return rounded(num_bytes) if num_bytes < 1024 else f"{rounded(num_bytes)} ({num_bytes} bytes)"


def flag_size(num_bytes: int) -> str:
    """Return an exact size in the form that flags take, in the largest unit that has no fraction: `64GB`, `2MiB`."""
    bases = ((1024, "i"), (1000, ""))
    units = [(base**power, f"{'KMGT'[power - 1]}{binary}B") for power in (4, 3, 2, 1) for base, binary in bases]
    return next((f"{num_bytes // unit}{name}" for unit, name in units if num_bytes % unit == 0), str(num_bytes))


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB, for a column: `1,234.50`."""
    return f"{num_bytes / (1 << 30):,.2f}"


def scaled(value: float, unit: str = "") -> str:
    """Return a number with a decimal prefix and at most three digits: `950`, `12.3 k`, `123 k`; with the unit `B` for
    example `12.3 GB`."""
    power = 0
    while abs(value) >= 999.5 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    digits = f"{value:.1f}" if (power or value % 1) and abs(value) < 99.95 else f"{value:.0f}"
    return f"{digits} {_DECIMAL[power]}{unit}".rstrip()


def counted(number: int | None) -> str:
    """Return a whole number like `1,234`; `unlimited` for None."""
    return "unlimited" if number is None else f"{number:,}"


def percent(share: float | None) -> str:
    """Return a share in percent, like `12.3%`; `-` for None."""
    return NONE if share is None else f"{share:.1%}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds for a column, like `1,234.5`; `-` for None."""
    return NONE if seconds is None else f"{1000 * seconds:,.1f}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `42 s`, `3 min 5 s`, `2 h 3 min`, `5 d 2 h`."""
    for large, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {large} {int(seconds % size // part)} {small}"
    return f"{max(0, int(seconds))} s"


def columns(rows: Iterable[Sequence[object]]) -> str:
    """Return rows of plain text, one per line, without control characters. Each column is as wide as its widest
    cell."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    lines = ("".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType] | None] = (),
    *,
    title: str = "",
    framed: bool = True,
) -> Table:
    """Return a table with names left-aligned in the first column and figures right-aligned in the others.

    A row None begins a new section. Markup in texts is not interpreted. `framed`: whether the table has lines. A table
    without lines can be placed next to another table.
    """
    from rich import box
    from rich.table import Table

    made = Table(title=_text(title) if title else None, title_justify="left")
    if framed:
        made.box, made.padding = box.SIMPLE, (0, 1, 0, 0)
    else:
        made.box, made.pad_edge, made.padding, made.header_style = None, False, (0, 2, 0, 0), "bold underline"
    rows = list(rows)
    names_width = max((len(row[0]) for row in rows if row is not None and isinstance(row[0], str)), default=0)
    made.add_column(_text(headings[0]), overflow="fold", min_width=min(names_width, _NAME_COLUMNS))
    for heading in headings[1:]:
        made.add_column(_text(heading), justify="right", no_wrap=True)
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*(_text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def new_console(file: IO[str] | None = None) -> Console:
    """Return the console that writes to `file`, by default stdout. Lines are folded only on a terminal. Raises
    BrokenPipeError if the reader has closed the pipe."""
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with status 1
            raise BrokenPipeError

    made = Raising(file=file)
    if not made.is_terminal:
        made.width = _NO_TERMINAL_COLUMNS
    return made


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType] | None],
    *,
    title: str = "",
    notes: Iterable[str] = (),
) -> None:
    """Print a table, and below it each of `notes` on its own line."""
    out = new_console()
    out.print(table(headings, rows, title=title))
    for note in notes:
        out.print(_text(note))


@contextlib.contextmanager
def progress(what: str, *, is_shown: bool = True) -> Iterator[Step]:
    """Show a progress bar on stderr, unless stderr is no terminal or `is_shown` is False.

    Yields a function that takes the number of finished steps and the total number of steps, None if unknown. Its first
    call starts the bar and a thread, so a program that forks must fork before this call.
    """
    if not is_shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bars = Progress(*parts, console=Console(stderr=True), transient=True)
    task = bars.add_task(what, total=None)

    def step(done: int, total: int | None) -> None:
        bars.start()
        bars.update(task, completed=done, total=total)

    try:
        yield step
    finally:
        bars.stop()


def path_text(given: object) -> str:
    """Return the file system path that a user gave, as text. `~` is expanded, file:///path becomes /path, and bytes
    that are not UTF-8 are kept. Raises ConfigError with the reason if it is not a path."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ConfigError("must be text")
    if scheme := _URL.match(text):
        host, slash, rest = text[scheme.end() :].partition("/")
        if scheme[1].lower() != "file" or host not in ("", "localhost") or not slash:
            raise ConfigError("is a URL and no path of this machine")
        text = unquote(f"/{rest}", errors="surrogateescape")
    home = os.path.expanduser(text)
    if home == text and text.startswith("~") and not os.path.lexists(text):
        raise ConfigError("begins with ~ and names no home; write ./~ for a file of that name")
    try:
        is_path = "\0" not in os.fsdecode(os.fsencode(home))
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise ConfigError("is not a path")
    return home


def path_flag(text: str) -> str:
    """Return `path_text(text)`, for the `type` of a flag in argparse."""
    try:
        return path_text(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!a} {error}") from None


def path_of(text: str) -> Path:
    """Return `path_text(text)` as a `Path`, for the `type` of a flag in argparse."""
    return Path(path_flag(text))


def read_text(path: Path) -> str:
    """Return the text of a user's file. Raises ConfigError with the file's name if it cannot be read or is not
    UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def require_writable(flag: str, path: Path) -> None:
    """Check that a result can be written to `path`, before the long work for this result. Raises ConfigError with the
    name of the flag if it cannot be written."""
    found = path if _is_special(path) else Path(os.path.realpath(path)).parent
    if path.is_dir() or not found.exists() or not os.access(found, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; give a file in a folder that can be written to")


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: to a temporary file in the same directory, then renamed. Raises OSError.

    A symbolic link is followed. A device or pipe is written to directly: renaming would replace it by a regular file
    for all its users.
    """
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(real)
    finally:
        beside.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _text(text: str) -> Text:
    """Return the text for rich, without markup and without control sequences."""
    from rich.text import Text

    return Text(printable(text))
