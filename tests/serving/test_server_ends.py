"""How a server ends: by SIGTERM, by a kill, or before it has started. The server has a local model with a tokenizer and
a chat template."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from family_case import save_model
from server_case import SECRET, TINY, Server, serving
from waiting import BOUND_S, eventually

TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}
{{- '<s>' + m.role + ': ' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"""
MODEL = "model"
ENDLESS = 60_000  # tokens, more than any machine generates during a test


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with a byte-level tokenizer that has a chat template."""
    path = tmp_path_factory.mktemp("models") / MODEL
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17}
    save_model(path, hf.Qwen2Config(**sizes, **heads, initializer_range=0.2))
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    suggested = path / "generation_config.json"
    suggested.write_text(json.dumps({**json.loads(suggested.read_text()), "do_sample": True, "top_k": 1}))
    return path


def chat(server: Server, **more: Any) -> tuple[str, int]:
    """The text and the cached tokens of one long chat, whose usage splits them by tier."""
    messages: Any = [{"role": "user", "content": f"{SECRET} " * 60}]
    done = server.client().chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=20, extra_body={"ignore_eos": True, **more}
    )
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    details = done.usage.prompt_tokens_details.to_dict()
    assert sum(details["cached_tokens_details"].values()) == details["cached_tokens"]
    return done.choices[0].message.content or "", details["cached_tokens"]


def test_killed_and_started_again(model: Path, tmp_path: Path) -> None:
    """After a kill, the next server has the cached tokens from disk and gives the same text. After SIGTERM, running
    requests are completed, and new ones get 503. A second signal aborts running requests. The status is 0."""
    flags = (str(model), *TINY, "--device-tokens", "65536", "--host-bytes", "8MiB", "--disk-path", str(tmp_path / "d"))
    import openai

    (tmp_path / "first").mkdir()
    with serving(tmp_path / "first", *flags, "--keep-alive-s", "0.05") as server:
        with socket.create_connection((server.host, server.port), BOUND_S) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"".join(iter(lambda: idle.recv(4096), b"")).startswith(b"HTTP/1.1 200 ")
        text, cached = chat(server)
        assert cached == 0
        # All complete pages of the prompt, which the store has acknowledged.
        num_pages = chat(server)[1] // 16
        assert num_pages > 20
        server.wait_for_at_least("hicache_disk_stored_pages", num_pages)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    (tmp_path / "second").mkdir()
    with serving(tmp_path / "second", *flags, "--served-model-name", MODEL, "other", "--grace-s", "600") as server:
        assert chat(server) == (text, num_pages * 16)
        assert [(listed.id, listed.to_dict()["root"]) for listed in server.client().models.list()] == [
            (MODEL, MODEL),
            ("other", MODEL),
        ]
        prompted: Any = {"model": "other", "prompt": SECRET, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
        greedy = server.client().completions.create(temperature=0, **prompted)
        as_suggested = server.client().completions.create(**prompted)
        assert (as_suggested.model, as_suggested.choices) == ("other", greedy.choices)
        assert server.metric('hicache_cached_tokens_total{tier="disk"}') == num_pages * 16
        assert chat(server, cache_salt="other") == (text, 0)
        messages: Any = [{"role": "system", "content": SECRET}]
        with pytest.raises(openai.BadRequestError):  # the template raises
            server.client().chat.completions.create(model=MODEL, messages=messages)

        one = server.client().completions.create(model=MODEL, prompt=SECRET, max_tokens=1)
        assert one.usage is not None and one.usage.prompt_tokens == len(SECRET)  # no bos: the tokenizer adds none
        short, endless = (
            server.client().completions.create(
                model=MODEL, prompt=SECRET, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
            )
            for max_tokens in (100, ENDLESS)
        )
        next(iter(short)), next(iter(endless))
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: server.status("/health") != 200 and server.status("/health")) == 503
        with pytest.raises(openai.InternalServerError) as refused:
            server.client().completions.create(model=MODEL, prompt=SECRET, max_tokens=1)
        assert refused.value.code == "server_stopping"
        assert [*short][-1].choices[0].finish_reason == "length"
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(endless)
        assert server.process.wait(BOUND_S) == 0, server.log
