"""Choosing the next token: cuts, seeds and frequencies."""

from __future__ import annotations

import numpy as np
import torch

from hicache.serving.request import Sampling
from hicache.serving.sampling import choose_tokens, sample

LOGITS = np.random.default_rng(0).normal(size=12)


def _draws(how: Sampling, count: int) -> np.ndarray:
    return np.bincount([sample(LOGITS, how, step) for step in range(count)], minlength=len(LOGITS)) / count


def test_frequencies_are_the_softmax() -> None:
    """Over many steps each token comes as often as softmax(logits / temperature) says."""
    for temperature in (0.5, 1.0, 2.0):
        weights = np.exp(LOGITS / temperature)
        np.testing.assert_allclose(_draws(Sampling(temperature, seed=3), 20000), weights / weights.sum(), atol=0.012)


def test_top_k_and_top_p_keep_the_likeliest_and_their_proportions() -> None:
    """A cut leaves exactly the tokens it should, each in proportion to its weight among them."""
    order = np.argsort(-LOGITS)
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum()
    reached = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    for how, kept in ((Sampling(1.0, top_k=4), order[:4]), (Sampling(1.0, top_p=0.6), order[:reached])):
        expected = np.zeros(len(LOGITS))
        expected[kept] = probability[kept] / probability[kept].sum()
        drawn = _draws(how, 20000)
        assert set(np.flatnonzero(drawn)) == set(kept.tolist())
        np.testing.assert_allclose(drawn, expected, atol=0.012)


def test_the_narrowest_cuts_are_greedy() -> None:
    """top_k=1 and a tiny top_p always choose the most likely token."""
    for how in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-4)):
        assert _draws(how, 200)[LOGITS.argmax()] == 1.0


def test_a_choice_is_fixed_by_seed_and_step() -> None:
    """The same seed and step choose the same token, other seeds and steps independent ones."""
    how = Sampling(1.0, seed=5)
    first = [sample(LOGITS, how, step) for step in range(200)]
    assert first == [sample(LOGITS, how, step) for step in range(200)]
    other = [sample(LOGITS, Sampling(1.0, seed=6), step) for step in range(200)]
    agreement = np.mean(np.array(first) == np.array(other))
    assert agreement < 0.5


def test_a_batch_mixes_greedy_and_sampled_rows() -> None:
    """Each row follows its own sampling: greedy rows the maximum, sampled rows what they would choose alone."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 12)).astype(np.float32))
    how = [Sampling(), Sampling(1.0, seed=1), Sampling(), Sampling(1.0, seed=2)]
    chosen = choose_tokens(logits, how, [0, 7, 3, 9])
    rows = logits.double().numpy()
    assert chosen == [
        int(rows[0].argmax()),
        sample(rows[1], how[1], 7),
        int(rows[2].argmax()),
        sample(rows[3], how[3], 9),
    ]
