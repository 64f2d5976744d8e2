"""Text of somebody else's on a terminal. May import the standard library alone."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` with escapes, `\x1b` or `\ud800`, in place of what a terminal would obey, or what cannot be encoded.

    Control characters, line breaks among them, and those that change the direction of writing are no printable ones.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
