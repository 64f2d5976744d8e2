"""Collects the tokens that end an answer: all end tokens that at least one file of a checkpoint names.

Fine-tuning often changes only one file. For example, a tokenizer may end turns with <|im_end|> while the configuration
names only <|endoftext|>. SGLang also combines the end tokens of all files. This module reads the files itself, because
a configuration object of transformers has default end tokens if its file names no end token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from hicache.errors import ConfigError
from hicache.serving.chat_template import in_form

log = logging.getLogger(__name__)

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_ANSWER = "an answer to find again"


def end_tokens(folder: Path, model_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, of config.json with its parts for text models, of the tokenizer,
    and of the chat template. `model_config`: used if there is no config.json. Ids outside the model's vocabulary are
    dropped. Raises ConfigError for a value that is no token id."""
    generation, config = folder / "generation_config.json", folder / "config.json"
    found = [*_of_tokenizer(tokenizer), *_named(generation, _read(generation))]
    found += _named(config, _read(config) if config.is_file() else model_config.to_dict())
    num_tokens = int(model_config.get_text_config().vocab_size)
    return frozenset(token for token in found if 0 <= token < num_tokens)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; correct it, or remove it") from error


def _named(file: Path, values: Any) -> Iterable[int]:
    """Return the tokens of `eos_token_id` (a number, a list or null) in a file, and in the parts of the file that
    describe a text model."""
    if not isinstance(values, Mapping):
        return
    given = values.get("eos_token_id")
    for token in given if isinstance(given, list) else [] if given is None else [given]:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"{file}: eos_token_id={given!r}: give a token id, a list of them, or null")
        yield token
    for part in _TEXT_PARTS:
        yield from _named(file, values.get(part))


def _of_tokenizer(tokenizer: Any) -> Iterable[int]:
    """Return the tokenizer's end-of-text token, its end-of-turn token, and the added token with which its chat template
    ends an answer."""
    added = tokenizer.added_tokens_decoder.keys() - {tokenizer.unk_token_id, tokenizer.bos_token_id}
    texts = [tokenizer.special_tokens_map.get("eot_token", ""), _text_after_answer(tokenizer)]
    firsts = [tokenizer.encode(text, add_special_tokens=False)[:1] for text in texts if text]
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    yield from (token for first in firsts for token in first if token in added)


def _text_after_answer(tokenizer: Any) -> str:
    """Return the text that the chat template writes after an answer. Returns "" without a template, or if the template
    refuses the test chat."""
    if not tokenizer.chat_template:
        return ""
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
    for in_parts in (False, True):
        try:
            text = tokenizer.apply_chat_template(in_form(chat, as_system=False, in_parts=in_parts), tokenize=False)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            log.info("the chat template does not show how an answer ends: %s", error)
            continue
        if _ANSWER in text:
            return str(text).rpartition(_ANSWER)[2].strip()
    return ""
