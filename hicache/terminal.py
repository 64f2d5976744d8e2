"""Text for a terminal: sizes in readable units, and text from elsewhere without control characters."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def printable(text: str) -> str:
    r"""`text` with escapes such as `\x1b` or `\ud800` in place of characters that are not printable.

    These are control characters, line breaks among them, characters that change the direction of writing, and those
    that cannot be encoded.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def sized(num_bytes: int) -> str:
    """`3.2 GiB (3435973836 bytes)`; below 1 KiB the bytes alone."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    power = min(len(_UNITS), (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]} ({num_bytes} bytes)"
