"""Decode attention over latent rows, compared with attention of each request to its own tokens in float64."""

from __future__ import annotations

import functools
import math

import torch

from cases import KERNELS, pairwise, refused
from hicache.kernels.latent_attention import latent_attention

TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2}}
MAX_LEN = 50


def inputs(
    lens: list[int], heads: int, rank: int, rope: int, dtype: torch.dtype, device: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of requests whose tokens lie at scattered slots, among NaN, and the expected result in float64."""
    g = torch.Generator().manual_seed(sum(lens) + heads)
    order = torch.randperm(sum(lens) + 5, generator=g) + 1
    buffer = torch.full((len(order) + 1, 1, rank + rope), math.nan, dtype=dtype)
    req_to_token = torch.full((len(lens) + 3, MAX_LEN), len(order), dtype=torch.int32)
    rows = torch.randperm(len(lens) + 3, generator=g)[: len(lens)]
    # Parts of wider tensors, as in a model.
    query = torch.randn(len(lens), heads, rank + 3 + rope, generator=g).to(dtype)
    q_latent, q_rope = query[..., :rank], query[..., rank + 3 :]
    expected = torch.zeros(len(lens), heads, rank, dtype=torch.float64)
    for b, num_tokens in enumerate(lens):
        mine, order = order[:num_tokens], order[num_tokens:]
        req_to_token[rows[b], :num_tokens] = mine.int()
        stored = torch.randn(num_tokens, rank + rope, generator=g).to(dtype)
        buffer[mine, 0] = stored
        if num_tokens:
            scores = stored.double() @ torch.cat([q_latent[b], q_rope[b]], -1).double().T * 0.3
            expected[b] = scores.softmax(0).T @ stored[:, :rank].double()
    names = ("q_latent", "q_rope", "buffer", "req_to_token", "rows", "seq_lens")
    values = (query, query, buffer, req_to_token, rows, torch.tensor(lens))
    on = dict(zip(names, (value.to(device) for value in values), strict=True))
    on["q_latent"], on["q_rope"] = on["q_latent"][..., :rank], on["q_rope"][..., rank + 3 :]
    return on, expected


@pairwise(
    kernels=KERNELS,
    dtype=[torch.float32, torch.bfloat16],
    shape=[(4, 12, 8), (16, 32, 16), (20, 24, 4), (1, 16, 1)],
    num_splits=[None, 1, 5],
)
def test_requests_attend_to_their_own_tokens(
    device: str, kernels: str, dtype: torch.dtype, shape: tuple[int, int, int], num_splits: int | None
) -> None:
    """Each request attends to the tokens of its own row, wherever their slots are and however they are split. Rows past
    the end of a sequence are not read, and a sequence without tokens gives zero."""
    on, expected = inputs([1, 32, 0, 17, MAX_LEN], *shape, dtype, device)
    out = latent_attention(**on, scaling=0.3, kernels=kernels, num_splits=num_splits)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.cpu().double(), expected, **TOLERANCE[dtype])


def test_large_scores_do_not_overflow(device: str, kernels: str) -> None:
    """If scores are in the thousands, the result is the latent row with the highest score."""
    on, _ = inputs([40], 4, 16, 4, torch.float32, device)
    out = latent_attention(**on, scaling=1e4, kernels=kernels, num_splits=4)
    stored = on["buffer"][on["req_to_token"][on["rows"][0], :40].long(), 0]
    best = (stored @ torch.cat([on["q_latent"][0], on["q_rope"][0]], -1).T).argmax(0)
    torch.testing.assert_close(out[0], stored[best, :16])


def test_no_requests(device: str, kernels: str) -> None:
    """A batch of no requests gives no rows."""
    on, _ = inputs([3], 4, 16, 4, torch.float32, device)
    none = {name: x[:0] if name in ("q_latent", "q_rope", "rows", "seq_lens") else x for name, x in on.items()}
    assert latent_attention(**none, scaling=1.0, kernels=kernels).shape == (0, 4, 16)


def test_wrong_shapes_are_refused() -> None:
    on, _ = inputs([3, 5], 4, 16, 4, torch.float32, "cpu")
    wrong = (
        {"q_rope": on["q_rope"][:, :2]},
        {"buffer": on["buffer"][..., :18]},
        {"q_rope": on["q_rope"].half()},
        {"buffer": torch.zeros(9, 1, 40)[..., ::2]},
        {"rows": on["rows"][:1]},
        {"seq_lens": on["seq_lens"][:1]},
        {"req_to_token": on["req_to_token"].T},
        {"req_to_token": on["req_to_token"][0]},
        {"kernels": "cuda"},
    )
    good = {**on, "scaling": 1.0, "kernels": "torch"}
    refused(ValueError, *(functools.partial(latent_attention, **{**good, **given}) for given in wrong))
