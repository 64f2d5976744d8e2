"""The model runner with hybrid models: recurrent states are continued, copied and batched; compared by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import Lease
from hicache.errors import ShapeError, TransferError
from hicache.layout import ModelGeometry
from hicache.serving.runner import ModelRunner
from hybrid_case import Pools, tiny_qwen3_next
from serving_case import decode, geometry_of, plain_greedy, plain_logits, prompt, shared, tiny_llama

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model() -> Any:
    return shared(tiny_qwen3_next)


@pytest.fixture(scope="module")
def geometry(model: Any) -> ModelGeometry:
    return geometry_of(model)


def make_runner(
    model: Any, geometry: ModelGeometry, max_mask_entries: int | None = None, **settings: Any
) -> tuple[Pools, ModelRunner]:
    pools = Pools(geometry, **settings)
    return pools, ModelRunner(model, pools, geometry, max_mask_entries=max_mask_entries)


def prefilled(pools: Pools, runner: ModelRunner, tokens: np.ndarray, ends: Sequence[int]) -> tuple[Lease, torch.Tensor]:
    """A lease over all of `tokens`, computed in chunks that end at `ends`, and the last logits."""
    lease, start, logits = pools.lease(len(tokens)), 0, torch.empty(0)
    for end in ends:
        logits = runner.prefill(lease, tokens, start, end)
        start = end
    return lease, logits


def greedy(pools: Pools, runner: ModelRunner, lease: Lease, logits: torch.Tensor, num_new: int) -> tuple[int, ...]:
    """`num_new` tokens: the first by `logits`, each other one by a pass over the previous token."""
    tokens = [int(logits.argmax())]
    while len(tokens) < num_new:
        pools.extend(lease, 1)
        tokens.append(int(decode(runner, [lease], tokens[-1:])[0].argmax()))
    return tuple(tokens)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", [0, 1])
def test_chunked_prefill_gives_the_logits_of_one_whole_forward(kernel: str, seed: int) -> None:
    """However a prompt is cut into chunks, the last logits of each chunk are those of a forward over all tokens so
    far."""
    model = shared(tiny_qwen3_next, seed, attn_implementation=kernel)
    pools, runner = make_runner(model, geometry_of(model))
    tokens = prompt(150, seed=1)
    expected = plain_logits(model, tokens)
    for ends in [(150,), (1, 2, 3, 4, 5, 150), (64, 65, 150), (7, 71, 100, 149, 150)]:
        lease, start = pools.lease(150), 0
        for end in ends:
            logits = runner.prefill(lease, tokens, start, end)
            torch.testing.assert_close(logits, expected[end - 1], **TOLERANCE)
            start = end
        pools.release(lease)


def test_decode_gives_the_tokens_of_generate(model: Any, geometry: ModelGeometry) -> None:
    """Chunked prefill and decoding yield the tokens of transformers' generate."""
    pools, runner = make_runner(model, geometry)
    tokens = prompt(70, seed=2)
    ids = torch.tensor(tokens, device=model.device)[None]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 70:].tolist()
    lease, logits = prefilled(pools, runner, tokens, (33, 70))
    assert greedy(pools, runner, lease, logits, 30) == tuple(expected) == plain_greedy(model, tokens, 30, expected)


def test_a_copied_state_continues_like_its_source(model: Any, geometry: ModelGeometry) -> None:
    """A request with a prefix's slots and a copy of its state continues as if it had computed the prefix, and does not
    change the source; with the slots but no state it does not."""
    pools, runner = make_runner(model, geometry)
    first, second = prompt(80, seed=3), prompt(96, seed=4)
    second[:48] = first[:48]
    expected = plain_logits(model, second)[-1]
    donor, _ = prefilled(pools, runner, first[:48], (48,))
    kept = pools.states.mamba_pool.fork_from(donor.mamba_pool_idx)
    pools.extend(donor, 32)
    runner.prefill(donor, first, 48, 80)  # advances the donor's own state
    for copied in (True, False):
        heir = pools.lease(96)
        pools.allocator.free(heir.slots_of(0, 48))
        heir.write(0, donor.slots_of(0, 48))
        if copied:
            pools.states.mamba_pool.copy_from(kept, heir.mamba_pool_idx)
        logits = runner.prefill(heir, second, 48, 96)
        if copied:
            torch.testing.assert_close(logits, expected, **TOLERANCE)
            tokens = greedy(pools, runner, heir, logits, 10)
            assert tokens == plain_greedy(model, second, 10, tokens)
        else:
            assert (logits - expected).abs().max() > 0.1
    tokens = greedy(pools, runner, donor, plain_logits(model, first)[-1], 10)
    assert tokens == plain_greedy(model, first, 10, tokens)


@pytest.mark.parametrize("lengths", [(40,), (33, 33), (1, 80, 17, 64)])
def test_batched_decode_gives_the_logits_of_each_request_alone(
    model: Any, geometry: ModelGeometry, lengths: tuple[int, ...]
) -> None:
    """Requests of different lengths decoded in one batch get the logits that each gets alone, for several steps."""
    pools, runner = make_runner(model, geometry)
    # A long request leaves stale slots in the first row; they must not be read.
    before = prefilled(pools, runner, prompt(200, seed=9), (200,))[0]
    for buffer in pools.pool.layer_buffers(3):
        buffer[before.slots] = float("nan")
    pools.release(before)
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
    leases = [prefilled(pools, runner, np.array(s), (len(s),))[0] for s in sequences]
    decoded = []
    for step in range(12):
        for i, sequence in enumerate(sequences):
            sequence.append((7 * step + i) % 97)
            pools.extend(leases[i], 1)
        decoded.append(decode(runner, leases, [sequence[-1] for sequence in sequences]))
    for i, sequence in enumerate(sequences):
        logits = torch.stack([step[i] for step in decoded])
        torch.testing.assert_close(logits, plain_logits(model, sequence)[-12:], **TOLERANCE)
    assert pools.begun == 1 + len(leases) * 13


def test_a_new_sequence_does_not_read_its_state_slot(model: Any, geometry: ModelGeometry) -> None:
    """The first token of a prompt starts from a zero state, in a prefill and in a batch, whatever the slot contains."""
    pools, runner = make_runner(model, geometry)
    tokens = prompt(20, seed=5)
    running, first = pools.lease(20), pools.lease(1)
    for layer_id in geometry.recurrent_layers:
        for buffer in pools.states.mamba_pool.layer_buffers(layer_id):
            buffer.fill_(3.0)
    runner.prefill(running, tokens, 0, 20)
    pools.extend(running, 1)
    logits = decode(runner, [running, first], [7, 11])
    torch.testing.assert_close(logits[0], plain_logits(model, [*tokens, 7])[-1], **TOLERANCE)
    torch.testing.assert_close(logits[1], plain_logits(model, [11])[-1], **TOLERANCE)
    alone = pools.lease(1)
    torch.testing.assert_close(decode(runner, [alone], [11])[0], logits[1], **TOLERANCE)


def test_each_layer_waits_for_its_own_state(model: Any, geometry: ModelGeometry) -> None:
    """The load of a layer is awaited only after the layers before it have run, so loading overlaps with computing."""
    pools, runner = make_runner(model, geometry)
    tokens = prompt(30, seed=6)
    lease, _ = prefilled(pools, runner, tokens[:20], (20,))
    pools.extend(lease, 10)
    events: list[tuple[str, int]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_until(self, threshold: int) -> None:
            events.append((self.name, threshold))

    pools.pool.register_layer_transfer_counter(Recorder("kv"))
    pools.states.mamba_pool.register_layer_transfer_counter(Recorder("state"))
    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(("layer", index)))
        for index, layer in enumerate(model.model.layers)
    ]
    runner.prefill(lease, tokens, 20, 30)
    for hook in hooks:
        hook.remove()
    starts = [i for i, (what, _) in enumerate(events) if what == "layer"]
    for layer in range(3):
        assert set(events[starts[layer] : starts[layer + 1]]) == {("layer", layer), ("state", layer)}
    assert ("kv", 0) in events[starts[3] :] and ("kv", 0) not in events[: starts[3]]


def test_a_failed_pass_does_not_change_the_state(model: Any, geometry: ModelGeometry) -> None:
    """If the load of a late layer fails, the states of the layers before it are unchanged."""
    pools, runner = make_runner(model, geometry)
    tokens = prompt(30, seed=7)
    lease, _ = prefilled(pools, runner, tokens[:20], (20,))
    pools.extend(lease, 10)

    class Failing:
        def wait_until(self, threshold: int) -> None:
            raise TransferError("lost")

    pools.pool.register_layer_transfer_counter(Failing())
    with pytest.raises(TransferError, match="lost"):
        runner.prefill(lease, tokens, 20, 30)
    pools.pool.layer_transfer_counter = None
    torch.testing.assert_close(runner.prefill(lease, tokens, 20, 30), plain_logits(model, tokens)[-1], **TOLERANCE)


def test_states_stored_in_another_dtype_are_converted(model: Any, geometry: ModelGeometry) -> None:
    """A pool with bfloat16 states serves a float32 model, with the accuracy of bfloat16."""
    pools, runner = make_runner(model, geometry, state_dtype=torch.bfloat16)
    tokens = prompt(40, seed=8)
    _, logits = prefilled(pools, runner, tokens, (30, 40))
    expected = plain_logits(model, tokens)[-1]
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.std()
    assert pools.states.mamba_pool.layer_buffers(0)[0].dtype == torch.bfloat16


def test_a_chunk_with_a_large_mask_runs_in_several_passes(model: Any, geometry: ModelGeometry) -> None:
    """A maximum of mask entries changes the number of passes; the state consumes each token once."""
    pools, runner = make_runner(model, geometry, max_mask_entries=130 * 9)  # 9 rows per pass
    tokens = prompt(130, seed=4)
    _, logits = prefilled(pools, runner, tokens, (50, 130))
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_an_engine_for_another_model_is_refused(model: Any, geometry: ModelGeometry) -> None:
    """Pools with layers that the model does not have, or without states, raise ShapeError."""
    llama = shared(tiny_llama, layers=4)
    with pytest.raises(ShapeError, match=r"has layers \[0, 1, 2, 3\], the attention layers of the model are \[3\]"):
        ModelRunner(model, Pools(geometry_of(llama)), geometry)
    pools = Pools(geometry)
    pools.req_to_token = Pools(geometry_of(llama)).req_to_token
    with pytest.raises(ShapeError, match=r"recurrent layers \[0, 1, 2\]"):
        ModelRunner(model, pools, geometry)
