"""The model runner with latent attention: passes over slots that decode read latent rows in place."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from family_case import tiny_family
from hicache.errors import TransferError, UnsupportedModel
from hicache.serving import latent
from hicache.serving.attention import Attention
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.support import check_supported
from hybrid_case import Pools
from serving_case import decode, geometry_of, plain_logits, prompt, shared

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
# With and without a projection of queries, with interleaved rotary parts, and beside recurrent layers.
ROWS = ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "kimi_linear"]


class _OwnLinear(nn.Linear):
    """A linear module of a kind of its own, as quantised weights have."""


def _expanded_tokens(model: Any) -> tuple[list[int], list[Any]]:
    """Tokens of each expansion to come, and the hooks that note them."""
    found: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _, args, __: found.append(args[0].shape[:-1].numel()))
        for name, module in model.named_modules()
        if name.endswith(".kv_b_proj")
    ]
    return found, hooks


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_batches_get_the_logits_of_each_request_alone(row: str, attention: Attention) -> None:
    """Requests of different lengths decoded in one batch get the logits of plain forwards, over rows with stale slots.
    Attention over slots expands one token a layer, which nobody reads, whatever the prefix."""
    model = shared(tiny_family, row)
    geometry = geometry_of(model)
    pools = Pools(geometry)
    runner = ModelRunner(model, pools, geometry, attention=attention)
    before = pools.lease(200)
    for layer_id in geometry.full_layers:
        for buffer in pools.pool.layer_buffers(layer_id):
            buffer[before.slots] = float("nan")
    pools.release(before)
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate((1, 80, 17))]
    leases = [pools.lease(len(sequence)) for sequence in sequences]
    for lease, sequence in zip(leases, sequences, strict=True):
        runner.prefill(lease, np.array(sequence), 0, len(sequence))
    expanded, hooks = _expanded_tokens(model)
    decoded = []
    for step in range(8):
        for i, sequence in enumerate(sequences):
            sequence.append((7 * step + i) % 97)
            pools.extend(leases[i], 1)
        decoded.append(decode(runner, leases, [sequence[-1] for sequence in sequences]))
    for hook in hooks:
        hook.remove()
    for i, sequence in enumerate(sequences):
        logits = torch.stack([step[i] for step in decoded])
        torch.testing.assert_close(logits, plain_logits(model, sequence)[-8:], **TOLERANCE)
    if attention == "triton":
        assert max(expanded) <= len(leases)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("expanded_bytes", [1 << 30, 30_000, 1])
def test_chunks_of_several_requests_share_a_pass(
    row: str, expanded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that decode and chunks of prompts with and without a prefix, in one pass over slots, get the logits of
    plain forwards, however many heads are expanded at a time."""
    monkeypatch.setattr(latent, "MAX_EXPANDED_BYTES", expanded_bytes)
    model = shared(tiny_family, row)
    pools = Pools(geometry_of(model))
    runner = ModelRunner(model, pools, geometry_of(model), attention="triton")
    prompts = [prompt(length, seed=20 + i) for i, length in enumerate((30, 9, 50, 25))]
    leases = [pools.lease(len(tokens)) for tokens in prompts]
    runner.prefill(leases[0], prompts[0], 0, 29)
    runner.prefill(leases[2], prompts[2], 0, 31)
    ends = [30, 9, 50, 20]
    chunks = [Chunk(leases[i], prompts[i], start, ends[i]) for i, start in enumerate((29, 0, 31, 0))]
    logits = runner.forward(chunks)
    for i, end in enumerate(ends):
        torch.testing.assert_close(logits[i], plain_logits(model, prompts[i])[end - 1], **TOLERANCE)


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_a_prompt_may_begin_with_one_token(attention: Attention) -> None:
    """A chunk of one token, the first of its prompt or behind a prefix, gets the logits of a plain forward."""
    model = shared(tiny_family, "deepseek_v3")
    pools, tokens = Pools(geometry_of(model)), prompt(9, seed=1)
    runner = ModelRunner(model, pools, geometry_of(model), attention=attention)
    expected, lease, start = plain_logits(model, tokens), pools.lease(9), 0
    for end in (1, 2, 8, 9):
        torch.testing.assert_close(runner.prefill(lease, tokens, start, end), expected[end - 1], **TOLERANCE)
        start = end


def test_an_expansion_of_another_kind_is_kept() -> None:
    """A model whose expansion is no plain linear module is served by transformers' own attention alone."""
    model = copy.deepcopy(shared(tiny_family, "deepseek_v3"))
    own = _OwnLinear(12, 4 * (8 + 6), bias=False, device=model.device)
    own.weight = model.model.layers[0].self_attn.kv_b_proj.weight
    model.model.layers[0].self_attn.kv_b_proj = own
    assert check_supported(model) == geometry_of(shared(tiny_family, "deepseek_v3"))
    with pytest.raises(UnsupportedModel, match="use attention='torch'"):
        check_supported(model, "triton")


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("start", [12, 19])
def test_each_layer_waits_for_its_own_load(attention: Attention, start: int) -> None:
    """The load of a layer is awaited when the model reaches it, by one token and by a chunk; after a load that failed
    the model serves as before."""
    model = shared(tiny_family, "deepseek_v3")
    pools, tokens = Pools(geometry_of(model)), prompt(20, seed=3)
    runner, lease = ModelRunner(model, pools, geometry_of(model), attention=attention), pools.lease(20)
    runner.prefill(lease, tokens, 0, start)
    events: list[tuple[str, int]] = []

    class Counter:
        def wait_until(self, threshold: int) -> None:
            events.append(("load", threshold))
            if threshold == 1:
                raise TransferError("lost")

    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(("layer", index)))
        for index, layer in enumerate(model.model.layers)
    ]
    pools.pool.register_layer_transfer_counter(Counter())
    with pytest.raises(TransferError, match="lost"):
        runner.prefill(lease, tokens, start, 20)
    for hook in hooks:
        hook.remove()
    pools.pool.layer_transfer_counter = None
    assert events == [("layer", 0), ("load", 0), ("layer", 1), ("load", 1)]
    logits = runner.prefill(lease, tokens, start, 20)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_stored_in_another_dtype_are_converted(attention: Attention, dtype: torch.dtype) -> None:
    """A pool of narrower rows serves a float32 model, with the accuracy of these rows."""
    model = shared(tiny_family, "deepseek_v3")
    pools, tokens = Pools(geometry_of(model), dtype=dtype), prompt(20, seed=3)
    runner, lease = ModelRunner(model, pools, geometry_of(model), attention=attention), pools.lease(20)
    expected = plain_logits(model, tokens)
    for start, end in ((0, 12), (12, 19), (19, 20)):
        logits = runner.prefill(lease, tokens, start, end)
    assert 0 < (logits - expected[-1]).abs().max() < 0.3 * expected.std()
