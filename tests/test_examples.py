"""The examples run unchanged. The small scheduler and the small engine give the results that are computed without a
cache."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import runpy
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serving_case import plain_greedy, prompt, shared, tiny_engine, tiny_llama, tiny_runner

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY_ENGINE = EXAMPLES / "tiny_engine.py"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example ends without an error and prints its results."""
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_check_of_a_server_counts_cached_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script that the page about vLLM runs sends one prompt twice. A server may leave details out."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "a model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["model"] + body["prompt"])
            details = {"cached_tokens": 900} if asked[1:] else None
            self.answer({"usage": {"prompt_tokens": 1000, "prompt_tokens_details": details}})

        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    text, script = tmp_path / "text.txt", EXAMPLES / "vllm/check.py"
    text.write_text("a text. " * 1000)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setattr(sys, "argv", [str(script), f"http://127.0.0.1:{server.server_port}", str(text)])
            runpy.run_path(str(script), run_name="__main__")
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["a model" + ("a text. " * 1000)[:6000]] * 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["1000 prompt tokens, cached: None", "1000 prompt tokens, cached: 900"]
    page = " ".join((ROOT / "docs/integrations/vllm_ten_minutes.md").read_text().split())
    assert "python examples/vllm/check.py \\ http://127.0.0.1:8000 LICENSE" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: check.py URL FILE"),
        (["http://127.0.0.1:9", "/none"], "usage: check.py URL FILE"),
        (["http://127.0.0.1:{port}", __file__], "no server answers at http://127.0.0.1:{port}: "),
    ],
)
def test_the_check_without_a_server_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments, without the file or without a server, the check prints one line and ends with status 2."""
    script = EXAMPLES / "vllm/check.py"
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setattr(sys, "argv", [str(script), *(argument.format(port=port) for argument in arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(message.format(port=port))


def test_two_servers_refuse_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server on the port would answer in place of the new one, with its own cached tokens."""
    with socket.socket() as other, contextlib.suppress(OSError):  # another program may use the port already
        other.bind(("127.0.0.1", 8101))
        other.listen()
        script = EXAMPLES / "vllm/two_servers.py"
        monkeypatch.setattr(sys, "argv", [str(script), "a model"])
        with pytest.raises(SystemExit, match=r"port 810[01] is in use"):
            runpy.run_path(str(script), run_name="__main__")


def test_requests_in_a_queue_are_prefetched(capsys: pytest.CaptureFixture[str]) -> None:
    """The first engine of the example finds nothing, and the second one all pages before the last of each prompt."""
    runpy.run_path(str(EXAMPLES / "prefetch_queue.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines] == ["0"] * 6 + ["576"] * 6


@pytest.mark.parametrize("device_tokens", [320, 144])
def test_the_small_scheduler_serves_what_a_model_generates(device_tokens: int) -> None:
    """The answers of the small scheduler are those of complete passes without a cache, also on a device that cannot
    hold all prompts at once. On the smaller device, running requests are preempted."""
    serve = runpy.run_path(str(EXAMPLES / "tiny_scheduler.py"))["serve"]
    model = shared(tiny_llama)
    document = prompt(100, seed=1)
    prompts = {f"q{i}": np.concatenate([document, prompt(7 + i, seed=2 + i)]) for i in range(5)}
    with tiny_engine(model, device_tokens=device_tokens) as engine:
        for _ in range(2):
            answers = serve(engine, tiny_runner(model, engine), prompts)
            assert {name: tuple(tokens) for name, tokens in answers.items()} == {
                name: plain_greedy(model, tokens, 16, answers[name]) for name, tokens in prompts.items()
            }
        assert engine.stats()["admit.device_hit_tokens"] > 0
        num_prompts = 2 * len(prompts)
        assert (engine.stats()["admit.requests"] > num_prompts) == (device_tokens == 144)
        engine.check()


def test_a_batch_served_as_sglang_does_generates_what_plain_attention_does(device: str, kernels: str) -> None:
    """Prefixes are shared, prompts are computed in chunks, and a request is retracted to the CPU in several copies and
    restored. With each kind of kernels the tokens are those of complete passes without a cache. A pass that read
    another request's slots would fail the comparison."""
    example = runpy.run_path(str(EXAMPLES / "sglang_batch.py"))
    place = torch.device(device)
    model, plain = (example[name](example["TINY"], 64, place, torch.float32) for name in ("Model", "PlainAttention"))
    server = example["Server"](model, 84, 64, page_size=4, chunk_tokens=16, copy_tokens=16, plain=plain)
    requests = [example["Request"]([*range(20), *range(i, i + n)], 6) for i, n in enumerate((13, 12, 7, 12))]
    server.serve(requests)
    server.check()
    assert all(server.counts.values()) and server.counts["restored"] == server.counts["retracted"]
    for request in requests:
        tokens = torch.tensor(request.origin_input_ids + request.output_ids, device=place)
        hidden = model.forward(tokens[:-1], torch.arange(len(tokens) - 1, device=place), _attend_causally)
        assert model.next_tokens(hidden)[-6:] == request.output_ids
    server.pool.get_key_buffer(1).mul_(1.01)
    server.serve([example["Request"](requests[0].origin_input_ids, 1)])
    with pytest.raises(AssertionError, match="differs from plain attention"):
        server.check()


def _attend_causally(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("seed", range(8))
def test_the_small_engine_serves_what_was_computed(seed: int) -> None:
    """Over random histories of overlapping requests with common prefixes, cached KV equals computed KV. Each slot and
    page is free or has one owner, and a refused request changes nothing."""
    tiny, rng = runpy.run_path(str(TINY_ENGINE)), np.random.default_rng(seed)
    engine, truth_of = tiny["TinyEngine"](num_slots=40, num_pages=12), tiny["kv_of"]
    stems = [rng.integers(0, 3, 30) for _ in range(3)]
    leases: list[Any] = []
    hits, num_refused = np.zeros(2, np.int64), 0
    for _ in range(300):
        action = rng.choice(["admit", "commit", "end", "poll"])
        if action == "poll":
            engine.poll()
        elif action == "admit":
            tokens = np.append(stems[rng.integers(3)][: rng.integers(31)], rng.integers(0, 3, rng.integers(1, 9)))
            before = _slots_in_use(engine, leases)
            lease = engine.admit(tokens)
            if lease is None:
                num_refused += 1
                assert _slots_in_use(engine, leases) == before
            else:
                start = sum(lease.hit)
                engine.device[lease.slots[start:]] = truth_of(tokens)[start:]
                leases.append(lease)
                hits += lease.hit
        elif leases:
            at = int(rng.integers(len(leases)))
            engine.commit(leases[at])
            if action == "end":
                engine.release(leases.pop(at))
        assert all(torch.equal(engine.device[lease.slots], truth_of(lease.tokens)) for lease in leases)
        assert sorted([*_slots_in_use(engine, leases), *engine.free]) == list(range(1, 41))
        pages = [*engine.pages.held.values(), *engine.pages.in_flight.values(), *engine.pages.free]
        assert sorted(pages) == list(range(1, 13))
    assert hits.all() and num_refused


def _slots_in_use(engine: Any, leases: list[Any]) -> list[int]:
    """The slots of the tree, and the slots of leases after their prefix in the tree."""
    nodes = [engine.root]
    for node in nodes:
        nodes.extend(node.children.values())
    owned = [lease.slots[lease.tree_len :] for lease in leases]
    return torch.cat([*(node.slots for node in nodes), *owned]).tolist()


def test_the_tour_shows_the_whole_small_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of code of the tour are the program, in its order. The output on the page is that of the program."""
    tour = (ROOT / "docs/tour.md").read_text()
    shown = "".join(re.findall(r"```python\n# examples/tiny_engine.py\n(.*?)```", tour, re.DOTALL)).splitlines()
    program = TINY_ENGINE.read_text().splitlines()
    assert [line for line in shown if line] == [line for line in program if line]
    runpy.run_path(str(TINY_ENGINE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert "".join(f"{line}\n" for line in ("```text", *printed, "```")) in tour
