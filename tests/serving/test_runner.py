"""The model runner against the model's own forward pass, by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.engine import CacheEngine, CacheRequest, Lease
from hicache.errors import ShapeError
from hicache.serving.runner import ModelRunner
from serving_case import plain_logits, prompt, tiny_engine, tiny_llama

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def _prefill(runner: ModelRunner, engine: CacheEngine, name: str, tokens: np.ndarray) -> Lease:
    lease = engine.acquire(CacheRequest(name, tokens))
    runner.prefill(lease, tokens, lease.cached_len, len(tokens))
    engine.commit(lease, tokens)
    return lease


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_chunked_prefill_gives_the_logits_of_one_whole_forward(kernel: str, heads: int, kv_heads: int) -> None:
    """Whatever the chunks of a prompt, the last logits of each are those of a forward over everything up to it."""
    model = tiny_llama(heads=heads, kv_heads=kv_heads, kernel=kernel)
    tokens = prompt(150, seed=1)
    expected = plain_logits(model, tokens)
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        for number, ends in enumerate([(150,), (1, 150), (64, 65, 150), (7, 71, 100, 149, 150)]):
            lease = engine.acquire(CacheRequest(f"r{number}", tokens, namespace=f"n{number}"))
            start = 0
            for end in ends:
                logits = runner.prefill(lease, tokens, start, end)
                torch.testing.assert_close(logits, expected[end - 1], **TOLERANCE)
                start = end
            engine.release(lease)


def test_prefill_behind_a_prefix_of_another_request() -> None:
    """A prompt whose front another request computed gives the logits of computing all of it."""
    model = tiny_llama()
    first, second = prompt(100, seed=2), prompt(120, seed=3)
    second[:100] = first
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        engine.release(_prefill(runner, engine, "first", first))
        lease = engine.acquire(CacheRequest("second", second))
        assert lease.cached_len == 100 // engine.page_size * engine.page_size > 0
        logits = runner.prefill(lease, second, lease.cached_len, 120)
        torch.testing.assert_close(logits, plain_logits(model, second)[-1], **TOLERANCE)


def test_a_chunk_is_split_where_its_mask_would_be_too_large() -> None:
    """A bound on mask entries changes how a chunk runs, not what comes out."""
    model = tiny_llama()
    tokens = prompt(130, seed=4)
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        runner._forward._mask_entries = 130 * 9  # 9 rows at a time
        lease = engine.acquire(CacheRequest("r", tokens))
        runner.prefill(lease, tokens, 0, 50)
        logits = runner.prefill(lease, tokens, 50, 130)
        torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(40,), (33, 33), (1, 80, 17, 64)])
def test_batched_decode_gives_each_requests_own_logits(kernel: str, lengths: tuple[int, ...]) -> None:
    """Requests of any lengths decoded together get the logits each would get alone, for several steps."""
    model = tiny_llama(kernel=kernel)
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        # A long request leaves its slots behind in the first row: they must not be read.
        engine.release(_prefill(runner, engine, "before", prompt(200, seed=9)))
        sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
        leases = [_prefill(runner, engine, f"r{i}", np.array(s)) for i, s in enumerate(sequences)]
        for step in range(20):
            for i, sequence in enumerate(sequences):
                sequence.append((7 * step + i) % 97)
                engine.extend(leases[i], 1)
            logits = runner.decode(leases, [sequence[-1] for sequence in sequences])
            for got, sequence in zip(logits, sequences, strict=True):
                torch.testing.assert_close(got, plain_logits(model, sequence)[-1], **TOLERANCE)


def test_decoded_tokens_serve_as_a_prefix() -> None:
    """KV that decoding stored is as good for the next prompt as KV of a prefill."""
    model = tiny_llama()
    sequence = prompt(30, seed=5).tolist()
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        lease = _prefill(runner, engine, "first", np.array(sequence))
        for step in range(40):
            sequence.append(step)
            engine.extend(lease, 1)
            runner.decode([lease], sequence[-1:])
        engine.commit(lease, np.array(sequence))
        engine.release(lease)
        longer = np.array([*sequence, 1, 2, 3])
        lease = engine.acquire(CacheRequest("second", longer))
        assert lease.hit.device == 68  # whole pages of 4 of the 70 stored
        logits = runner.prefill(lease, longer, 68, len(longer))
        torch.testing.assert_close(logits, plain_logits(model, longer)[-1], **TOLERANCE)


def test_a_prefill_outside_the_lease_is_refused() -> None:
    """A range that the lease has no slots for raises ShapeError before anything runs."""
    model = tiny_llama()
    with tiny_engine(model) as engine:
        runner = ModelRunner(model, engine)
        tokens = prompt(40, seed=6)
        lease = engine.acquire(CacheRequest("r", tokens[:30]))
        for start, end in [(0, 31), (5, 5), (-1, 4)]:
            with pytest.raises(ShapeError, match="30 slots"):
                runner.prefill(lease, tokens, start, end)
