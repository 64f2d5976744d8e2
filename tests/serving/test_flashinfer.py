"""Attention by flashinfer, compared by value with the kernels of the project; and what is said where it cannot run."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from hicache.engine import CacheEngine, CacheRequest, Lease
from hicache.errors import ConfigError, UnsupportedModel
from hicache.kernels.pool_attention import PoolQueries
from hicache.layout import LatentGeometry
from hicache.serving.attention import Attention, QuerySpan
from hicache.serving.flashinfer_attention import check_computes, require_flashinfer, seen_slots
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.support import check_supported
from serving_case import DEVICE, VOCAB, decode, geometry_of, prompt, shared, tiny_engine, tiny_llama, tiny_runner

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


def half_llama() -> Any:
    """Full attention in every layer."""
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    return _built(LlamaForCausalLM, config)


def half_gemma() -> Any:
    """Window and full layers in turn, with soft caps and a scale of their own."""
    config = Gemma2Config(
        **SIZES,
        num_hidden_layers=4,
        sliding_window=40,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        attn_implementation="eager",
    )
    return _built(Gemma2ForCausalLM, config)


def _built(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval().to(DEVICE, torch.float16)


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CUDA device, and without the package, the error names what to do."""
    cpu_model = shared(tiny_llama, device="cpu")
    with tiny_engine(cpu_model) as engine, pytest.raises(ConfigError, match=r"CUDA device.*use attention triton"):
        tiny_runner(cpu_model, engine, "flashinfer")
    with pytest.raises(ConfigError, match="CUDA device"):
        check_supported(cpu_model, "flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache\[flashinfer\]'") as raised:
        require_flashinfer(torch.device("cuda"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_seen_slots_are_those_that_some_query_sees(window: int) -> None:
    """The last tokens of each sequence, from the first that its first query sees, by their slots in the buffers."""
    lengths, counts, rows = (5, 9, 3, 12), (1, 6, 3, 2), [2, 0, 5, 3]
    table = torch.randperm(6 * 12).view(6, 12).int()
    slot_map = torch.randperm(6 * 12)
    starts = torch.tensor([0, *np.cumsum(counts)]).int()
    queries = PoolQueries(table, torch.tensor(rows).int(), starts, torch.tensor(lengths).int(), max(counts))
    span = QuerySpan(0, sum(counts), queries, counts, lengths)
    first = [max(0, n - c - window + 1) if window else 0 for n, c in zip(lengths, counts, strict=True)]
    expected = torch.cat([table[row, f:n] for row, f, n in zip(rows, first, lengths, strict=True)])
    for mapping, slots in ((None, expected), (slot_map, slot_map[expected.long()].int())):
        kept, got = seen_slots(span, window, mapping)
        assert kept == [n - f for f, n in zip(first, lengths, strict=True)]
        assert got.dtype == torch.int32
        assert torch.equal(got, slots)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "changes", "match"),
    [
        (16, "float16", {}, "heads of"),
        (64, "float32", {}, "float16 or bfloat16"),
        (64, "float16", {"layer_kinds": ("full", "chunked"), "chunk": 8}, "within chunks"),
        (64, "float16", {"head_num": 1, "latent": LatentGeometry(48, 16)}, "latent"),
        (64, "float16", {"v_head_dim": 128}, "values of 128"),
    ],
)
def test_what_it_does_not_compute_is_refused(head_dim: int, dtype: str, changes: dict[str, Any], match: str) -> None:
    """Heads, dtypes and kinds of attention that flashinfer lacks are named with what to use instead."""
    model = shared(tiny_llama, head_dim=head_dim)
    refused = pytest.raises(UnsupportedModel, match=rf"{match}.*use attention triton")
    with tiny_engine(model, dtype=dtype) as engine, refused:
        check_computes(engine.pool, replace(geometry_of(model), **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("build", [half_llama, half_gemma])
def test_logits_are_those_of_the_kernels_over_slots(build: Any) -> None:
    """Chunked prompts, with and without a cached prefix, mixed passes, and decoding with and without CUDA graphs."""
    pytest.importorskip("flashinfer")
    model = shared(build)
    expected = _served(model, "triton", use_graphs=False)
    scale = expected.std()
    for use_graphs in (False, True):
        got = _served(model, "flashinfer", use_graphs=use_graphs)
        # Rounding of two other attentions in 16 bits differs by at most 0.01.
        torch.testing.assert_close(got / scale, expected / scale, rtol=2e-2, atol=2e-2)


def _served(model: Any, attention: Attention, *, use_graphs: bool) -> torch.Tensor:
    """Logits [passes' chunks, vocab] of requests whose tokens do not depend on them."""
    served: list[torch.Tensor] = []
    with tiny_engine(model, dtype="float16", device_tokens=2048) as engine:
        runner = ModelRunner(model, engine, geometry_of(model), attention=attention, use_graphs=use_graphs)
        tokens = [prompt(length, seed=40 + i) for i, length in enumerate((150, 7, 201, 90))]
        tokens[2][:128] = tokens[0][:128]
        leases = [_prefilled(runner, engine, tokens, i, served) for i in (0, 1, 2)]
        assert leases[2].cached_len > 0
        # Chunks of a prompt, one of them of one token, beside another prompt and requests that decode.
        for i in (0, 1):
            engine.extend(leases[i], 1)
            tokens[i] = np.append(tokens[i], i)
        leases.append(engine.acquire(CacheRequest("3", tokens[3])))
        leases.append(engine.acquire(CacheRequest("4", tokens[1][:5])))
        for start, end in ((0, 30), (30, 31), (31, 90)):
            mixed = [Chunk(leases[4], tokens[1], 0, 5), Chunk(leases[3], tokens[3], start, end)]
            if end < 90:
                mixed += [Chunk(leases[i], tokens[i], len(tokens[i]) - 1, len(tokens[i])) for i in (0, 1)]
            served.extend(runner.forward(mixed))
        # Batches that grow and shrink, each graph replayed for lengths other than those that it was captured with.
        for step, batch in enumerate([(0, 1, 2, 3), (1,), (0, 1, 2), (1,), *[(0, 1, 2, 3)] * 40]):
            for i in batch:
                engine.extend(leases[i], 1)
            served.extend(decode(runner, [leases[i] for i in batch], [(7 * step + i) % VOCAB for i in batch]))
        for lease in leases:
            engine.release(lease)
        engine.check()
    return torch.stack(served)


def _prefilled(
    runner: ModelRunner, engine: CacheEngine, tokens: list[Any], i: int, served: list[torch.Tensor]
) -> Lease:
    lease = engine.acquire(CacheRequest(str(i), tokens[i]))
    start = lease.cached_len
    for end in sorted({min(start + 50, len(tokens[i])), len(tokens[i])}):
        served.append(runner.prefill(lease, tokens[i], start, end))
        start = end
    engine.commit(lease, tokens[i])
    return lease
