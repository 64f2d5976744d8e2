"""From the bodies of requests to prompts of token ids, within the model's limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.serving.models import Tokenizer
from hicache.serving.sampling import PLAIN, SamplingParams
from hicache.serving.server.protocol import ChatBody, CompletionBody
from hicache.serving.server.replies import invalid

T = TypeVar("T")
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class ServedModel:
    """`name`: what clients call it. `max_len`: tokens of a prompt and its answer together. `sampling`: how tokens are
    chosen where a request does not say. Token ids are below `vocab_size`."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = PLAIN


@dataclass(frozen=True)
class Prompt:
    """`tokens`: int64 [len]; together with `max_new_tokens` at most the model's `max_len`."""

    tokens: npt.NDArray[np.int64]
    max_new_tokens: int


class PromptEncoder:
    """Called on the event loop. The tokenizer runs on a thread of its own, for long texts take it a while."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "hicache-tokenizer")

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """One prompt per text or list of ids. Raises `ApiError`."""
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                ids = await self._in_thread(self._model.tokenizer.encode_prompt, prompt)
            else:
                ids = prompt
            prompts.append(self._checked(ids, body.max_tokens or _DEFAULT_COMPLETION_TOKENS, "prompt"))
        return prompts

    async def of_chat(self, body: ChatBody) -> Prompt:
        """Without a maximum in the body, the answer may be as long as the context allows. Raises `ApiError`."""
        messages = [message.as_template_reads_it() for message in body.messages]
        encode = partial(self._model.tokenizer.encode_chat, variables=body.chat_template_kwargs or {})
        try:
            ids = await self._in_thread(encode, messages)
        except ConfigError as error:
            raise invalid(str(error), "messages") from error
        rest = max(1, self._model.max_len - len(ids))
        return self._checked(ids, body.max_completion_tokens or body.max_tokens or rest, "messages")

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    async def _in_thread(self, encode: Callable[[T], list[int]], given: T) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode, given)

    def _checked(self, ids: Sequence[int], max_new_tokens: int, param: str) -> Prompt:
        model = self._model
        if not ids:
            raise invalid("the prompt is empty; give at least one token", param)
        if max(ids) >= model.vocab_size:
            raise invalid(f"a token id is not below the size of the vocabulary, {model.vocab_size}", param)
        if len(ids) + max_new_tokens > model.max_len:
            raise invalid(
                f"this model's maximum context length is {model.max_len} tokens, but {len(ids) + max_new_tokens} were "
                f"requested ({len(ids)} of the prompt, {max_new_tokens} of the answer); shorten one of them",
                param,
                "context_length_exceeded",
            )
        return Prompt(np.array(ids, dtype=np.int64), max_new_tokens)
