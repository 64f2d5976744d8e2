"""The model runner compared with plain forwards of the model, by value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import CacheEngine, CacheRequest, Lease
from hicache.errors import ShapeError
from hicache.kernels.pool_attention import AttentionRule, PoolQueries, pool_attention
from hicache.serving.attention import Attention, SlotAttention, SlotPass
from hicache.serving.long_extend import MIN_QUERIES, long_extend, suits
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.warm_up import warm_up
from hybrid_case import tiny_mistral, tiny_qwen3_next
from serving_case import decode, geometry_of, plain_logits, prompt, shared, tiny_engine, tiny_llama, tiny_runner

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
KINDS = [("sdpa", "torch"), ("eager", "torch"), ("sdpa", "triton")]


def _prefill(runner: ModelRunner, engine: CacheEngine, name: str, tokens: np.ndarray) -> Lease:
    lease = engine.acquire(CacheRequest(name, tokens))
    runner.prefill(lease, tokens, lease.cached_len, len(tokens))
    engine.commit(lease, tokens)
    return lease


@pytest.mark.parametrize(("kernel", "attention"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_chunked_prefill_gives_the_logits_of_one_whole_forward(
    kernel: str, attention: Attention, heads: int, kv_heads: int
) -> None:
    """However a prompt is cut into chunks, the last logits of each chunk are those of a forward over all tokens so
    far."""
    model = shared(tiny_llama, heads=heads, kv_heads=kv_heads, kernel=kernel)
    tokens = prompt(150, seed=1)
    expected = plain_logits(model, tokens)
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine, attention)
        for number, ends in enumerate([(150,), (1, 150), (64, 65, 150), (7, 71, 100, 149, 150)]):
            lease = engine.acquire(CacheRequest(f"r{number}", tokens, namespace=f"n{number}"))
            start = 0
            for end in ends:
                logits = runner.prefill(lease, tokens, start, end)
                torch.testing.assert_close(logits, expected[end - 1], **TOLERANCE)
                start = end
            engine.release(lease)


def test_prefill_behind_a_prefix_of_another_request() -> None:
    """A prompt whose prefix another request computed gives the logits of computing all of it."""
    model = shared(tiny_llama)
    first, second = prompt(100, seed=2), prompt(120, seed=3)
    second[:100] = first
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine)
        engine.release(_prefill(runner, engine, "first", first))
        lease = engine.acquire(CacheRequest("second", second))
        assert lease.cached_len == 100 // engine.page_size * engine.page_size > 0
        logits = runner.prefill(lease, second, lease.cached_len, 120)
        torch.testing.assert_close(logits, plain_logits(model, second)[-1], **TOLERANCE)


def test_a_chunk_with_a_large_mask_runs_in_several_passes() -> None:
    """A maximum of mask entries changes the number of passes, not the logits."""
    model = shared(tiny_llama)
    tokens = prompt(130, seed=4)
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine, geometry_of(model), max_mask_entries=130 * 9)  # 9 rows per pass
        lease = engine.acquire(CacheRequest("r", tokens))
        runner.prefill(lease, tokens, 0, 50)
        logits = runner.prefill(lease, tokens, 50, 130)
        torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


@pytest.mark.parametrize(("kernel", "attention"), KINDS)
@pytest.mark.parametrize("lengths", [(40,), (33, 33), (1, 80, 17, 64)])
def test_batched_decode_gives_the_logits_of_each_request_alone(
    kernel: str, attention: Attention, lengths: tuple[int, ...]
) -> None:
    """Requests of different lengths decoded in one batch get the logits that each gets alone, for several steps."""
    model = shared(tiny_llama, kernel=kernel)
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine, attention)
        # A long request leaves stale slots in the first row; they must not be read.
        engine.release(_prefill(runner, engine, "before", prompt(200, seed=9)))
        sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
        leases = [_prefill(runner, engine, f"r{i}", np.array(s)) for i, s in enumerate(sequences)]
        decoded = []
        for step in range(20):
            for i, sequence in enumerate(sequences):
                sequence.append((7 * step + i) % 97)
                engine.extend(leases[i], 1)
            decoded.append(decode(runner, leases, [sequence[-1] for sequence in sequences]))
        for i, sequence in enumerate(sequences):
            logits = torch.stack([step[i] for step in decoded])
            torch.testing.assert_close(logits, plain_logits(model, sequence)[-20:], **TOLERANCE)


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_prompts_and_decodes_in_one_call_give_the_logits_of_each_alone(attention: Attention) -> None:
    """One call over chunks of prompts, with and without a prefix, and requests that decode, in any order."""
    model = shared(tiny_llama)
    lengths, news = (40, 90, 17, 64, 70), (1, 30, 17, 1, 5)
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine, attention)
        sequences = [prompt(length, seed=20 + i) for i, length in enumerate(lengths)]
        leases = [engine.acquire(CacheRequest(f"r{i}", tokens)) for i, tokens in enumerate(sequences)]
        for lease, tokens, new in zip(leases, sequences, news, strict=True):
            if new < len(tokens):
                runner.prefill(lease, tokens, 0, len(tokens) - new)
        chunks = [
            Chunk(lease, tokens, len(tokens) - new, len(tokens))
            for lease, tokens, new in zip(leases, sequences, news, strict=True)
        ]
        assert [chunk.is_decode for chunk in chunks] == [True, False, False, True, False]
        for row, tokens in zip(runner.forward(chunks), sequences, strict=True):
            torch.testing.assert_close(row, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_a_pass_has_one_launch_for_all_chunks_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at the end of a sequence and those within a prompt, wherever they come in the call; one for the others."""
    model, passes, begin = shared(tiny_llama), [], SlotAttention.begin

    def recorded(attention: SlotAttention, slot_pass: SlotPass) -> None:
        passes.append(slot_pass)
        begin(attention, slot_pass)

    monkeypatch.setattr(SlotAttention, "begin", recorded)
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine, "triton")
        sequences = [prompt(length, seed=60 + i) for i, length in enumerate((20, 9, 31, 12))]
        leases = [engine.acquire(CacheRequest(f"r{i}", tokens)) for i, tokens in enumerate(sequences)]
        runner.prefill(leases[3], sequences[3], 0, 11)
        parts = ((0, 7), (0, 1), (0, 31), (11, 12))
        rows = runner.forward(
            [Chunk(lease, tokens, *part) for lease, tokens, part in zip(leases, sequences, parts, strict=True)]
        )
        for row, tokens, (_, end) in zip(rows, sequences, parts, strict=True):
            torch.testing.assert_close(row, plain_logits(model, tokens[:end])[-1], **TOLERANCE)
    assert [span.counts for span in passes[-1].spans] == [(1, 1), (7, 31)]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_replayed_graphs_decode_the_tokens_of_passes_without_them(compiled: bool) -> None:
    """Batches that grow and shrink, behind prefixes that are still being loaded, decode the same with and without."""
    plain, replayed = (
        _decoded_behind_loads(use_graphs=False),
        _decoded_behind_loads(use_graphs=True, compiled=compiled),
    )
    assert plain == replayed


def _decoded_behind_loads(**options: bool) -> list[list[int]]:
    """The greedy continuations of prompts of whole pages and one token, whose pages are on the host."""
    model = shared(tiny_llama)
    sequences = [prompt(length, seed=30 + i).tolist() for i, length in enumerate((145, 81, 33))]
    with tiny_engine(model, device_tokens=680, host_bytes=4 << 20) as engine:
        runner = ModelRunner(model, engine, geometry_of(model), **options)
        for i, tokens in enumerate(sequences):
            engine.release(_prefill(runner, engine, f"p{i}", np.array(tokens)))
        engine.flush()
        engine.release(_prefill(runner, engine, "filler", prompt(640, seed=29)))  # takes their place on the device
        engine.flush()
        lengths = [len(tokens) for tokens in sequences]
        leases = [engine.acquire(CacheRequest(f"r{i}", np.array(tokens))) for i, tokens in enumerate(sequences)]
        assert [lease.hit.host for lease in leases] == [length - 1 for length in lengths]
        for first, num in ((0, 1), (0, 3), (1, 2), (0, 3)):
            chunks = []
            for i in range(first, first + num):
                if leases[i].length < len(sequences[i]):
                    engine.extend(leases[i], 1)
                chunks.append(Chunk(leases[i], np.array(sequences[i]), len(sequences[i]) - 1, len(sequences[i])))
            for i, row in enumerate(runner.forward(chunks), start=first):
                sequences[i].append(int(row.argmax()))
        for lease in leases:
            engine.release(lease)
        engine.check()
    return [tokens[length:] for tokens, length in zip(sequences, lengths, strict=True)]


def test_decoded_tokens_serve_as_a_prefix() -> None:
    """The KV of decoded tokens serves as the prefix of the next prompt."""
    model = shared(tiny_llama)
    sequence = prompt(30, seed=5).tolist()
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine)
        lease = _prefill(runner, engine, "first", np.array(sequence))
        for step in range(40):
            sequence.append(step)
            engine.extend(lease, 1)
            decode(runner, [lease], sequence[-1:])
        engine.commit(lease, np.array(sequence))
        engine.release(lease)
        longer = np.array([*sequence, 1, 2, 3])
        lease = engine.acquire(CacheRequest("second", longer))
        assert lease.hit.device == 68  # whole pages of 4 of the 70 stored
        logits = runner.prefill(lease, longer, 68, len(longer))
        torch.testing.assert_close(logits, plain_logits(model, longer)[-1], **TOLERANCE)


def test_a_prefill_outside_the_lease_is_refused() -> None:
    """A range without slots in the lease raises ShapeError before anything runs."""
    model = shared(tiny_llama)
    with tiny_engine(model) as engine:
        runner = tiny_runner(model, engine)
        tokens = prompt(40, seed=6)
        lease = engine.acquire(CacheRequest("r", tokens[:30]))
        for start, end in [(0, 31), (5, 5), (-1, 4)]:
            with pytest.raises(ShapeError, match="30 slots"):
                runner.prefill(lease, tokens, start, end)
        with pytest.raises(ShapeError, match="at least one chunk"):
            runner.forward([])


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 700, 40_000])
def test_long_chunks_attend_as_short_ones(prefix: int) -> None:
    """cuDNN's attention of a long chunk is that of the kernel over slots, with and without a prefix, to 16 bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    num, heads, kv_heads, dim = MIN_QUERIES + 13, 8, 2, 128
    slots = torch.randperm(prefix + num, device="cuda", generator=generator) + 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    keys, values = random(prefix + num + 1, kv_heads, dim), random(prefix + num + 1, kv_heads, dim)
    query, rule = random(num, heads, dim), AttentionRule(dim**-0.5)
    one, table = torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(2, prefix + num, dtype=torch.int32)
    table[1] = slots.cpu()
    queries = PoolQueries(
        table.cuda(), one, torch.tensor([0, num], device="cuda").int(), one * (prefix + num), num
    )  # fmt: skip
    expected = pool_attention(query, keys, values, queries, rule, "triton")
    new = (x[slots[prefix:]] for x in (keys, values))
    assert suits(query, rule)
    got = long_extend(query, *new, keys, values, slots[:prefix], rule.scale)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (tiny_llama, {}),
        (tiny_llama, {"device_tokens": 64}),
        (partial(tiny_mistral, 12), {"window_tokens": 64}),
        (tiny_qwen3_next, {"mamba_size": 4}),
    ],
    ids=["full", "few slots", "few window slots", "few states"],
)
def test_a_warm_up_measures_prefill_and_leaves_nothing(build: Callable[[], Any], settings: dict[str, int]) -> None:
    """After it the engine knows what computing costs, every pool is as it was, and the first request finds no hit."""
    model = shared(build)
    with tiny_engine(model, prefill_tokens_per_s="auto", **settings) as engine:
        warm_up(engine, tiny_runner(model, engine), chunk_tokens=64, max_running=5)
        assert engine.stats()["cost.prefill_tokens_per_second"] > 0
        engine.check()
        assert engine.lookup(np.zeros(64, dtype=np.int64), "warm up").device == 0
