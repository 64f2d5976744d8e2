"""Text from tokens, one token at a time. The streamed text equals the text of all tokens together, and is cut exactly
before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from hicache.errors import ConfigError
from hicache.serving.models import ByteTokenizer, LocalTokenizer
from hicache.serving.text import StopMatcher, TextDecoder

_TEXTS = st.text(alphabet="ab ,é\u4e2d\U0001f600\u0301", max_size=40)


def byte_level() -> LocalTokenizer:
    """A tokenizer that maps bytes to letters, like those of GPT-2 and Llama 3. A character may be several tokens."""
    words = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return LocalTokenizer(hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def byte_fallback() -> LocalTokenizer:
    """A tokenizer like Llama 2's: spaces are U+2581, and unknown characters are byte tokens. The decoder drops the
    first space."""
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "\u2581", "a", "b", ",", "é"])}
    words |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return LocalTokenizer(hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


_LOCAL = [byte_level(), byte_fallback()]


def parts_of(decoder: TextDecoder, tokens: Sequence[int]) -> list[str]:
    return [*map(decoder.push, tokens), decoder.finish()]


@given(tokens=st.lists(st.integers(0, 259), max_size=60))
def test_bytes_of_any_kind(tokens: list[int]) -> None:
    """The parts make up the text of all bytes, valid UTF-8 or not. Special tokens have no text."""
    assert "".join(parts_of(ByteTokenizer().decoder(()), tokens)) == ByteTokenizer().decode(tokens)


@given(text=_TEXTS, prompt=_TEXTS, which=st.integers(0, 1))
def test_characters_are_never_broken(text: str, prompt: str, which: int) -> None:
    """The tokens of a text decode to the same text after any prompt, spaces included, and no part is a broken
    character."""
    tokenizer = _LOCAL[which]
    before, both = tokenizer.encode(f"a{prompt}"), tokenizer.encode(f"a{prompt}{text}")
    if both[: len(before)] != before:
        return  # the end of the prompt and the start of the text are one token
    parts = parts_of(tokenizer.decoder(before), both[len(before) :])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(numbers=st.lists(st.integers(0, 1000), max_size=80), which=st.integers(0, 1), skip_special=st.booleans())
def test_tokens_of_any_kind(numbers: list[int], which: int, skip_special: bool) -> None:
    """For any tokens, also broken characters and ids beyond the vocabulary, no complete character of a token is
    lost."""
    tokenizer = _LOCAL[which]
    tokens, letter = [number % 280 for number in numbers], "é" if which else "b"
    text = "".join(parts_of(tokenizer.decoder(tokens[:9], skip_special), tokens))
    assert text.count(letter) >= sum(tokenizer.decode([token]) == letter for token in tokens)


def test_a_tokenizer_of_python_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ByT5Tokenizer .* tokenizer\.json"):
        LocalTokenizer(hf.ByT5Tokenizer())


def test_spaces_are_not_cleaned_up() -> None:
    """A tokenizer that suggests removing spaces before full stops and contractions loses no character in a stream,
    because the text of earlier tokens never changes."""
    words = [("<unk>", 0.0), ("\u2581", -1.0), *((letter, -2.0) for letter in "not.,?!'s")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(words, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    cleaning = LocalTokenizer(
        hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)
    )
    text = " . , ?  ! n't 's ."
    ids = cleaning.encode(text)
    assert cleaning.decode(ids) == "".join(parts_of(cleaning.decoder(()), ids)) == text


def test_special_tokens_and_broken_bytes_end() -> None:
    """End tokens decode to nothing. Bytes that form no character become U+FFFD at the end, or earlier if there are
    many."""
    tokenizer = byte_level()
    (eos,), (lead, *_) = tokenizer.encode("</s>"), tokenizer.encode("\U0001f600")
    assert parts_of(tokenizer.decoder(()), [*tokenizer.encode("ab"), eos]) == ["a", "b", "", ""]
    assert parts_of(tokenizer.decoder(()), [lead]) == ["", "\ufffd"]
    assert "".join(map(tokenizer.decoder(()).push, [lead] * 100)).startswith("\ufffd" * 64)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Search character by character; returns the text before the first complete stop string, the longest of several,
    and whether one was found."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    parts=st.lists(st.text(alphabet="ab", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_cut_exactly(parts: list[str], stops: list[str]) -> None:
    """However a text is divided into parts, the output is the text before the stop string, and never changes later."""
    matcher, out = StopMatcher(stops), ""
    expected, found = cut("".join(parts), stops)
    for part in parts:
        out += matcher.push(part)
        assert expected.startswith(out)
    out += matcher.finish()
    assert (out, matcher.found) == (expected, found)


def test_whole_prompts() -> None:
    """A prompt has the tokens that transformers gives for the text: a bos only if the tokenizer adds one. A part of a
    prompt has no bos."""
    tokenizer = byte_level()
    inner = tokenizer.transformers_tokenizer
    inner.bos_token, plain = "</s>", tokenizer.encode("ab")
    assert tokenizer.encode_prompt("ab") == inner("ab")["input_ids"] == plain
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "</s> $A", None, [("</s>", inner.bos_token_id)]
    )
    assert tokenizer.encode_prompt("ab") == inner("ab")["input_ids"] == [inner.bos_token_id, *plain]
    assert tokenizer.encode("ab") == plain
    assert ByteTokenizer().encode_prompt("ab") == [ByteTokenizer.bos_id, *b"ab"]


def test_chat_formats() -> None:
    """A chat of a byte tokenizer has its roles in special tokens. A template is applied with the request's variables. A
    template that raises is an error, and so is a variable with the name of a parameter."""
    messages = [{"role": "user", "content": "hi<|x|>"}]
    (bare, _), (complete, history_len) = (
        ByteTokenizer().encode_chat(messages, {"add_generation_prompt": begins}) for begins in (False, True)
    )
    assert history_len == len(bare) and complete[:2] == [ByteTokenizer.bos_id, ByteTokenizer.start_id]
    assert ByteTokenizer().encode_chat(messages).ids == complete == [*bare, ByteTokenizer.start_id, *b"assistant\n"]
    tokenizer = byte_level()
    for template in (None, "{{ raise_exception('never') }}"):
        tokenizer.transformers_tokenizer.chat_template = template
        with pytest.raises(ConfigError):
            tokenizer.encode_chat(messages)
    tokenizer.transformers_tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}>"
    assert tokenizer.decode(tokenizer.encode_chat(messages).ids) == "user:hi<|x|>>"
    tokenizer.transformers_tokenizer.chat_template += "{{ mood }}{% if add_generation_prompt %}a{% endif %}"
    variables = {"mood": "calm", "unread": 1, "add_generation_prompt": False}
    assert tokenizer.decode(tokenizer.encode_chat(messages, variables).ids) == "user:hi<|x|>>calm"
    for reserved in ("chat_template", "tools", "tokenize", "messages"):
        with pytest.raises(ConfigError, match=reserved):
            tokenizer.encode_chat(messages, {reserved: "{{ 1 }}"})


EACH, TEXT = "{% for m in messages %}{{ m.role }}:", "{{ m.content }}{% endfor %}"
KNOWN_ROLES = "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.role }}:" + (
    "{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = (
    EACH + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = EACH + "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
STRICT = KNOWN_ROLES.replace("{% endif %}", "{% else %}{{ raise_exception('role ' + m.role) }}{% endif %}")
NO_SYSTEM = STRICT.replace("'system', ", "")
SILENT = KNOWN_ROLES.replace("'system', ", "")


@pytest.mark.parametrize(
    ("template", "developer"),
    [
        (EACH + TEXT, "developer"), (KNOWN_ROLES, "system"), (STRICT, "system"), (PARTS, "developer"),
        (EITHER, "developer"), (EACH + TEXT.replace("m.content", "m.content | trim"), "developer"),
        (PARTS.replace(EACH, "{% for m in messages if m.role != 'developer' %}{{ m.role }}:"), "system"),
        (SILENT, r"leaves out messages of the role developer"), (NO_SYSTEM, "role developer"),
        (EACH + "{% endfor %}", "leaves out messages of the role assistant and developer and user"),
    ],
)  # fmt: skip
def test_every_message_of_a_chat_is_in_its_prompt(template: str, developer: str) -> None:
    """A chat keeps every message, whichever roles a template knows and whichever form of content it reads. A message of
    the role developer becomes a system message if the template ignores developers. A chat that would lose a message is
    refused."""
    tokenizer = byte_level()
    tokenizer.transformers_tokenizer.chat_template = template
    contents = {"developer": "be-brief", "user": "{{ 1 }}", "assistant": ""}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "{'type': 'text'}"}]
    if "role" in developer:
        with pytest.raises(ConfigError, match=developer):
            tokenizer.encode_chat(messages)
        return
    chat = tokenizer.decode(tokenizer.encode_chat(messages).ids)
    assert chat == f"{developer}:be-briefuser:{{{{ 1 }}}}assistant:assistant:yesuser:{{'type': 'text'}}"


@pytest.mark.parametrize(
    ("end", "begun"),
    [
        ("{% if add_generation_prompt %}assistant:{{ '' if think else '<think>' }}{% endif %}", "assistant:<think>"),
        ("{% if not add_generation_prompt %}{{ raise_exception('only to answer') }}{% endif %}assistant:", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_where_the_generation_prompt_of_a_chat_begins(end: str, begun: str) -> None:
    """The history of a chat ends where the template begins the answer, with the request's variables. If the template
    does not show this position, the history is the complete prompt."""
    tokenizer, messages = byte_level(), [{"role": "user", "content": "hi"}]
    tokenizer.transformers_tokenizer.chat_template = EACH + TEXT + end
    ids, history_len = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids[history_len:]) == begun
    if "think" in end:
        ids, history_len = tokenizer.encode_chat(messages, {"think": True})
        assert tokenizer.decode(ids[history_len:]) == "assistant:"
