"""Restricts answers to a JSON schema. Before each token, llguidance determines which tokens may follow, and all other
tokens get probability 0.

The module can be imported without llguidance. Creating a constraint then raises ConfigError.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.serving.models import ByteTokenizer, LocalTokenizer, Tokenizer
from hicache.serving.request import FinishReason

try:
    import llguidance as _llguidance
    import llguidance.hf as _llguidance_hf

    _library: Any = _llguidance
    _of_transformers: Any = _llguidance_hf.from_tokenizer
except ImportError:
    _library = _of_transformers = None

# Allowed whitespace, enough for indentation. Without a limit, a small model may generate blanks forever.
_BLANKS = r"[ \n]{0,20}"
_SILENT = 0


class JsonConstraint:
    """Determines the tokens that may follow in one answer. Once the request is submitted, only the scheduler's thread
    may use its constraint."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> JsonConstraint:
        """Return a copy of this constraint in its current state, for another answer."""
        return JsonConstraint(self._matcher.deep_copy())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return whether each token id may be the next token: bool [vocab] or slightly longer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little").astype(np.bool_)

    def take(self, token: int) -> None:
        """Update the state by the token that was chosen."""
        self._matcher.consume_token(token)

    @property
    def outcome(self) -> FinishReason | None:
        """Return "stop" if the answer is complete, "error" if it exceeded a limit of llguidance, and None if more
        tokens may follow."""
        if not self._matcher.is_stopped():
            return None
        return "error" if self._matcher.is_error() else "stop"


class JsonAnswers:
    """Creates constraints for answers of one model. Any thread may call its methods. Creating the first constraint
    takes a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()

    def constraint(self, schema: str) -> JsonConstraint:
        """Return a constraint for a JSON schema. Raises ConfigError if the schema is wrong or llguidance does not
        support it."""
        if _library is None:
            raise ConfigError("answers in JSON need llguidance of hicache[serve]: pip install 'hicache[serve]'")
        with self._lock:
            tokenizer = self._tokens
        options = {"whitespace_pattern": _BLANKS}
        grammar = _library.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        matcher = _library.LLMatcher(tokenizer, grammar, log_level=_SILENT)
        if matcher.is_error():
            raise ConfigError(f"the schema cannot be used: {' '.join(matcher.get_error().split())[:300]}")
        return JsonConstraint(matcher)

    @functools.cached_property
    def _tokens(self) -> Any:
        if isinstance(self._tokenizer, ByteTokenizer):
            return _library.LLTokenizer(
                _library.TokenizerWrapper(_Bytes()), eos_token=[ByteTokenizer.end_id], slices=[]
            )
        if not isinstance(self._tokenizer, LocalTokenizer):
            raise ConfigError("this tokenizer does not report the bytes of its tokens")
        of_model = self._tokenizer.transformers_tokenizer
        try:
            size = max(self._vocab_size, len(of_model))
            return _of_transformers(of_model, n_vocab=size, eos_token=self._eos_ids or None)
        except ValueError as error:  # a tokenizer written in Python raises it
            raise ConfigError(f"the model's tokenizer takes no constraint: {error}") from error


class _Bytes:
    """Adapts `ByteTokenizer` to the interface that llguidance expects."""

    eos_token_id, bos_token_id = ByteTokenizer.end_id, ByteTokenizer.bos_id
    special_token_ids = tuple(range(256, ByteTokenizer.num_tokens))
    tokens = (*(bytes([token]) for token in range(256)), *(f"<{token}>".encode() for token in special_token_ids))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
