"""Chooses the next tokens of requests from the logits of a pass.

Biases, penalties and forbidden stop tokens of a request change the logits of few tokens of the vocabulary. The host
computes a sparse list of these changes from the request's tokens. One copy transfers the lists of all requests of a
batch to the device. A batch without such lists costs only `choose_tokens`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from hicache.serving.request import Constraint, TokenLogprobs
from hicache.serving.request_queue import ScheduledRequest
from hicache.serving.sampling import SamplingParams, choose_tokens

Changes = npt.NDArray[np.float64]
"""Array [4, n] of the ids, biases, factors and penalties of n different tokens, see `change_logits`."""


def next_tokens(logits: torch.Tensor, batch: Sequence[ScheduledRequest]) -> list[tuple[ScheduledRequest, int]]:
    """Choose the next token of each request of a pass that has computed all its tokens. Returns pairs of request and
    token. Appends log probabilities to the requests that ask for log probabilities. `logits`: float32 [batch, vocab],
    which are not changed."""
    rows = [row for row, req in enumerate(batch) if req.lease is not None and req.kv_len == req.length]
    if not rows:
        return []
    requests = [batch[row] for row in rows]
    logits = changed = logits if len(rows) == len(batch) else logits[rows]
    others = [row for row, req in enumerate(requests) if not req.is_plain]
    if changes := {row: _changes_of(requests[row]) for row in others if requests[row].changes_logits}:
        changed = change_logits(logits, changes)
    constraints = {row: constraint for row in others if (constraint := requests[row].request.constraint) is not None}
    if constraints:
        changed = _restricted(changed, constraints)
    params = [req.request.sampling_params for req in requests]
    tokens = choose_tokens(changed, params, [req.num_generated for req in requests])
    for row, constraint in constraints.items():
        constraint.take(tokens[row])
    nums = {row: num for row in others if (num := requests[row].request.num_logprobs) is not None}
    if nums:
        found = token_logprobs(logits[[*nums]], [tokens[row] for row in nums], max(nums.values()))
        for (row, num), entry in zip(nums.items(), found, strict=True):
            requests[row].logprobs.append(replace(entry, top=entry.top[:num]))
    return [*zip(requests, tokens, strict=True)]


def _restricted(logits: torch.Tensor, constraints: Mapping[int, Constraint]) -> torch.Tensor:
    """Return a copy of the logits. In row i, tokens that `constraints[i]` does not allow are -inf."""
    allowed = np.zeros((len(constraints), logits.shape[1]), dtype=np.bool_)
    for row, constraint in zip(allowed, constraints.values(), strict=True):
        allowed_mask = constraint.allowed()[: len(row)]
        row[: len(allowed_mask)] = allowed_mask
    logits, rows = logits.clone(), [*constraints]
    logits[rows] = logits[rows].masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
    return logits


def score_prompts(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
    """Return the logits of the last token of each request, [requests, vocab], selected from `logits` of all tokens of
    the pass. Append log probabilities of prompt tokens to the requests that ask for log probabilities of their
    prompt."""
    if not any(req.is_scoring for req in requests):
        return logits
    counts = [req.num_logits for req in requests]
    for req, rows in zip(requests, logits.split(counts), strict=True):
        # Row i predicts token kv_len + i + 1. This leaves out rows after the end of the prompt, and tokens that were
        # scored before.
        start, end = max(req.num_scored, req.kv_len + 1), min(req.end + 1, len(req.request.tokens))
        if req.is_scoring and start < end:
            scored, tokens = rows[start - req.kv_len - 1 : end - req.kv_len - 1], req.sequence[start:end].tolist()
            req.logprobs += token_logprobs(scored, tokens, req.request.num_logprobs or 0)
            req.num_scored, req.is_scoring = end, end < len(req.request.tokens)
    return logits[np.cumsum(counts) - 1]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num: int) -> list[TokenLogprobs]:
    """Return, for each i, the log probability of `tokens[i]` by `logits[i]`, and the log probabilities of the `num`
    most likely tokens. `logits`: float32 [n, vocab]. The host waits once for the device."""
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(tokens).to(logits.device, non_blocking=True)[:, None]
    values, top = logprobs.topk(num := min(num, logits.shape[1]), -1)
    found = torch.cat([logprobs.gather(-1, ids).double(), values.double(), top.double()], -1).tolist()
    return [
        TokenLogprobs(token, row[0], tuple(zip(map(int, row[1 + num :]), row[1 : 1 + num], strict=True)))
        for token, row in zip(tokens, found, strict=True)
    ]


def logit_changes(
    params: SamplingParams, prompt: npt.NDArray[np.int64], generated: npt.NDArray[np.int64], held_back: Collection[int]
) -> Changes:
    """Return the changes of logits by `params`, with one entry for each changed token. `prompt`: distinct tokens of the
    prompt. `generated`: tokens of the answer so far, int64 [generated]. `held_back`: ids that must not be chosen."""
    biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
    stops = np.array([*held_back], dtype=np.int64)
    seen = np.concatenate([prompt, generated]) if params.repetition_penalty != 1 else generated
    ids = np.unique(np.concatenate([seen, biased, stops]))
    counts = np.bincount(np.searchsorted(ids, generated), minlength=len(ids))
    bias, factor = np.zeros(len(ids)), np.ones(len(ids))
    bias[np.searchsorted(ids, biased)] = [value for _, value in params.logit_bias]
    bias[np.searchsorted(ids, stops)] = -np.inf
    factor[np.searchsorted(ids, seen)] = params.repetition_penalty
    penalty = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    return np.stack([ids, bias, factor, penalty])


def change_logits(logits: torch.Tensor, changes: Mapping[int, Changes]) -> torch.Tensor:
    """Return a copy of the logits, float32 [B, vocab], after `changes` by row. With y = x + bias, the logit x of a
    token becomes (y / factor if y > 0 else y * factor) - penalty, as in vLLM."""
    rows = np.repeat([*changes], [columns.shape[1] for columns in changes.values()])
    columns = torch.from_numpy(np.vstack([rows, np.hstack([*changes.values()])])).to(logits.device, non_blocking=True)
    row, token = columns[:2].long()
    bias, factor, penalty = columns[2:].float()
    values = logits[row, token] + bias
    values = torch.where(values > 0, values / factor, values * factor) - penalty
    return logits.index_put((row, token), values)


def _changes_of(req: ScheduledRequest) -> Changes:
    params, generated = req.request.sampling_params, req.sequence[len(req.request.tokens) : req.length]
    held_back = req.request.eos_ids if req.num_generated < params.min_tokens else ()
    return logit_changes(params, req.distinct_prompt_tokens, generated, held_back)
