"""Fields for the cache in requests to a server, as docs/serving.md describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server_case import KEY, SECRET, TINY, Server, ask, serving

LEN, NEW_LEN = 48, 88  # tokens of a prompt; a device of 160 tokens holds two prompts of 48, or one of 48 and one of 88
HELD = LEN - 4  # the last token is computed, and with it its page of 4
ENDLESS = 100_000


@pytest.fixture(scope="module", name="small")
def a_server_with_a_small_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("small"), *TINY, "--device-tokens", "160", "--host-bytes", "0") as server:
        yield server


def cached_tokens(server: Server, prompt: Any, **fields: Any) -> int:
    """Send a prompt for an answer of one token; returns its cached tokens."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1, **fields}).encode()
    status, answer, _ = ask(server, "POST", "/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("seed", "first", "second", "stays"),
    [
        pytest.param(0, {}, {}, 1, id="of equals the older one leaves"),
        pytest.param(10, {}, {"session_end": True}, 0, id="what ends leaves"),
        pytest.param(30, {"next_turn_within_s": 3600}, {}, 0, id="what goes on soon stays"),
        pytest.param(20, {"expected_reuse": 9}, {}, 0, id="what is asked for again stays"),
    ],
)
def test_hints_decide_what_leaves(
    small: Server, seed: int, first: dict[str, int], second: dict[str, int], stays: int
) -> None:
    """Two prompts are sent once each, and a third prompt evicts one of them. The hints decide which one."""
    prompts = [
        np.random.default_rng(seed + i).integers(0, 256, size).tolist() for i, size in enumerate((LEN, LEN, NEW_LEN))
    ]
    assert ask(small, "POST", "/reset_prefix_cache")[:2] == (200, {"success": True})
    assert cached_tokens(small, prompts[0], **first) == cached_tokens(small, prompts[1], **second) == 0
    assert cached_tokens(small, prompts[2]) == 0
    assert cached_tokens(small, prompts[stays]) == HELD > cached_tokens(small, prompts[1 - stays])


def test_a_header_asks_why_tokens_were_computed(small: Server) -> None:
    """The reasons in the usage add up to the tokens that were not cached. Without the header the usage has no reasons.
    This server has no host tier, so it counts the reasons as "unknown"."""
    body = json.dumps({"prompt": [1, 2, 3] * 9, "max_tokens": 1}).encode()
    _, answer, _ = ask(small, "POST", "/v1/completions", body, X_HiCache_Debug="1")
    assert answer["usage"]["prompt_tokens_details"]["missed_tokens_details"] == {"unknown": 27}
    _, answer, _ = ask(small, "POST", "/v1/completions", body)
    assert {*answer["usage"]["prompt_tokens_details"]} == {"cached_tokens", "cached_tokens_details"}


def test_a_lower_priority_is_served_earlier(tmp_path: Path) -> None:
    """Two requests wait for the only place in the batch. The one with the lower value of priority is served first,
    though it arrived later."""

    def wait_in_line(name: str, **fields: Any) -> int:
        body = json.dumps({"prompt": SECRET, "max_tokens": 20, **fields}).encode()
        return ask(server, "POST", "/v1/completions", body, x_request_id=name)[0]

    with serving(tmp_path, "--max-running", "1", "--device-tokens", "131072", api_key=KEY) as server:
        running = server.client(KEY).completions.create(
            model="random", prompt=SECRET, max_tokens=ENDLESS, stream=True, extra_body={"priority": -10}
        )
        next(iter(running))
        with ThreadPoolExecutor() as threads:
            late = threads.submit(wait_in_line, "late", priority=1)
            server.wait_for("hicache_requests_queued", 1)
            early = threads.submit(wait_in_line, "early", priority=-1)
            server.wait_for("hicache_requests_queued", 2)
            running.close()
            assert (late.result(), early.result()) == (200, 200)
        server.wait_for_line(request_id="late")
        names = [line["request_id"] for line in server.log_lines if line.get("request_id") in ("late", "early")]
        assert names == ["early", "late"]


def test_a_key_of_the_cache_changes_nothing(server: Server) -> None:
    """Requests with different cache keys share pages."""
    prompt = f"{SECRET} in another part of the cache " * 4
    held = len(prompt) // 64 * 64
    assert [cached_tokens(server, prompt, prompt_cache_key=key) for key in ("a", "a", "b")] == [0, held, held]
