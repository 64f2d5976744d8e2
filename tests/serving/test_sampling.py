"""Choosing the next token: cuts, seeds and frequencies."""

from __future__ import annotations

import numpy as np
import torch

from hicache.serving.sampling import SamplingParams, choose_tokens, uniform

LOGITS = np.random.default_rng(0).normal(size=12)


def sample(logits: np.ndarray, params: SamplingParams, step: int) -> int:
    """The twin of a sampled row, by a search in the cumulative sums of the tokens that are kept."""
    order = np.argsort(-logits, kind="stable")[: params.top_k or None]
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    if params.top_p < 1:
        last = int(np.searchsorted(cumulative, params.top_p))
        order, cumulative = order[: last + 1], cumulative[: last + 1]
    index = int(np.searchsorted(cumulative, uniform(params.seed, step) * cumulative[-1], side="right"))
    return int(order[min(index, len(order) - 1)])


NUM_DRAWS, TOLERANCE = 6000, 0.022  # more than three standard deviations of a frequency


def test_frequencies_are_the_softmax() -> None:
    """Over many steps, each token is as frequent as softmax(logits / temperature) says."""
    for temperature in (0.5, 1.0, 2.0):
        weights, rows = np.exp(LOGITS / temperature), torch.from_numpy(LOGITS).float().expand(NUM_DRAWS, -1)
        drawn = choose_tokens(rows, [SamplingParams(temperature, seed=3)] * NUM_DRAWS, range(NUM_DRAWS))
        frequencies = np.bincount(drawn, minlength=len(LOGITS)) / NUM_DRAWS
        np.testing.assert_allclose(frequencies, weights / weights.sum(), atol=TOLERANCE)


def test_a_batch_samples_what_each_row_draws_alone() -> None:
    """Greedy rows, and rows with any mixture of cuts, over vocabularies of odd sizes and with equal logits: each draws
    the twin's token of its seed and step."""
    rng = np.random.default_rng(2)
    for vocab in (1, 2, 33, 1000):
        logits = torch.from_numpy(rng.normal(size=(64, vocab)).round(1).astype(np.float32))
        params = [
            SamplingParams(
                float(rng.choice([0.0, 0.3, 1.0, 4.0])),
                top_k=int(rng.choice([0, 1, 7, 2000])),
                top_p=float(rng.choice([1.0, 0.9, 0.3, 1e-9])),
                seed=int(rng.integers(100)),
            )
            for _ in range(64)
        ]
        steps = rng.integers(0, 50, 64).tolist()
        rows = logits.double().numpy()
        assert choose_tokens(logits, params, steps) == [
            sample(row, p, step) if p.temperature else int(row.argmax())
            for row, p, step in zip(rows, params, steps, strict=True)
        ]
