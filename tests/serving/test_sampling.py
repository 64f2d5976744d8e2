"""Choosing the next token: changes of logits, cuts, seeds and frequencies. transformers is the reference where it has
the same feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import transformers as hf
from transformers import LogitsProcessorList

from hicache.serving.next_tokens import change_logits, logit_changes
from hicache.serving.sampling import SamplingParams, choose_tokens, uniform

LOGITS = np.random.default_rng(0).normal(size=12)


def sample(logits: np.ndarray, params: SamplingParams, step: int) -> int:
    """The twin of a sampled row. The twin searches in the cumulative sums of the kept tokens."""
    order = np.argsort(-logits, kind="stable")[: params.top_k or None]
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    order, weights = order[weights >= params.min_p], weights[weights >= params.min_p]
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
    """A batch has greedy rows, and rows with any mixture of cuts, over vocabularies of odd sizes and with equal logits.
    Each row draws the token that the twin draws for its seed and step."""
    rng = np.random.default_rng(2)
    for vocab in (1, 2, 33, 1000):
        logits = torch.from_numpy(rng.normal(size=(64, vocab)).round(1).astype(np.float32))
        params = [
            SamplingParams(
                float(rng.choice([0.0, 0.3, 1.0, 4.0])),
                top_k=int(rng.choice([0, 1, 7, 2000])),
                top_p=float(rng.choice([1.0, 0.9, 0.3, 1e-9])),
                min_p=float(rng.choice([0.0, 0.0, 0.2, 1.0])),
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


def test_cuts_keep_the_tokens_that_transformers_keeps() -> None:
    """Over many seeds every token that transformers' processors keep is drawn, and no other token."""
    logits = torch.from_numpy(LOGITS).float()[None]
    for params in (
        SamplingParams(1.0, min_p=0.2),
        SamplingParams(2.0, top_k=6, min_p=0.3),
        SamplingParams(1.5, top_k=9, top_p=0.8, min_p=0.15),
    ):
        kept = LogitsProcessorList([hf.TemperatureLogitsWarper(params.temperature)])
        kept += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        kept += [hf.MinPLogitsWarper(params.min_p), hf.TopPLogitsWarper(params.top_p)]
        expected = kept(torch.zeros(1, 1, dtype=torch.long), logits.clone())[0].isfinite().nonzero().flatten().tolist()
        rows = logits.expand(NUM_DRAWS, -1)
        assert set(choose_tokens(rows, [params] * NUM_DRAWS, range(NUM_DRAWS))) == set(expected)
        assert 1 < len(expected) < len(LOGITS)


def test_changed_logits_are_those_of_transformers() -> None:
    """Biases, delayed stops and the repetition penalty equal those of transformers' processors, and OpenAI's penalties
    their formula. Rows without changes, and the given logits, stay unchanged."""
    rng, vocab = np.random.default_rng(4), 50
    logits = torch.from_numpy(rng.normal(size=(12, vocab)).astype(np.float32))
    given, expected, changes = logits.clone(), logits.clone(), {}
    for row in range(0, 12, 2):
        prompt, answer = rng.integers(0, vocab, 20), rng.integers(0, vocab, row)
        biases = {int(token): float(rng.normal()) for token in rng.integers(0, vocab, row // 2)}
        stops = [3, 7] if row % 3 == 0 else []
        params = SamplingParams(
            presence_penalty=float(rng.normal()),
            frequency_penalty=float(rng.normal()),
            repetition_penalty=float(rng.choice([0.7, 1.0, 1.3])),
            logit_bias=(*biases.items(),),
        )
        processors = LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
        if stops:
            processors.insert(0, hf.MinNewTokensLengthLogitsProcessor(len(prompt), row + 1, stops, "cpu"))
        if biases:
            processors.insert(0, hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}))
        tokens = torch.from_numpy(np.concatenate([prompt, answer]))[None]
        expected[row] = processors(tokens, logits[row : row + 1].clone())[0]
        for token in answer:
            expected[row, token] -= params.frequency_penalty
        expected[row, np.unique(answer)] -= params.presence_penalty
        changes[row] = logit_changes(params, np.unique(prompt), answer, stops)
    torch.testing.assert_close(change_logits(logits, changes), expected)
    torch.testing.assert_close(logits, given, rtol=0, atol=0)


def test_what_leaves_no_token_draws_one_all_the_same() -> None:
    """Logits that are all -inf or NaN have no distribution. The row still gets a token, and other rows are not
    affected."""
    logits = torch.from_numpy(LOGITS).float().repeat(3, 1)
    logits[0], logits[1] = -torch.inf, torch.nan
    params = SamplingParams(1.0, seed=1)
    for cut in (params, replace(params, top_p=0.5)):
        *broken, complete = choose_tokens(logits, [cut] * 3, [0] * 3)
        assert all(0 <= token < len(LOGITS) for token in broken) and complete == sample(LOGITS, cut, 0)
