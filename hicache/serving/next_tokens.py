"""From the logits of a pass to the next tokens of its requests.

What a request wants of its logits, biases, penalties and stops that are held back, concerns few tokens of a vocabulary.
So it is a sparse list, made on the host from the request's tokens, and all lists of a batch reach the device in one
copy. A batch of which no request wants anything costs what `choose_tokens` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.serving.request_queue import ScheduledRequest
from hicache.serving.sampling import SamplingParams, choose_tokens

Changes = npt.NDArray[np.float64]
"""[4, n]: of each of n tokens its id, bias, factor and penalty, see `change_logits`. No id is there twice."""


def next_tokens(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> list[int]:
    """One token per request. `logits`: float32 [requests, vocab], which stay as they are."""
    params = [req.request.sampling_params for req in requests]
    changes = {row: _changes_of(req) for row, req in enumerate(requests) if req.changes_logits}
    if changes:
        logits = change_logits(logits, changes)
    return choose_tokens(logits, params, [req.num_generated for req in requests])


def logit_changes(
    params: SamplingParams, prompt: npt.NDArray[np.int64], generated: npt.NDArray[np.int64], held_back: Collection[int]
) -> Changes:
    """What `params` ask for. `prompt`: its tokens, each once; `generated`: int64 [any number]; `held_back`: ids that
    may not be chosen."""
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
    """float32 [B, vocab], where y = x + bias of a row's token becomes (y / factor if y > 0 else y * factor) - penalty,
    as in vLLM. `logits` stay as they are."""
    rows = np.repeat([*changes], [columns.shape[1] for columns in changes.values()])
    columns = torch.from_numpy(np.vstack([rows, np.hstack([*changes.values()])])).to(logits.device)
    row, token = columns[:2].long()
    bias, factor, penalty = columns[2:].float()
    values = logits[row, token] + bias
    values = torch.where(values > 0, values / factor, values * factor) - penalty
    return logits.index_put((row, token), values)


def _changes_of(req: ScheduledRequest) -> Changes:
    params, generated = req.request.sampling_params, req.sequence[len(req.request.tokens) : req.length]
    held_back = req.request.eos_ids if req.num_generated < params.min_tokens else ()
    return logit_changes(params, req.distinct_prompt_tokens, generated, held_back)
