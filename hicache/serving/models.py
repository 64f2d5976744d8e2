"""Models to serve: a random one, or one from a local directory.

A `LoadedModel` has a tokenizer and an identity, which is a digest of the model's configuration and all its tensors. So
a model refuses a store that another model has written, even if both models have the same name. Classes of models are
imported when a model is loaded, because this import takes seconds and a process that only tokenizes does not need them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from hicache.errors import ConfigError
from hicache.serving.chat_template import rendered_chat
from hicache.serving.end_tokens import end_tokens
from hicache.serving.packaged_model import require_folder
from hicache.serving.positions import position_limit
from hicache.serving.sampling import PLAIN, SamplingParams
from hicache.serving.text import ByteDecoder, TextDecoder, TokenDecoder

_NOT_WEIGHTS = ("transformers_version", "_name_or_path", "_attn_implementation", "dtype", "torch_dtype")
# Parameters of the function `apply_chat_template`, which requests may not set as variables of a template. Tools are not
# supported.
_NO_VARIABLES = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "add_generation_prompt", "continue_final_message", "documents"
}  # fmt: skip
_NONE: Mapping[str, Any] = MappingProxyType({})
_FILES: Mapping[str, Any] = MappingProxyType({"local_files_only": True, "trust_remote_code": False})
# transformers fills tensors that the files lack, or have in another shape, with random values, and reports their names.
_WEIGHTS: Mapping[str, Any] = MappingProxyType({"ignore_mismatched_sizes": True, "output_loading_info": True})
_MAX_NAMED_TENSORS = 3
UNLIMITED = 1 << 24  # assumed positions if the configuration has no limit
RANDOM_CONTEXT = 131072


class ChatTokens(NamedTuple):
    """The prompt of a chat. The prompt ends with the generation prompt, after which the model answers; `history_len` is
    the number of tokens before the generation prompt. If the next turn's prompt renders the answer differently, it
    shares only these tokens."""

    ids: list[int]
    history_len: int


class Tokenizer(Protocol):
    """Converts text to token ids and back. `max_token_chars`: maximum characters of one token's text."""

    @property
    def max_token_chars(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a part of a prompt, without the special tokens at the ends of a complete prompt."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a complete prompt, with the special tokens that the tokenizer adds at its ends."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any] = _NONE) -> ChatTokens:
        """Return the prompt for the assistant's answer to `messages`, with special tokens. Each message has a "role", a
        "content" and optionally a "name".

        `variables`: values of the chat template's variables; `add_generation_prompt` is true unless given. Raises
        ConfigError if the tokenizer has no chat template, or if the template refuses the messages or skips a message.
        """
        ...

    def decoder(self, prompt: Sequence[int], skip_special: bool = True) -> TextDecoder:
        """Return a decoder for the tokens of an answer to `prompt`. `skip_special`: decode special tokens to empty
        text."""
        ...


class ByteTokenizer:
    """A tokenizer with one token for each byte of UTF-8; ids from 256 on are special.

    A chat is bos, then for each message: the start token, its role, a line feed, its content, the end token.
    """

    num_tokens = 260
    max_token_chars = 1
    bos_id = 256
    start_id = 257
    end_id = 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return [self.bos_id, *self.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any] = _NONE) -> ChatTokens:
        tokens = [self.bos_id]
        for message in messages:
            tokens += [self.start_id, *self.encode(f"{message['role']}\n{message['content']}"), self.end_id]
        if not variables.get("add_generation_prompt", True):
            return ChatTokens(tokens, len(tokens))
        return ChatTokens([*tokens, self.start_id, *self.encode("assistant\n")], len(tokens))

    def decoder(self, prompt: Sequence[int], skip_special: bool = True) -> TextDecoder:
        return ByteDecoder(skip_special)


class LocalTokenizer:
    """A transformers tokenizer based on the library `tokenizers`. Raises ConfigError for any other tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(tokenizer, TokenizersBackend):
            raise ConfigError(
                f"{type(tokenizer).__name__} is no tokenizer of the library tokenizers, which decodes streams; give a "
                "model whose directory has a tokenizer.json"
            )
        self.transformers_tokenizer: Any = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A byte-level vocabulary has one letter for each byte, so this is at least the number of characters.
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.transformers_tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self.transformers_tokenizer.encode(text, verbose=False)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of the tokens. The cleanup of spaces in transformers is off, because it would change
        text that was already streamed."""
        return str(self._backend.decode(tokens, skip_special_tokens=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any] = _NONE) -> ChatTokens:
        if not self.transformers_tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; ask for a completion instead")
        if reserved := _NO_VARIABLES & variables.keys():
            raise ConfigError(f"{', '.join(sorted(reserved))}: no variable of a chat template that a request may set")
        chat = rendered_chat(self.transformers_tokenizer, messages, {"add_generation_prompt": True, **variables})
        ids = self.encode(chat.text)
        return ChatTokens(ids, max(0, len(ids) - len(self.encode(chat.generation_prompt))))

    def decoder(self, prompt: Sequence[int], skip_special: bool = True) -> TextDecoder:
        return TokenDecoder(self._backend, prompt, skip_special)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve. `model_id`: the model's identity for the disk tier. `max_context_len`: number of
    positions that the model supports. `sampling`: parameters that the checkpoint suggests."""

    name: str
    model: Any
    tokenizer: Tokenizer
    model_id: str
    max_context_len: int
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = PLAIN

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())


def random_model(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Return a Llama model over bytes with 3.7 million random weights. The weights are drawn on the CPU, so they are
    equal on all machines."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ByteTokenizer.num_tokens,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=RANDOM_CONTEXT,
        bos_token_id=ByteTokenizer.bos_id,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model = model.to(device=device, dtype=dtype).eval()
    return LoadedModel(
        name="random Llama",
        model=model,
        tokenizer=ByteTokenizer(),
        model_id=model_identity(model),
        max_context_len=RANDOM_CONTEXT,
    )


def local_tokenizer(path: str) -> LocalTokenizer:
    """Return the tokenizer in a directory. Downloads nothing. Raises exceptions of transformers."""
    return LocalTokenizer(AutoTokenizer.from_pretrained(path, **_FILES))


def load_local(path: str, dtype: torch.dtype | Literal["auto"], device: torch.device) -> LoadedModel:
    """Load a causal language model and its tokenizer from a directory. Downloads nothing and runs no code of the
    directory. `dtype`: "auto" means the dtype of the checkpoint. Raises ConfigError, with a message of one line, if the
    model cannot be loaded or the checkpoint lacks tensors of the model."""
    from transformers import AutoModelForCausalLM

    require_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_FILES)
        # Without an argument, transformers chooses sdpa as attention, or eager if sdpa lacks a feature of the model,
        # such as soft caps or sinks.
        model, loading = AutoModelForCausalLM.from_pretrained(path, **_FILES, **_WEIGHTS, dtype=dtype)
        model = model.to(device).eval()
    except Exception as error:
        raise ConfigError(f"model {path} cannot be loaded: {_reason(path, error)}") from error
    _require_all_weights(path, loading)
    return LoadedModel(
        name=Path(path).resolve().name,
        model=model,
        tokenizer=LocalTokenizer(tokenizer),
        model_id=model_identity(model),
        max_context_len=position_limit(model.config.get_text_config()) or UNLIMITED,
        eos_ids=end_tokens(Path(path), model.config, tokenizer),
        sampling=_suggested_sampling(Path(path) / "generation_config.json"),
    )


def _reason(path: str, error: Exception) -> str:
    """Return, in one line, the reason why transformers failed to load a model. If the directory contains code for the
    model or tokenizer, the message of transformers would ask for `trust_remote_code`, which hicache does not have."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" not in text:
        return text[:300]
    files = [file.name for file in sorted(Path(path).glob("*config.json")) if b"auto_map" in file.read_bytes()]
    return (
        f"auto_map in {' and '.join(files)} names Python code of the directory, which hicache never runs; give a model "
        "and tokenizer of classes that transformers has itself"
    )


def _require_all_weights(path: str, loading: Mapping[str, Any]) -> None:
    """Raise ConfigError, with names of tensors, if the files lack a tensor of the model or have a tensor in another
    shape. Additional tensors are no reason to raise, because a checkpoint may contain an image encoder."""
    found = {
        "lacks tensors of the model": loading["missing_keys"],
        "has tensors in another shape than the model's": {name for name, *_ in loading["mismatched_keys"]},
    }
    if not any(found.values()):
        return
    found["has tensors that the model lacks"] = loading["unexpected_keys"]
    wrong = "; it ".join(f"{what}: {_listed(names)}" for what, names in found.items() if names)
    raise ConfigError(
        f"model {path} cannot be loaded: the checkpoint {wrong}; give a complete one of this architecture"
    )


def _listed(tensors: Collection[str]) -> str:
    first, more = sorted(tensors)[:_MAX_NAMED_TENSORS], len(tensors) - _MAX_NAMED_TENSORS
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _suggested_sampling(file: Path) -> SamplingParams:
    """Return the sampling parameters that generation_config.json contains. The file is read directly, because a
    configuration object of transformers adds defaults. Raises ConfigError for a wrong value."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    try:
        suggested = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        given = {name: suggested[name] for name in names if suggested.get(name) is not None}
        return dataclasses.replace(PLAIN, **given)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}; correct it, or remove it to serve without its suggestions") from error


def model_identity(model: Any) -> str:
    """Return the SHA-256, as 32 hex digits, of the configuration and all bytes of every parameter and buffer, including
    buffers that no checkpoint contains."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_WEIGHTS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(values)}\n".encode())
    return digest.hexdigest()[:32]
