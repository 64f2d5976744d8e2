"""The model runner with sliding-window models: slots behind the window are freed and never read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import Lease
from hicache.errors import InvariantError
from hicache.serving.runner import ModelRunner
from hybrid_case import Pools, tiny_gemma, tiny_mistral, tiny_qwen3_window
from serving_case import decode, geometry_of, plain_greedy, plain_logits, prompt, shared

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
WINDOW = 12
MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: shared(tiny_mistral, WINDOW),
    "mistral-eager": lambda: shared(tiny_mistral, WINDOW, attn_implementation="eager"),
    "gemma2": lambda: shared(tiny_gemma, WINDOW, version=2),
    "gemma3": lambda: shared(tiny_gemma, WINDOW),
    "qwen3": lambda: shared(tiny_qwen3_window, WINDOW),
}


def make_runner(model: Any, max_mask_entries: int | None = None, **settings: Any) -> tuple[Pools, ModelRunner]:
    pools = Pools(geometry_of(model), **settings)
    return pools, ModelRunner(model, pools, geometry_of(model), max_mask_entries=max_mask_entries)


def prefill(
    pools: Pools, runner: ModelRunner, lease: Lease, tokens: np.ndarray, *ends: int, window: int = WINDOW
) -> torch.Tensor:
    """Chunks that end at `ends`, each after freeing the window slots that it does not read; the last logits."""
    start, logits = 0, torch.empty(0)
    for end in ends:
        pools.extend(lease, end - lease.length)
        pools.free_windows(lease, max(0, start - window + 1))
        logits = runner.prefill(lease, tokens, start, end)
        start = end
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_a_long_sequence_with_freed_windows(name: str) -> None:
    """A sequence ten times as long as the window gets the logits and tokens of plain forwards, in chunks and in decode,
    while all window slots that no pass reads are overwritten and freed."""
    model = MODELS[name]()
    pools, runner = make_runner(model)
    tokens = prompt(120, seed=1)
    expected, lease = plain_logits(model, tokens), pools.lease()
    start = 0
    for end in (5, 6, 20, 27, 80, 120):
        pools.extend(lease, end - start)
        pools.free_windows(lease, max(0, start - WINDOW + 1))
        torch.testing.assert_close(runner.prefill(lease, tokens, start, end), expected[end - 1], **TOLERANCE)
        start = end
    generated = [int(expected[-1].argmax())]
    for _ in range(29):
        pools.extend(lease, 1)
        pools.free_windows(lease, lease.length - WINDOW)
        generated.append(int(decode(runner, [lease], generated[-1:])[0].argmax()))
    assert tuple(generated) == plain_greedy(model, tokens, 30, generated)
    assert pools.windows.swa_available_size() >= 128 - WINDOW - 2 * pools.page_size
    pools.release(lease)
    pools.windows.check()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(40,), (33, 33), (40, 13, 20), (1, 5, 50, 17, 12)])
def test_batched_decode_gives_the_logits_of_each_request_alone(name: str, lengths: tuple[int, ...]) -> None:
    """Requests shorter and longer than the window, decoded in one batch, get the logits that each gets alone."""
    model = MODELS[name]()
    pools, runner = make_runner(model)
    before = pools.lease()  # leaves stale slots in the first row; they must not be read
    prefill(pools, runner, before, prompt(60, seed=9), 60)
    pools.release(before)
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
    leases = [pools.lease() for _ in sequences]
    for lease, sequence in zip(leases, sequences, strict=True):
        prefill(pools, runner, lease, np.array(sequence), len(sequence))
    decoded = []
    for step in range(10):
        for i, (lease, sequence) in enumerate(zip(leases, sequences, strict=True)):
            sequence.append((7 * step + i) % 97)
            pools.extend(lease, 1)
            pools.free_windows(lease, max(0, lease.length - WINDOW))
        decoded.append(decode(runner, leases, [sequence[-1] for sequence in sequences]))
    for i, sequence in enumerate(sequences):
        logits = torch.stack([step[i] for step in decoded])
        torch.testing.assert_close(logits, plain_logits(model, sequence)[-10:], **TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 64])
def test_windows_of_any_size(window: int) -> None:
    """Windows of one token, of two, and longer than the prompt give the logits of a plain forward."""
    model = shared(tiny_mistral, window)
    pools, runner = make_runner(model)
    tokens, lease = prompt(50, seed=2), pools.lease()
    logits = prefill(pools, runner, lease, tokens, 1, 20, 50, window=window)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)
    pools.extend(lease, 1)
    torch.testing.assert_close(decode(runner, [lease], [3])[0], plain_logits(model, [*tokens, 3])[-1], **TOLERANCE)


def test_a_chunk_with_a_large_mask_runs_in_several_passes() -> None:
    """A maximum of mask entries changes the number of passes, also of a first chunk, not the logits."""
    model = shared(tiny_gemma, WINDOW)
    pools, runner = make_runner(model, max_mask_entries=100 * 9)  # 9 rows per pass
    tokens, passes = prompt(100, seed=4), []
    hook = model.model.register_forward_pre_hook(
        lambda *call: passes.append(call[2]["input_ids"].shape[1]), with_kwargs=True
    )
    logits = prefill(pools, runner, pools.lease(), tokens, 40, 100)
    hook.remove()
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)
    # 40 entries per row allow 22 rows, 100 entries 9.
    assert passes == [22, 18, 9, 9, 9, 9, 9, 9, 6]


def test_window_layers_in_a_full_attention_pool() -> None:
    """A window model is also served from a pool with one slot space, which keeps the KV of all tokens."""
    model = shared(tiny_qwen3_window, WINDOW)
    pools, runner = make_runner(model, keep_windows=True)
    tokens, lease = prompt(60, seed=5), pools.lease(60)
    runner.prefill(lease, tokens, 0, 31)
    logits = runner.prefill(lease, tokens, 31, 60)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_reading_a_freed_window_slot_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that would read a freed window slot raises InvariantError; the slot before the window may be freed."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")  # on a GPU this is checked in debug mode alone
    model = shared(tiny_mistral, WINDOW)
    pools, runner = make_runner(model, page_size=1)
    tokens, lease = prompt(60, seed=6), pools.lease(60)
    runner.prefill(lease, tokens, 0, 40)
    # Tokens from 40 on see [29, 40).
    pools.free_windows(lease, 29)
    runner.prefill(lease, tokens, 40, 45)
    pools.windows.free_swa(lease.slots_of(29, 30))
    with pytest.raises(InvariantError, match=f"window slots of full slots .{int(lease.slots_of(29, 30))}. were freed"):
        runner.prefill(lease, tokens, 40, 45)
