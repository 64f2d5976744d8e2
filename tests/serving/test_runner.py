"""The model runner compared with plain forwards of the model, by value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import CacheEngine, CacheRequest, Lease
from hicache.kernels.pool_attention import AttentionRule, PoolQueries, pool_attention
from hicache.serving.attention import SlotAttention, SlotPass
from hicache.serving.long_extend import MIN_QUERIES, long_extend, suits
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.warm_up import warm_up
from hybrid_case import tiny_mistral, tiny_qwen3_next
from serving_case import geometry_of, plain_logits, prompt, shared, tiny_engine, tiny_llama, tiny_runner

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def _prefill(runner: ModelRunner, engine: CacheEngine, name: str, tokens: np.ndarray) -> Lease:
    lease = engine.acquire(CacheRequest(name, tokens))
    runner.prefill(lease, tokens, lease.cached_len, len(tokens))
    engine.commit(lease, tokens)
    return lease


def test_a_pass_has_one_launch_for_all_chunks_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks of one token share one launch, at the end of a sequence or within a prompt, at any place in the call.
    The other chunks share a second launch."""
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
    """Batches that grow and shrink, whose prefixes are still being loaded, decode the same tokens with and without
    graphs."""
    plain, replayed = (
        _decoded_behind_loads(use_graphs=False),
        _decoded_behind_loads(use_graphs=True, compiled=compiled),
    )
    assert plain == replayed


def _decoded_behind_loads(**options: bool) -> list[list[int]]:
    """The greedy continuations of prompts of complete pages and one token, whose pages are on the host."""
    model = shared(tiny_llama)
    sequences = [prompt(length, seed=30 + i).tolist() for i, length in enumerate((145, 81, 33))]
    with tiny_engine(model, device_tokens=680, host_bytes=4 << 20) as engine:
        runner = ModelRunner(model, engine, geometry_of(model), **options)
        for i, tokens in enumerate(sequences):
            engine.release(_prefill(runner, engine, f"p{i}", np.array(tokens)))
        engine.flush()
        engine.release(_prefill(runner, engine, "filler", prompt(640, seed=29)))  # takes the slots of these pages
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


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 700, 40_000])
def test_long_chunks_attend_as_short_ones(prefix: int) -> None:
    """For long chunks, with and without a prefix, cuDNN's attention equals that of the kernel over slots, to 16
    bits."""
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
    """After a warm-up the engine knows the speed of prefill, every pool is unchanged, and the first request finds no
    hit."""
    model = shared(build)
    with tiny_engine(model, prefill_tokens_per_s="auto", **settings) as engine:
        warm_up(engine, tiny_runner(model, engine), chunk_tokens=64, max_running=5)
        assert engine.stats()["cost.prefill_tokens_per_second"] > 0
        engine.check()
        assert engine.lookup(np.zeros(64, dtype=np.int64), "warm up").device == 0
