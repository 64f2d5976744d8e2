"""The model runner over sliding-window models: what is behind the window is given back, and nothing of it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import Lease
from hicache.errors import InvariantError
from hicache.serving.runner import ModelRunner
from hicache.serving.support import check_supported
from hybrid_case import Pools, tiny_gemma, tiny_mistral, tiny_qwen3_window
from serving_case import plain_greedy, plain_logits, prompt

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
WINDOW = 12
MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: tiny_mistral(WINDOW),
    "mistral-eager": lambda: tiny_mistral(WINDOW, attn_implementation="eager"),
    "gemma2": lambda: tiny_gemma(WINDOW, version=2),
    "gemma3": lambda: tiny_gemma(WINDOW),
    "qwen3": lambda: tiny_qwen3_window(WINDOW),
}


def rig(model: Any, **settings: Any) -> tuple[Pools, ModelRunner]:
    geometry = check_supported(model)
    pools = Pools(geometry, **settings)
    return pools, ModelRunner(model, pools, geometry)


def prefill(pools: Pools, runner: ModelRunner, lease: Lease, tokens: np.ndarray, *ends: int) -> torch.Tensor:
    """Pieces that end at `ends`, each behind a window that was cut to what it may read; the last logits."""
    window, start, logits = runner._geometry.window, 0, torch.empty(0)
    for end in ends:
        pools.extend(lease, end - lease.length)
        pools.free_windows(lease, max(0, start - window + 1))
        logits = runner.prefill(lease, tokens, start, end)
        start = end
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_a_long_sequence_with_its_past_given_back(name: str) -> None:
    """A sequence ten times as long as the window gets the plain forward's logits and tokens, in pieces and token by
    token, while the window slots of all that no pass may read are spoilt and given back."""
    model = MODELS[name]()
    pools, runner = rig(model)
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
        generated.append(int(runner.decode([lease], generated[-1:])[0].argmax()))
    assert tuple(generated) == plain_greedy(model, tokens, 30)
    assert pools.windows.swa_available_size() >= 128 - WINDOW - 2 * pools.page_size
    pools.release(lease)
    pools.windows.check()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(40,), (33, 33), (40, 13, 20), (1, 5, 50, 17, 12)])
def test_batched_decode_gives_each_requests_own_logits(name: str, lengths: tuple[int, ...]) -> None:
    """Requests shorter and longer than the window, decoded together, get the logits each would get alone."""
    model = MODELS[name]()
    pools, runner = rig(model)
    before = pools.lease()  # leaves its slots behind in the first row: they must not be read
    prefill(pools, runner, before, prompt(60, seed=9), 60)
    pools.release(before)
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
    leases = [pools.lease() for _ in sequences]
    for lease, sequence in zip(leases, sequences, strict=True):
        prefill(pools, runner, lease, np.array(sequence), len(sequence))
    for step in range(10):
        for i, (lease, sequence) in enumerate(zip(leases, sequences, strict=True)):
            sequence.append((7 * step + i) % 97)
            pools.extend(lease, 1)
            pools.free_windows(lease, max(0, lease.length - WINDOW))
        logits = runner.decode(leases, [sequence[-1] for sequence in sequences])
        for got, sequence in zip(logits, sequences, strict=True):
            torch.testing.assert_close(got, plain_logits(model, sequence)[-1], **TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 64])
def test_windows_of_any_size(window: int) -> None:
    """A window of one token, of two, and one that the prompt does not fill all give the plain forward's logits."""
    model = tiny_mistral(window)
    pools, runner = rig(model)
    tokens, lease = prompt(50, seed=2), pools.lease()
    logits = prefill(pools, runner, lease, tokens, 1, 20, 50)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)
    pools.extend(lease, 1)
    torch.testing.assert_close(runner.decode([lease], [3])[0], plain_logits(model, [*tokens, 3])[-1], **TOLERANCE)


def test_a_chunk_is_split_where_its_mask_would_be_too_large() -> None:
    """A bound on mask entries changes how a chunk runs, a first one of no prefix included, not what comes out."""
    model = tiny_gemma(WINDOW)
    pools, runner = rig(model)
    runner._forward._mask_entries = 100 * 9  # 9 rows at a time
    tokens, passes = prompt(100, seed=4), []
    hook = model.model.register_forward_pre_hook(
        lambda *call: passes.append(call[2]["input_ids"].shape[1]), with_kwargs=True
    )
    logits = prefill(pools, runner, pools.lease(), tokens, 40, 100)
    hook.remove()
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)
    # 40 entries a row allow 22 rows; then 100 allow 9.
    assert passes == [22, 18, 9, 9, 9, 9, 9, 9, 6]


def test_windows_that_are_kept_whole() -> None:
    """A window model is served from a pool of one slot space as well, which keeps what the window has left."""
    model = tiny_qwen3_window(WINDOW)
    pools, runner = rig(model, keep_windows=True)
    tokens, lease = prompt(60, seed=5), pools.lease(60)
    runner.prefill(lease, tokens, 0, 31)
    logits = runner.prefill(lease, tokens, 31, 60)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_a_window_slot_given_back_too_early_is_noticed() -> None:
    """A pass that would read a window slot which is gone raises; one token less is read by nobody."""
    model = tiny_mistral(WINDOW)
    pools, runner = rig(model, page_size=1)
    tokens, lease = prompt(60, seed=6), pools.lease(60)
    runner.prefill(lease, tokens, 0, 40)
    # Tokens from 40 on see [29, 40).
    pools.free_windows(lease, 29)
    runner.prefill(lease, tokens, 40, 45)
    pools.windows.free_swa(lease.slots_of(29, 30))
    with pytest.raises(InvariantError, match=f"window slots of full slots .{int(lease.slots_of(29, 30))}. were freed"):
        runner.prefill(lease, tokens, 40, 45)
