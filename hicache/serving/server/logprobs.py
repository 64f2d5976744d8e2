"""Converts log probabilities to OpenAI's objects. Completions have parallel lists, and chats have one object for each
token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hicache.serving.models import Tokenizer
from hicache.serving.request import TokenLogprobs

_MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot express, as in vLLM


class TokenTexts(dict[int, str]):
    """A cache of the text of each single token, including special tokens. It has at most one entry per token of the
    vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        decoder = self._tokenizer.decoder((), skip_special=False)
        self[token] = text = decoder.push(token) + decoder.finish()
        return text


class LogprobsReply:
    """Converts the log probabilities of one answer, piece by piece. `as_ids`: write "token_id:7" in place of a token's
    text, as vLLM does."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids
        self._offset = 0

    def of_completion(self, entries: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the lists of a completion. `text_offset` has the index at which each token's text begins in the joined
        texts. `top_logprobs` includes the token itself. If several tokens have the same text, it has only the most
        likely of them."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            tops: dict[str, float] | None = None
            if entry.logprob is not None:
                tops = {}
                for token, logprob in (*entry.top, (entry.token, entry.logprob)):
                    tops.setdefault(self._text(token), max(_MIN_LOGPROB, logprob))
            own = None if entry.logprob is None else max(_MIN_LOGPROB, entry.logprob)
            for name, value in zip(lists, (self._text(entry.token), own, tops, self._offset), strict=True):
                lists[name].append(value)
            self._offset += len(self._texts[entry.token])
        return lists

    def of_chat(self, entries: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        return {
            "content": [
                {
                    **self._of_token(entry.token, entry.logprob),
                    "top_logprobs": [self._of_token(token, logprob) for token, logprob in entry.top],
                }
                for entry in entries
            ]
        }

    def _of_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return the object of one token. `bytes` is null if the token is only a part of a character."""
        text = self._texts[token]
        as_bytes = None if "\ufffd" in text else [*text.encode()]
        return {"token": self._text(token), "logprob": max(_MIN_LOGPROB, logprob or 0.0), "bytes": as_bytes}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts[token]
