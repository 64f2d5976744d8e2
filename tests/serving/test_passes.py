"""Passes of the model runner over pools of every kind, compared by value with plain forwards of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from family_case import tiny_family
from hicache.engine import Lease
from hicache.errors import InvariantError, ShapeError, TransferError, UnsupportedModel
from hicache.serving import latent
from hicache.serving.attention import Attention
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.support import check_supported
from hybrid_case import Pools, tiny_gemma, tiny_mistral, tiny_qwen3_next, tiny_qwen3_window
from serving_case import decode, geometry_of, plain_logits, prompt, shared, tiny_llama

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
WINDOW = 12
# Families with latent rows: without a projection of queries, with interleaved rotary parts, and with recurrent layers.
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "kimi_linear")
MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(shared, tiny_llama, kv_heads=1),
    "llama-eager": partial(shared, tiny_llama, kv_heads=4, kernel="eager"),
    "mistral": partial(shared, tiny_mistral, WINDOW),
    "mistral-eager": partial(shared, tiny_mistral, WINDOW, attn_implementation="eager"),
    "gemma2": partial(shared, tiny_gemma, WINDOW, version=2),
    "gemma3": partial(shared, tiny_gemma, WINDOW),
    "qwen3": partial(shared, tiny_qwen3_window, WINDOW),
    "qwen3_next": partial(shared, tiny_qwen3_next),
    "qwen3_next-eager": partial(shared, tiny_qwen3_next, attn_implementation="eager"),
    **{row: partial(shared, tiny_family, row) for row in LATENT},
}
BY_DEFAULT = {
    *(("llama-eager", "torch"), ("llama", "triton"), ("mistral", "torch"), ("gemma2", "triton")),
    *(("qwen3_next", "triton"), ("qwen3_next-eager", "torch"), ("deepseek_v2", "triton"), ("minicpm3", "torch")),
}


def make(name: str, attention: Attention = "auto", **settings: Any) -> tuple[Any, Pools, ModelRunner]:
    """A model, pools for it and a runner over them."""
    model, mask = MODELS[name](), settings.pop("max_mask_entries", None)
    pools = Pools(geometry_of(model), **settings)
    return model, pools, ModelRunner(model, pools, pools.geometry, attention=attention, max_mask_entries=mask)


def prefill(pools: Pools, runner: ModelRunner, lease: Lease, tokens: np.ndarray, *ends: int) -> list[torch.Tensor]:
    """The logits of chunks that end at `ends`. Window slots that a chunk does not read are freed before it."""
    found = []
    for start, end in zip((0, *ends), ends, strict=False):
        pools.extend(lease, end - lease.length)
        pools.free_windows(lease, max(0, start - pools.geometry.window + 1))
        found.append(runner.prefill(lease, tokens, start, end))
    return found


def spoil(pools: Pools) -> None:
    """Put stale slots into the first row, NaN into these slots, and garbage into every free state."""
    before = pools.lease(200 if not pools.geometry.window_layers else 60)
    for layer_id in pools.geometry.full_layers:
        for buffer in pools.pool.layer_buffers(layer_id):
            buffer[before.slots] = float("nan")
    pools.free_windows(before, before.length)
    pools.release(before)
    for layer_id in pools.geometry.recurrent_layers:
        for buffer in pools.states.mamba_pool.layer_buffers(layer_id):
            buffer.fill_(3.0)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=() if (name, attention) in BY_DEFAULT else pytest.mark.long)
        for name in MODELS
        for attention in ("torch", "triton")[: 1 if name.endswith("-eager") else 2]
    ],
)
def test_a_batch_gets_the_logits_of_each_request_alone(name: str, attention: Attention) -> None:
    """However prompts are cut into chunks, and whatever the lengths of requests in a decode batch, each pass gives the
    logits of a plain forward. Slots and states are stale before, and window slots are freed as soon as possible.
    Attention over slots expands one latent row for each decoded token, whatever the length of the prefix."""
    model, pools, runner = make(name, attention)
    spoil(pools)
    cuts = {120: (5, 6, 20, 27, 80, 120), 17: (17,), 13: (1, 2, 3, 13), 40: (33, 40), 0: ()}
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(cuts)]
    leases = [pools.lease() for _ in sequences]
    for lease, sequence, ends in zip(leases, sequences, cuts.values(), strict=True):
        for end, logits in zip(ends, prefill(pools, runner, lease, np.array(sequence), *ends), strict=True):
            torch.testing.assert_close(logits, plain_logits(model, sequence)[end - 1], **TOLERANCE)
    expanded: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _, args, __: expanded.append(args[0].shape[:-1].numel()))
        for module_name, module in model.named_modules()
        if module_name.endswith(".kv_b_proj")
    ]
    decoded = []
    for step in range(10):
        for i, (lease, sequence) in enumerate(zip(leases, sequences, strict=True)):
            sequence.append((7 * step + i) % 97)
            pools.extend(lease, 1)
            pools.free_windows(lease, max(0, lease.length - pools.geometry.window))
        decoded.append(decode(runner, leases, [sequence[-1] for sequence in sequences]))
    for hook in hooks:
        hook.remove()
    for i, sequence in enumerate(sequences):
        logits = torch.stack([step[i] for step in decoded])
        torch.testing.assert_close(logits, plain_logits(model, sequence)[-10:], **TOLERANCE)
    assert attention == "torch" or max(expanded, default=0) <= len(leases)
    for lease in leases:
        pools.release(lease)
    if pools.geometry.window_layers:
        pools.windows.check()


@pytest.mark.parametrize(
    ("name", "attention", "expanded_bytes"),
    [
        ("llama", "torch", 0),
        ("llama", "triton", 0),
        ("qwen3_next", "torch", 0),
        ("minicpm3", "triton", 30_000),
        ("kimi_linear", "triton", 1),
        *(pytest.param(row, "triton", size, marks=pytest.mark.long) for row in LATENT for size in (1 << 30, 30_000, 1)),
    ],
)
def test_prompts_and_decodes_in_one_call_give_the_logits_of_each_alone(
    name: str, attention: Attention, expanded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call computes chunks of prompts, with and without a prefix, and decode steps in any order. Each chunk gets
    the logits of its last `num_logits` tokens. Latent rows give the same logits for any number of heads expanded at a
    time."""
    monkeypatch.setattr(latent, "MAX_EXPANDED_BYTES", expanded_bytes)
    model, pools, runner = make(name, attention)
    parts = [(39, 40), (60, 90), (0, 17), (63, 64), (0, 20), (8, 9)]
    requested = [1, 30, 5, 1, 1, 1]
    sequences = [prompt(length, seed=20 + i) for i, length in enumerate((40, 90, 17, 64, 25, 30))]
    leases = [pools.lease(len(tokens)) for tokens in sequences]
    for lease, tokens, (start, _) in zip(leases, sequences, parts, strict=True):
        if start:
            runner.prefill(lease, tokens, 0, start)
    chunks = [
        Chunk(lease, tokens, *part, num)
        for lease, tokens, part, num in zip(leases, sequences, parts, requested, strict=True)
    ]
    assert [chunk.is_decode for chunk in chunks] == [True, False, False, True, False, False]
    for rows, chunk in zip(runner.forward(chunks).split(requested), chunks, strict=True):
        expected = plain_logits(model, chunk.tokens[: chunk.end])[-chunk.num_logits :]
        torch.testing.assert_close(rows, expected, **TOLERANCE)
    with pytest.raises(ShapeError, match="num_logits=0"):
        runner.forward([Chunk(leases[0], sequences[0], 0, 40, 0)])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_chunk_with_a_large_mask_runs_in_several_passes(name: str) -> None:
    """A maximum of mask entries changes the number of passes, also for a first chunk. The maximum does not change the
    logits, however many are requested. A state consumes each token once."""
    model, pools, runner = make(name, max_mask_entries=100 * 9)  # 9 rows per pass
    tokens, passes = prompt(100, seed=4), []
    hook = model.model.register_forward_pre_hook(
        lambda *call: passes.append(call[2]["input_ids"].shape[1]), with_kwargs=True
    )
    lease = pools.lease()
    prefill(pools, runner, lease, tokens, 40)
    pools.extend(lease, 60)
    pools.free_windows(lease, max(0, 40 - pools.geometry.window + 1))
    logits = runner.forward([Chunk(lease, tokens, 40, 100, 20)])
    hook.remove()
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-20:], **TOLERANCE)
    # 40 entries per row allow 22 rows, 100 entries 9. Without windows, the first chunk needs no mask.
    assert passes == [*([22, 18] if name == "gemma3" else [40]), 9, 9, 9, 9, 9, 9, 6]


def test_window_layers_in_a_full_attention_pool() -> None:
    """A window model is also served from a pool with one slot space. This pool keeps the KV of all tokens."""
    model, pools, runner = make("qwen3", keep_windows=True)
    tokens = prompt(60, seed=5)
    logits = prefill(pools, runner, pools.lease(), tokens, 31, 60)[-1]
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_reading_a_freed_window_slot_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that would read a freed window slot raises InvariantError; the slot before the window may be freed."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")  # on a GPU only debug mode checks this
    _, pools, runner = make("mistral", page_size=1)
    tokens, lease = prompt(60, seed=6), pools.lease(60)
    runner.prefill(lease, tokens, 0, 40)
    # Queries from token 40 on read [29, 40).
    pools.free_windows(lease, 29)
    runner.prefill(lease, tokens, 40, 45)
    pools.windows.free_swa(lease.slots_of(29, 30))
    with pytest.raises(InvariantError):
        runner.prefill(lease, tokens, 40, 45)


@pytest.mark.parametrize(
    ("name", "attention", "start"),
    [
        ("llama", "torch", 19),
        ("qwen3_next", "torch", 12),
        ("qwen3_next", "triton", 19),
        ("deepseek_v3", "triton", 12),
        ("deepseek_v3", "torch", 19),
    ],
)
def test_each_layer_waits_for_its_own_load(name: str, attention: Attention, start: int) -> None:
    """A pass over one token or a chunk waits for the load of a layer when it reaches that layer. After a failed load
    the states of earlier layers are unchanged, and the model still works."""
    model, pools, runner = make(name, attention)
    tokens, lease, num_layers = prompt(20, seed=3), pools.lease(20), len(pools.geometry.kinds)
    runner.prefill(lease, tokens, 0, start)
    events: list[tuple[str, int]] = []

    class Loads:
        def __init__(self, layers: tuple[int, ...]) -> None:
            self.layers = layers

        def wait_until(self, threshold: int) -> None:
            events.append(("load", self.layers[threshold]))
            if self.layers[threshold] == num_layers - 1:
                raise TransferError("lost")

    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(("layer", index)))
        for index, layer in enumerate(model.model.layers)
    ]
    pools.pool.register_layer_transfer_counter(Loads(pools.geometry.full_layers))
    if pools.geometry.recurrent_layers:
        pools.states.mamba_pool.register_layer_transfer_counter(Loads(pools.geometry.recurrent_layers))
    with pytest.raises(TransferError):
        runner.prefill(lease, tokens, start, 20)
    for hook in hooks:
        hook.remove()
    pools.pool.layer_transfer_counter = None
    if pools.geometry.recurrent_layers:
        pools.states.mamba_pool.layer_transfer_counter = None
    assert list(dict.fromkeys(events)) == [(what, layer) for layer in range(num_layers) for what in ("layer", "load")]
    logits = runner.prefill(lease, tokens, start, 20)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "attention", "settings"),
    [
        ("qwen3_next", "torch", {"state_dtype": torch.bfloat16}),
        ("deepseek_v3", "torch", {"dtype": torch.bfloat16}),
        ("deepseek_v3", "triton", {"dtype": torch.float8_e4m3fn}),
    ],
)
def test_what_is_stored_in_another_dtype_is_converted(name: str, attention: Attention, settings: Any) -> None:
    """Pools with a narrower dtype of rows or states serve a float32 model, with the accuracy of that dtype."""
    model, pools, runner = make(name, attention, **settings)
    tokens = prompt(20, seed=3)
    expected = plain_logits(model, tokens)
    difference = (prefill(pools, runner, pools.lease(), tokens, 12, 19, 20)[-1] - expected[-1]).abs().max()
    assert 0 < difference < (0.1 if "state_dtype" in settings else 0.3) * expected.std()


def test_an_expansion_of_another_kind_is_kept() -> None:
    """If the expansion of latent rows is no plain linear module, the model is only served with transformers' own
    attention."""

    class OwnLinear(nn.Linear):
        """A linear module of its own kind, as in quantised weights."""

    model = copy.deepcopy(shared(tiny_family, "deepseek_v3"))
    own = OwnLinear(12, 4 * (8 + 6), bias=False, device=model.device)
    own.weight = model.model.layers[0].self_attn.kv_b_proj.weight
    model.model.layers[0].self_attn.kv_b_proj = own
    assert check_supported(model) == geometry_of(shared(tiny_family, "deepseek_v3"))
    with pytest.raises(UnsupportedModel, match="attention='torch'"):
        check_supported(model, "triton")


def test_a_chunk_without_slots_and_an_engine_for_another_model_are_refused() -> None:
    """These calls raise ShapeError before anything runs: a range outside of the lease, no chunk, pools with layers that
    the model does not have, or pools without states."""
    model, pools, runner = make("qwen3_next")
    tokens, lease = prompt(40, seed=6), pools.lease(30)
    for start, end in [(0, 31), (5, 5), (-1, 4)]:
        with pytest.raises(ShapeError):
            runner.prefill(lease, tokens, start, end)
    with pytest.raises(ShapeError):
        runner.forward([])
    other = Pools(geometry_of(shared(tiny_llama, layers=4)))
    with pytest.raises(ShapeError):
        ModelRunner(model, other, pools.geometry)
    pools.req_to_token = other.req_to_token
    with pytest.raises(ShapeError):
        ModelRunner(model, pools, pools.geometry)
