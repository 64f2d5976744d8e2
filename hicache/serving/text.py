"""Converts generated tokens to text, one complete character after another, and cuts the text before a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"
# maximum tokens without a complete character; more are returned as replacement characters
_MAX_HELD_TOKENS = 64
_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 6  # context tokens, needed because a decoder may treat the first token of a sequence differently


class TextDecoder(Protocol):
    """Converts the tokens of one sequence to text. Returned text never changes."""

    def push(self, token: int) -> str:
        """Add a token and return the text that is complete now. Characters that later tokens may change are left
        out."""
        ...

    def finish(self) -> str:
        """Return the rest of the text. Incomplete characters become U+FFFD."""
        ...


class ByteDecoder:
    """A decoder of tokens that are bytes of UTF-8. Ids from 256 on are special. They decode to text like `<|256|>`, or
    with `skip_special` to empty text."""

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
    """A decoder over the `DecodeStream` of `tokenizers`, which can also return the text of an incomplete character at
    the end. `prompt`: tokens of the prompt, of which the last ones are context for the first token. `held`: tokens
    whose text may end in an incomplete character and was not returned yet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(self._context(prompt), skip_special)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception as error:
            if "Invalid prefix" not in str(error):  # the library raises no specific exception class
                raise
            return self._restarted()  # a decoder may change the characters before a broken one
        if text is None:
            return self._restarted() if len(self._held) == _MAX_HELD_TOKENS else ""
        self._held.clear()
        return text

    def finish(self) -> str:
        return self._decoded(self._held)

    def _restarted(self) -> str:
        text = self.finish()
        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return text

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return last tokens of the prompt whose text begins and ends with complete characters; empty if there are
        none."""
        ends = (
            list(prompt[-num_tokens:]) for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_CHARACTER_BYTES)
        )
        return next((end for end in ends if _REPLACEMENT not in self._decoded(end)), [])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, self._skip_special))


class StopMatcher:
    """Cuts a text, which arrives in pieces, before the first occurrence of one of the strings `stops`.

    If several stop strings end at the same character, the text is cut before the longest one. Text that may be the
    beginning of a stop string is not returned until later text shows that it is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add a piece, and return the text that cannot belong to a stop string; empty after a stop string was found."""
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
        """Return the text that was held back. Called when there are no more pieces."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
