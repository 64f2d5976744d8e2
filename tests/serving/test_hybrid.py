"""The model runner over hybrid models: a recurrent layer's state is continued, copied and batched, by value."""

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
from hicache.serving.support import check_supported
from hybrid_case import Pools, tiny_qwen3_next
from serving_case import plain_greedy, plain_logits, prompt, tiny_llama

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_qwen3_next()


@pytest.fixture(scope="module")
def geometry(model: Any) -> ModelGeometry:
    return check_supported(model)


def rig(model: Any, geometry: ModelGeometry, **settings: Any) -> tuple[Pools, ModelRunner]:
    pools = Pools(geometry, **settings)
    return pools, ModelRunner(model, pools, geometry)


def prefilled(pools: Pools, runner: ModelRunner, tokens: np.ndarray, ends: Sequence[int]) -> tuple[Lease, torch.Tensor]:
    """A lease over all of `tokens`, computed in pieces that end at `ends`; and the last logits."""
    lease, start, logits = pools.lease(len(tokens)), 0, torch.empty(0)
    for end in ends:
        logits = runner.prefill(lease, tokens, start, end)
        start = end
    return lease, logits


def greedy(pools: Pools, runner: ModelRunner, lease: Lease, logits: torch.Tensor, num_new: int) -> tuple[int, ...]:
    """`num_new` tokens, the first by `logits`, each other by a pass over the one before."""
    tokens = [int(logits.argmax())]
    while len(tokens) < num_new:
        pools.extend(lease, 1)
        tokens.append(int(runner.decode([lease], tokens[-1:])[0].argmax()))
    return tuple(tokens)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", [0, 1])
def test_chunked_prefill_gives_the_logits_of_one_whole_forward(kernel: str, seed: int) -> None:
    """Whatever the pieces of a prompt, of one token or many, the last logits of each are those of a forward over all
    up to it."""
    model = tiny_qwen3_next(seed, attn_implementation=kernel)
    pools, runner = rig(model, check_supported(model))
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
    """Prefill in pieces and token by token decoding choose the tokens that the library's own generate does."""
    pools, runner = rig(model, geometry)
    tokens = prompt(70, seed=2)
    ids = torch.tensor(tokens, device=model.device)[None]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 70:].tolist()
    lease, logits = prefilled(pools, runner, tokens, (33, 70))
    assert greedy(pools, runner, lease, logits, 30) == tuple(expected) == plain_greedy(model, tokens, 30)


def test_a_copied_state_continues_like_the_one_it_was_copied_from(model: Any, geometry: ModelGeometry) -> None:
    """A request that gets a prefix's slots and a copy of its state goes on as if it had computed the prefix, and leaves
    the original as it was; with the slots alone it does not."""
    pools, runner = rig(model, geometry)
    first, second = prompt(80, seed=3), prompt(96, seed=4)
    second[:48] = first[:48]
    expected = plain_logits(model, second)[-1]
    donor, _ = prefilled(pools, runner, first[:48], (48,))
    kept = pools.states.mamba_pool.fork_from(donor.mamba_pool_idx)
    pools.extend(donor, 32)
    runner.prefill(donor, first, 48, 80)  # the donor's own state has gone on
    for copied in (True, False):
        heir = pools.lease(96)
        pools.allocator.free(heir.slots_of(0, 48))
        heir.write(0, donor.slots_of(0, 48))
        if copied:
            pools.states.mamba_pool.copy_from(kept, heir.mamba_pool_idx)
        logits = runner.prefill(heir, second, 48, 96)
        if copied:
            torch.testing.assert_close(logits, expected, **TOLERANCE)
            assert greedy(pools, runner, heir, logits, 10) == plain_greedy(model, second, 10)
        else:
            assert (logits - expected).abs().max() > 0.1
    first_again = greedy(pools, runner, donor, plain_logits(model, first)[-1], 10)
    assert first_again == plain_greedy(model, first, 10)


@pytest.mark.parametrize("lengths", [(40,), (33, 33), (1, 80, 17, 64)])
def test_batched_decode_gives_each_requests_own_logits(
    model: Any, geometry: ModelGeometry, lengths: tuple[int, ...]
) -> None:
    """Requests of any lengths decoded together get the logits each would get alone, for several steps."""
    pools, runner = rig(model, geometry)
    # A long request leaves its slots behind in the first row: they must not be read.
    before = prefilled(pools, runner, prompt(200, seed=9), (200,))[0]
    for buffer in pools.pool.layer_buffers(3):
        buffer[before.slots] = float("nan")
    pools.release(before)
    sequences = [prompt(length, seed=10 + i).tolist() for i, length in enumerate(lengths)]
    leases = [prefilled(pools, runner, np.array(s), (len(s),))[0] for s in sequences]
    for step in range(12):
        for i, sequence in enumerate(sequences):
            sequence.append((7 * step + i) % 97)
            pools.extend(leases[i], 1)
        logits = runner.decode(leases, [sequence[-1] for sequence in sequences])
        for got, sequence in zip(logits, sequences, strict=True):
            torch.testing.assert_close(got, plain_logits(model, sequence)[-1], **TOLERANCE)
    assert pools.begun == 1 + len(leases) * 13


def test_a_sequence_that_begins_does_not_read_its_state_slot(model: Any, geometry: ModelGeometry) -> None:
    """A prompt's first token, in a prefill or in a batch, starts from nothing, whatever the slot held."""
    pools, runner = rig(model, geometry)
    tokens = prompt(20, seed=5)
    running, first = pools.lease(20), pools.lease(1)
    for layer_id in geometry.recurrent_layers:
        for buffer in pools.states.mamba_pool.layer_buffers(layer_id):
            buffer.fill_(3.0)
    runner.prefill(running, tokens, 0, 20)
    pools.extend(running, 1)
    logits = runner.decode([running, first], [7, 11])
    torch.testing.assert_close(logits[0], plain_logits(model, [*tokens, 7])[-1], **TOLERANCE)
    torch.testing.assert_close(logits[1], plain_logits(model, [11])[-1], **TOLERANCE)
    alone = pools.lease(1)
    torch.testing.assert_close(runner.decode([alone], [11])[0], logits[1], **TOLERANCE)


def test_each_state_is_waited_for_when_its_layer_has_its_turn(model: Any, geometry: ModelGeometry) -> None:
    """No layer's load is waited for before the layers in front of it have run: loading overlaps with computing."""
    pools, runner = rig(model, geometry)
    tokens = prompt(30, seed=6)
    lease, _ = prefilled(pools, runner, tokens[:20], (20,))
    pools.extend(lease, 10)
    seen: list[tuple[str, int]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_until(self, threshold: int) -> None:
            seen.append((self.name, threshold))

    pools.pool.register_layer_transfer_counter(Recorder("kv"))
    pools.states.mamba_pool.register_layer_transfer_counter(Recorder("state"))
    hooks = [
        layer.register_forward_pre_hook(lambda *_, at=at: seen.append(("layer", at)))
        for at, layer in enumerate(model.model.layers)
    ]
    runner.prefill(lease, tokens, 20, 30)
    for hook in hooks:
        hook.remove()
    turns = [at for at, (what, _) in enumerate(seen) if what == "layer"]
    for layer in range(3):
        assert set(seen[turns[layer] : turns[layer + 1]]) == {("layer", layer), ("state", layer)}
    assert ("kv", 0) in seen[turns[3] :] and ("kv", 0) not in seen[: turns[3]]


def test_a_pass_that_fails_leaves_the_state_as_it_was(model: Any, geometry: ModelGeometry) -> None:
    """Where a load fails on a late layer, the states of the layers before it have not moved."""
    pools, runner = rig(model, geometry)
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


def test_states_kept_in_another_dtype_are_handed_out_in_the_models(model: Any, geometry: ModelGeometry) -> None:
    """A pool that keeps states in bfloat16 serves a float32 model, to the accuracy of bfloat16."""
    pools, runner = rig(model, geometry, state_dtype=torch.bfloat16)
    tokens = prompt(40, seed=8)
    _, logits = prefilled(pools, runner, tokens, (30, 40))
    expected = plain_logits(model, tokens)[-1]
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.std()
    assert pools.states.mamba_pool.layer_buffers(0)[0].dtype == torch.bfloat16


def test_a_chunk_is_split_where_its_mask_would_be_too_large(model: Any, geometry: ModelGeometry) -> None:
    """A bound on mask entries changes how a chunk runs; the state goes through all of it once."""
    pools, runner = rig(model, geometry)
    runner._forward._mask_entries = 130 * 9  # 9 rows at a time
    tokens = prompt(130, seed=4)
    _, logits = prefilled(pools, runner, tokens, (50, 130))
    torch.testing.assert_close(logits, plain_logits(model, tokens)[-1], **TOLERANCE)


def test_an_engine_for_another_model_is_refused(model: Any, geometry: ModelGeometry) -> None:
    """Pools that keep other layers than the model has, or no states, are refused before anything runs."""
    llama = tiny_llama(layers=4)
    with pytest.raises(ShapeError, match=r"keeps layers \[0, 1, 2, 3\], and the model attends in \[3\]"):
        ModelRunner(model, Pools(check_supported(llama)), geometry)
    pools = Pools(geometry)
    pools.req_to_token = Pools(check_supported(llama)).req_to_token
    with pytest.raises(ShapeError, match=r"recurrent layers \[0, 1, 2\]"):
        ModelRunner(model, pools, geometry)
