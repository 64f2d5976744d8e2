"""Fields and routes of vLLM's and SGLang's servers that `hicache serve` has beyond OpenAI's API."""

from __future__ import annotations

import http.client
import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hicache
from server_case import FULL, HEADERS, SECRET, TINY, Server, ask, serving
from waiting import BOUND_S, eventually

if TYPE_CHECKING:
    import openai

LONG = f"{SECRET} " * 40
ENDLESS = 60_000  # tokens, more than any machine generates during a test
MODEL = "random"


def test_a_reply_is_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """The library's own dump of an answer, including nulls, is a valid message of the next chat. A dump without content
    is valid too. Each dump stands for the text of the answer."""
    asked: Any = {"role": "user", "content": f"{SECRET} history"}
    shared: dict[str, Any] = {"model": MODEL, "max_completion_tokens": 3, "temperature": 0, "user": "me", "n": None}
    message = client.chat.completions.create(messages=[asked], **shared).choices[0].message
    dumped: Any = message.model_dump()
    assert None in dumped.values()
    plain: Any = [{"role": "assistant", "content": message.content}, {"role": "assistant", "content": ""}]
    empty: Any = {"role": "assistant", "content": None, "tool_calls": []}
    answers = [
        client.chat.completions.create(messages=[asked, *history, asked], **shared)
        for history in ([dumped, empty], plain)
    ]
    first, second = (
        (answer.choices[0].message.content, answer.usage and answer.usage.prompt_tokens) for answer in answers
    )
    assert first == second


def test_several_answers_compute_their_prompt_once(server: Server, client: openai.OpenAI) -> None:
    """Each of n answers is the one for its own seed, streamed or not, in a chat or not. All answers but the first find
    the prompt in the cache, which counts as no hit. If the client disconnects, answers that wait for the first one end
    too."""
    text = f"several {LONG}"
    shared: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 1.2}
    names = ("hicache_prompt_tokens_total", "hicache_cached_tokens_total", "hicache_admit_uncounted_hit_tokens_total")
    before = [server.metric(name) for name in names]
    done = client.completions.create(prompt=[text, SECRET], n=3, seed=5, **shared)
    counts = [2 + len(text) + len(SECRET), 0, 2 * (len(text) // 64 * 64)]
    found = lambda: [server.metric(name) - count for name, count in zip(names, before, strict=True)]  # noqa: E731
    eventually(lambda: found() == counts, found)  # the engine's figures are at most a second old
    alone = [
        client.completions.create(prompt=prompt, seed=5 + i, **shared).choices[0].text
        for prompt in (text, SECRET)
        for i in range(3)
    ]
    assert [choice.text for choice in done.choices] == alone and len(set(alone)) == 6
    assert done.usage is not None and done.usage.prompt_tokens == 2 + len(text) + len(SECRET)
    assert done.usage.completion_tokens == 36

    messages: Any = [{"role": "user", "content": text}]
    complete = client.chat.completions.create(messages=messages, n=2, seed=5, **shared)
    texts: list[list[str]] = [[], []]
    for event in client.chat.completions.create(messages=messages, n=2, seed=5, stream=True, **shared):
        for choice in event.choices:
            assert (choice.delta.role == "assistant") == (not texts[choice.index])
            texts[choice.index].append(choice.delta.content or "")
    assert ["".join(parts) for parts in texts] == [choice.message.content for choice in complete.choices]

    aborted = server.metric('hicache_requests_total{outcome="abort"}')
    ask_and_leave = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
    body = json.dumps({"prompt": f"left {LONG * 40}", "n": FULL, "max_tokens": ENDLESS}).encode()
    ask_and_leave.request("POST", "/v1/completions", body, HEADERS)
    server.wait_for_at_least("hicache_requests_running", 1)
    ask_and_leave.close()
    server.wait_idle()
    server.wait_for('hicache_requests_total{outcome="abort"}', aborted + FULL)


def test_tokens_are_chosen_as_asked(client: openai.OpenAI) -> None:
    """Biases, stop tokens, a minimum number of tokens and shown special tokens have the effects that vLLM documents."""

    def create(**more: Any) -> tuple[str, str, int]:
        done = client.completions.create(
            model=MODEL, prompt=f"{SECRET} chosen", temperature=0, max_tokens=6, extra_body=more
        )
        assert done.usage is not None
        return done.choices[0].text, done.choices[0].finish_reason, done.usage.completion_tokens

    a, b, special = "97", "98", "257"
    assert create(logit_bias={a: 100}) == ("aaaaaa", "length", 6)
    assert create(logit_bias={a: 100}, stop_token_ids=[97], ignore_eos=True) == ("a", "stop", 1)
    waits = create(logit_bias={a: 100, b: 50}, stop_token_ids=[97], min_tokens=3)
    assert waits == ("bbba", "stop", 4)
    assert create(logit_bias={a: 100}, stop="a", min_tokens=3) == ("aaa", "stop", 4)
    assert create(logit_bias={special: 100}) == ("", "length", 6)
    assert create(logit_bias={special: 100}, skip_special_tokens=False) == ("<|257|>" * 6, "length", 6)
    tired = create(logit_bias={a: 98, b: 95}, frequency_penalty=2, presence_penalty=-1)[0]
    assert sorted(tired) == [*"aaaabb"] and tired.startswith("aa")


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Log probabilities are equal in complete and streamed responses of completions and chats. The most likely tokens
    are in order and contain the chosen one, which is the first if the request is greedy."""
    shared: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 4}
    ids = {"return_tokens_as_token_ids": True}
    for temperature in (0, 1.5):
        prompts = [f"{SECRET} p", f"{SECRET} longer"]
        asked: dict[str, Any] = {
            "prompt": prompts,
            "temperature": temperature,
            "logprobs": 3,
            "extra_body": ids,
            **shared,
        }
        streamed: list[list[Any]] = [[], []]
        for event in client.completions.create(stream=True, **asked):
            for choice in event.choices:
                streamed[choice.index].append(choice.logprobs)
        for choice, parts in zip(client.completions.create(**asked).choices, streamed, strict=True):
            found = choice.logprobs
            assert found and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
            assert len(found.tokens) == 12
            for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
                assert token.startswith("token_id:") and top[token] == logprob and len(top) in (3, 4)
                first = next(iter(top.values()))
                assert first == max(top.values()) and (temperature or logprob == first)
            names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
            joined = {name: [item for part in parts for item in getattr(part, name)] for name in names}
            assert joined["tokens"] == found.tokens and joined["text_offset"] == found.text_offset
            # The two prompts may or may not run in one pass, depending on their arrival.
            assert joined["token_logprobs"] == pytest.approx(found.token_logprobs, rel=1e-5)
            assert joined["top_logprobs"] == [pytest.approx(top, rel=1e-5) for top in found.top_logprobs]

    messages: Any = [{"role": "user", "content": SECRET}]
    bias = {"logit_bias": {"97": 100}}  # the reported log probabilities are those before the bias
    chat: dict[str, Any] = {"messages": messages, "logprobs": True, "top_logprobs": 2, **shared, **bias}
    complete = client.chat.completions.create(**chat).choices[0].logprobs
    events = [event.choices[0].logprobs for event in client.chat.completions.create(stream=True, **chat)]
    assert complete and complete.content and len(complete.content) == 12
    assert [entry for event in events if event for entry in event.content or ()] == complete.content
    for entry in complete.content:
        assert (entry.token, entry.bytes) == ("a", [97]) and len(entry.top_logprobs) == 2
        assert entry.logprob < entry.top_logprobs[1].logprob < entry.top_logprobs[0].logprob < 0


def test_echoed_prompts_have_log_probabilities_as_answers_do(server: Server, client: openai.OpenAI) -> None:
    """The log probabilities of an echoed prompt equal those of its generation, whether the cache holds it or not, with
    or without an answer after it, and in each of several answers. Without logprobs only the text is returned."""
    shared: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 2}
    begin = [256, *f"{SECRET} echo".encode()]
    generated = client.completions.create(prompt=begin, max_tokens=70, logit_bias={"97": 30}, **shared).choices[0]
    assert generated.logprobs and generated.logprobs.token_logprobs and generated.text == "a" * 70
    text = f"{SECRET} echo{generated.text}"
    for max_tokens, n in ((1, 1), (0, 1), (2, 2)):
        done = client.completions.create(prompt=text, echo=True, max_tokens=max_tokens, n=n, **shared)
        assert done.usage and done.usage.prompt_tokens == len(text) + 1
        assert done.usage.completion_tokens == max_tokens * n and done.usage.prompt_tokens_details
        assert done.usage.prompt_tokens_details.cached_tokens == 0
        for choice in done.choices:
            found = choice.logprobs
            assert (
                choice.text.startswith(text) and found and found.tokens and found.token_logprobs and found.text_offset
            )
            assert found.token_logprobs[0] is None and found.tokens[:2] == ["<|256|>", SECRET[0]]
            assert len(found.tokens) == 1 + len(text) + max_tokens
            assert found.text_offset[:3] == [0, 7, 8]
            again = found.token_logprobs[len(begin) : len(begin) + 70]
            assert again == pytest.approx(generated.logprobs.token_logprobs, rel=1e-3, abs=1e-3)
    long: dict[str, Any] = {**shared, "prompt": text * 10, "echo": True, "max_tokens": 2}
    parts = [event.choices[0] for event in client.completions.create(stream=True, **long)]
    joined = [logprob for part in parts if part.logprobs for logprob in part.logprobs.token_logprobs or ()]
    complete = client.completions.create(**long).choices[0]
    assert complete.logprobs and joined == complete.logprobs.token_logprobs and len(joined) == 3 + 10 * len(text)
    assert max(len(part.logprobs.tokens or ()) for part in parts if part.logprobs) <= 256
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"] == [parts[-1].finish_reason]
    assert "".join(part.text for part in parts) == complete.text
    many = {"prompt": [begin * 1000] * 4, "echo": True, "logprobs": 20}
    status, answer, _ = ask(server, "POST", "/v1/completions", json.dumps(many).encode())
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    body = json.dumps({"prompt": text, "echo": True, "max_tokens": 0}).encode()
    status, answer, _ = ask(server, "POST", "/v1/completions", body + b" " * 300_000)
    assert (status, answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (200, text, None)
    assert ask(server, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 0}')[0] == 400


def test_texts_become_the_tokens_that_prompts_do(server: Server, client: openai.OpenAI) -> None:
    """/tokenize returns the tokens of a completion's prompt and of a chat's, and /detokenize returns their text. A body
    of one kind may not have fields of the other."""

    def post(path: str, body: dict[str, Any], padding: int = 0) -> Any:
        status, answer, _ = ask(server, "POST", path, json.dumps(body).encode() + b" " * padding)
        return answer if status == 200 else (status, answer["error"]["param"])

    limit, text = client.models.retrieve(MODEL).to_dict()["max_model_len"], f"{SECRET} \u00e9"
    for padding in (0, 300_000):
        found = post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}, padding)
        assert found["tokens"] == [256, *text.encode()] and (found["count"], found["max_model_len"]) == (12, limit)
        assert found["token_strs"][:2] == ["<|256|>", SECRET[0]]
        bare = post("/tokenize", {"prompt": text, "add_special_tokens": False}, padding)
        assert bare["tokens"] == found["tokens"][1:] and bare["token_strs"] is None
        assert post("/detokenize", {"tokens": bare["tokens"]}, padding) == {"prompt": text}
    messages: Any = [{"role": "user", "content": text}]
    asked = post("/tokenize", {"messages": messages})
    done = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert done.usage is not None and done.usage.prompt_tokens == asked["count"]
    history = post("/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    assert asked["tokens"][: len(history)] == history and len(history) < asked["count"]
    assert (
        post("/tokenize", {}) == (400, "prompt") and post("/tokenize", {"prompt": "a", "messages": None})["count"] == 2
    )
    assert ask(server, "POST", "/tokenize", b"3")[0] == ask(server, "POST", "/detokenize", b"null")[0] == 400
    assert post("/tokenize", {"messages": messages, "prompt": text}) == (400, "prompt")
    assert post("/tokenize", {"model": "gpt-9", "prompt": text}) == (404, "model")
    assert post("/detokenize", {"tokens": [260]}) == (400, "tokens")
    for path in ("/tokenize", "/detokenize"):
        assert ask(server, "POST", path, b"{}", Authorization="Bearer wrong")[0] == 401


def test_what_asks_whether_a_server_is_there(server: Server) -> None:
    """/ping and /health, with GET and HEAD, and the version need no key. The root redirects to the dashboard."""
    for method, path in (
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("HEAD", "/ping"),
        ("HEAD", "/health"),
        ("GET", "/version"),
    ):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        assert (response.status, bool(body)) == (200, method != "HEAD")
        connection.close()
    assert json.loads(body) == {"version": hicache.__version__}
    with urllib.request.urlopen(f"{server.root}/", timeout=BOUND_S) as page:
        assert page.url == f"{server.root}/dashboard" and b"<html" in page.read()


def test_a_reset_makes_the_next_request_miss(tmp_path: Path) -> None:
    """A reset empties both memory tiers, or the named one. Afterwards the usage shows the tier that still had the
    prompt. The error about an unknown tier or parameter names it."""

    def post(body: bytes = b"", path: str = "/reset_prefix_cache") -> Any:
        status, answer, _ = ask(server, "POST", path, body)
        return answer if status == 200 else (status, answer["error"]["message"])

    tiers = ("--device-tokens", "4096", "--host-bytes", "8MiB", "--write-policy", "write_through")
    with serving(tmp_path, *TINY, *tiers) as server:

        def tiers_hit() -> dict[str, float]:
            names = {tier: f'hicache_cached_tokens_total{{tier="{tier}"}}' for tier in ("device", "host")}
            before = {tier: server.metric(name) for tier, name in names.items()}
            done = server.client().completions.create(model=MODEL, prompt=LONG, max_tokens=1)
            counted = {tier: server.metric(name) - before[tier] for tier, name in names.items()}
            assert done.usage is not None and done.usage.prompt_tokens_details is not None
            details = done.usage.prompt_tokens_details.to_dict()
            assert details["cached_tokens_details"] == {**counted, "disk": 0, "remote": 0}
            assert details["cached_tokens"] == sum(counted.values())
            return counted

        num_tokens = len(LONG) // 16 * 16
        assert [tiers_hit(), tiers_hit()] == [{"device": 0, "host": 0}, {"device": num_tokens, "host": 0}]
        assert post(b'{"tiers": ["device"]}') == {"success": True}
        assert tiers_hit() == {"device": 0, "host": num_tokens}
        assert post() == {"success": True} and tiers_hit() == {"device": 0, "host": 0}
        for body, culprit in (
            (b'{"tiers": ["disk"]}', "cache_salt"),
            (b'{"tiers": ["tape"]}', "'device' or 'host'"),
            (b'{"tier": ["host"]}', "tier: this route does not support"),
        ):
            status, message = post(body)
            assert status == 400 and culprit in message
        assert "tiers" in post(path="/reset_prefix_cache?reset_external=true")[1]
