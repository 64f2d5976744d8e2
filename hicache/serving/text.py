"""From tokens to text, as they are generated: whole characters only, cut before a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 64  # a run without a whole character is no text; it is emitted with replacement characters
_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 6  # a decoder may treat the first token of a sequence in its own way


class TextDecoder(Protocol):
    """Turns the tokens of one sequence into text. What it has returned never changes."""

    def push(self, token: int) -> str:
        """The text that `token` completes, without characters that later tokens may change."""
        ...

    def finish(self) -> str:
        """The rest of the text. Incomplete characters become U+FFFD."""
        ...


class ByteDecoder:
    """For tokens that are the bytes of UTF-8; those from 256 on are special, as `<|256|>`, or nothing."""

    def __init__(self, skip_special: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skip_special = skip_special

    def push(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes([token]))
        return "" if self._skip_special else f"{self.finish()}<|{token}|>"

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenDecoder:
    """For any `decode` from token ids to text. `prompt`: its end is context for the first token.

    tokens[0, read)      their text was returned, they are context
    tokens[read, len)    held: their text ends in what may be an incomplete character
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = _context(decode, prompt)
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text, num_held = self._held_text(), len(self._tokens) - self._read
        if num_held < _MAX_HELD_TOKENS and (not text or text.endswith(_REPLACEMENT)):
            return ""
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return text

    def finish(self) -> str:
        text = self._held_text()
        self._read = len(self._tokens)
        return text

    def _held_text(self) -> str:
        known = self._decode(self._tokens[: self._read])
        return self._decode(self._tokens)[len(known) :]


def _context(decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> list[int]:
    """The end of the prompt, from a character's first byte on: behind a broken one a decoder may break all others."""
    for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_CHARACTER_BYTES):
        context = list(prompt[-num_tokens:])
        if _REPLACEMENT not in decode(context):
            return context
    return list(prompt[-_CONTEXT_TOKENS:])


class StopMatcher:
    """Cuts a text before the first of `stops` that is complete, however the text is divided into parts.

    Of several that end at the same character the longest counts. Text that may be the start of a stop string is held.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is now known to stand before any stop string. Nothing after one was found."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What is held, as the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper start of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
