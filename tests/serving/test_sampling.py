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


def _frequencies(params: SamplingParams, count: int = NUM_DRAWS) -> np.ndarray:
    rows = torch.from_numpy(LOGITS).float().expand(count, -1)
    return np.bincount(choose_tokens(rows, [params] * count, range(count)), minlength=len(LOGITS)) / count


def test_frequencies_are_the_softmax() -> None:
    """Over many steps, each token is as frequent as softmax(logits / temperature) says."""
    for temperature in (0.5, 1.0, 2.0):
        weights = np.exp(LOGITS / temperature)
        frequencies = _frequencies(SamplingParams(temperature, seed=3))
        np.testing.assert_allclose(frequencies, weights / weights.sum(), atol=TOLERANCE)


def test_top_k_and_top_p_keep_the_likeliest_and_their_proportions() -> None:
    """A cut keeps exactly the most likely tokens, each in proportion to its weight among them."""
    order = np.argsort(-LOGITS)
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum()
    reached = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    for params, kept in ((SamplingParams(1.0, top_k=4), order[:4]), (SamplingParams(1.0, top_p=0.6), order[:reached])):
        expected = np.zeros(len(LOGITS))
        expected[kept] = probability[kept] / probability[kept].sum()
        frequencies = _frequencies(params)
        assert set(np.flatnonzero(frequencies)) == set(kept.tolist())
        np.testing.assert_allclose(frequencies, expected, atol=TOLERANCE)


def test_the_narrowest_cuts_are_greedy() -> None:
    """top_k=1 and a tiny top_p always choose the most likely token."""
    for params in (SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=1e-9), SamplingParams(1e-4)):
        assert _frequencies(params, 200)[LOGITS.argmax()] == 1.0


def test_a_choice_is_fixed_by_seed_and_step() -> None:
    """The same seed and step choose the same token, other seeds and steps independent ones."""
    params = SamplingParams(1.0, seed=5)
    first = [sample(LOGITS, params, step) for step in range(200)]
    assert first == [sample(LOGITS, params, step) for step in range(200)]
    other = [sample(LOGITS, SamplingParams(1.0, seed=6), step) for step in range(200)]
    agreement = np.mean(np.array(first) == np.array(other))
    assert agreement < 0.5


def test_a_batch_mixes_greedy_and_sampled_rows() -> None:
    """Each row follows its own parameters: greedy rows take the maximum, sampled rows the token they would draw
    alone."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 12)).astype(np.float32))
    params = [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(), SamplingParams(1.0, seed=2)]
    chosen = choose_tokens(logits, params, [0, 7, 3, 9])
    rows = logits.double().numpy()
    assert chosen == [
        int(rows[0].argmax()),
        sample(rows[1], params[1], 7),
        int(rows[2].argmax()),
        sample(rows[3], params[3], 9),
    ]


def test_a_batch_samples_what_each_row_draws_alone() -> None:
    """Rows with every mixture of cuts, over vocabularies of odd sizes and with equal logits, draw the twin's tokens."""
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
