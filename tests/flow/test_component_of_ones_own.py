"""A custom component takes two files, and the engine's own transfers move it through all tiers.

In this test the component is the last hidden state of a cached prefix. The toy model knows the true hidden state of
every prefix.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from component_case import EACH_MODEL, FULL, POLICIES, STATES, WINDOWS, compute, config, verify
from hicache import CacheEngine, CacheRequest, DiskConfig, Hit, Lease, ModelGeometry, build_engine
from hicache.errors import ConfigError, InvalidArgument, TransferError
from memory_store import MemoryPageStore
from own_component import cache, tree
from own_component.cache import LastHidden
from toy_model import prefix_hashes, prompt, until_ready, values_of

PAGE, WHOLE = 8, 56  # tokens of a page, and of the complete pages of a prompt
# Each model with one of the policies.
ROWS = [pytest.param(*row.values, policy, id=row.id) for row, policy in zip(EACH_MODEL, POLICIES, strict=True)]


class OneRow(LastHidden):
    NUM_ROWS = 1


class TwoRows(LastHidden):
    NUM_ROWS = 2


def continued(tokens: np.ndarray, seed: int = 99) -> np.ndarray:
    """The next turn of a conversation."""
    return np.concatenate([tokens[:WHOLE], prompt(seed, 9)])


def hidden(tokens: np.ndarray, namespace: str) -> torch.Tensor:
    """The last hidden state after `tokens`, float32 `[HIDDEN]`."""
    return values_of(prefix_hashes(tokens, namespace)[-1:], 300, (LastHidden.HIDDEN,))[0]


def prefill(engine: CacheEngine, lease: Lease, tokens: np.ndarray, model: ModelGeometry) -> None:
    """Compute the rest of a prompt. Offer the hidden state of the last complete page to each commit."""
    start = lease.cached_len
    while start < len(tokens):
        end = engine.next_stop(lease, start, len(tokens))
        compute(engine, lease, tokens, start, end, model)
        whole = end // PAGE * PAGE
        truth = hidden(tokens[:whole], lease.namespace)
        engine.component(LastHidden).offer(lease, whole, truth.to(engine.pool.device))
        engine.commit(lease, tokens[:end])
        start = end


def reuse(engine: CacheEngine, lease: Lease, tokens: np.ndarray, model: ModelGeometry) -> bool:
    """Whether the cache has the hidden state of the lease's last cached token. Compares the KV and the hidden state
    with the true values."""
    verify(engine, lease, tokens, lease.cached_len, model)
    found = engine.component(LastHidden).read(lease)
    if found is not None:
        assert torch.equal(found.cpu(), hidden(tokens[: lease.cached_len], lease.namespace))
    return found is not None


def serve(
    engine: CacheEngine, name: str, tokens: np.ndarray, model: ModelGeometry, namespace: str = ""
) -> tuple[Hit, bool]:
    """Serve one complete request. Returns the hit of the request, and whether the hidden state came from the cache."""
    with engine.acquire(CacheRequest(name, tokens, namespace)) as lease:
        found = reuse(engine, lease, tokens, model)
        prefill(engine, lease, tokens, model)
    engine.flush()
    engine.check()
    return lease.hit, found


def evict(engine: CacheEngine, tokens: np.ndarray, component: str) -> None:
    """Evict a component of the last page of these tokens from the device."""
    context = engine.inspect.context
    context.free(context.tree.evict(context.tree.match(tokens).rows[-1:], component))


def test_it_is_two_files() -> None:
    """The two files import three contracts of flow/ (components, leases, transfers), and no engine, factory, transfer,
    host or disk."""
    modules = {getattr(value, "__module__", "") for file in (tree, cache) for value in vars(file).values()}
    ours = {name for name in modules if name.startswith("hicache.")}
    assert {name for name in ours if name.startswith("hicache.flow")} == {
        "hicache.flow.components.base",
        "hicache.flow.lease",
        "hicache.flow.page_transfer",
    }
    assert not {name for name in ours if name.split(".")[1] in {"engine", "factory", "transfer", "host", "disk"}}


@pytest.mark.parametrize(("model", "policy"), ROWS)
def test_it_is_restored_from_device_and_host(device: str, model: ModelGeometry, policy: str) -> None:
    """A request that continues the prefix reads the hidden state that a commit was offered: from the device, or from
    the host after other requests have filled the device. A request of another tenant does not find the hidden state."""
    settings = config(device=device, write_policy=policy)
    with build_engine(settings, model, components=[LastHidden]) as engine:
        first = prompt(1)
        assert serve(engine, "a", first, model) == (Hit(), False)
        assert serve(engine, "b", continued(first), model) == (Hit(device=WHOLE), True)
        assert engine.stats()["restore.bytes"] == 0
        assert serve(engine, "other", first, model, "tenant") == (Hit(), False)
        for n in (2, 3, 4):
            serve(engine, f"c{n}", prompt(n), model)
        match = engine.inspect.context.tree.match(first[:WHOLE])
        held = engine.inspect.context.tree.pages["last_hidden"].held(match.rows[-1:])
        assert match.full_len < WHOLE or not len(held)
        hit, found = serve(engine, "d", continued(first, 98), model)
        assert hit.host > 0 and hit.device + hit.host == WHOLE and found


@pytest.mark.parametrize("model", EACH_MODEL)
def test_it_is_evicted_and_loaded_alone(device: str, model: ModelGeometry) -> None:
    """Only two rows serve many prompts whose pages stay on the device. So a row is evicted without its page, and a load
    restores the row alone."""
    settings = config(device=device, device_tokens=1024, window_tokens=512, mamba_size=40)
    with build_engine(settings, model, components=[TwoRows]) as engine:
        for n in range(1, 5):
            serve(engine, f"a{n}", prompt(n), model)
        stats = engine.stats()
        assert stats["evict.hidden_states"] > 0 and stats["evict.device_demoted_tokens"] == 0
        assert serve(engine, "b", continued(prompt(1)), model) == (Hit(device=WHOLE), True)
        moved = engine.stats()["restore.bytes"] - stats["restore.bytes"]
        assert moved == engine.component(LastHidden).host.page_bytes == 4 * LastHidden.HIDDEN


@pytest.mark.parametrize(
    ("model", "own_store"), [(FULL, True), (WINDOWS, False), (STATES, True)], ids=["full", "window", "hybrid"]
)
def test_it_is_restored_from_disk_after_a_restart(
    device: str, model: ModelGeometry, own_store: bool, tmp_path: Path
) -> None:
    """A second engine reads the hidden states of the first engine from the store, together with the pages of the
    prefix."""
    store = MemoryPageStore(4 << 20) if own_store else None
    disk = None if own_store else DiskConfig(path=str(tmp_path / "store"), budget_bytes=16 << 20)
    settings = config(device=device, disk=disk, prefetch_mode="wait_complete")
    first = prompt(1)
    with build_engine(settings, model, [LastHidden], store) as engine:
        serve(engine, "a", first, model)
    with build_engine(settings, model, [LastHidden], store) as engine:
        longer = continued(first)
        until_ready(engine, engine.prefetch("b", longer))
        assert serve(engine, "b", longer, model) == (Hit(disk=WHOLE), True)


def test_no_request_waits_for_it_or_is_refused() -> None:
    """While its only row is in use, a prompt whose hidden state is on the host is served without it, and a commit keeps
    no hidden state. When the row is free again, the hidden state is loaded."""
    with build_engine(config(device_tokens=512), FULL, components=[OneRow]) as engine:
        first, second, third = prompt(1), prompt(2), prompt(3)
        serve(engine, "a", first, FULL)
        serve(engine, "b", second, FULL)  # takes the row
        with engine.acquire(CacheRequest("reader", continued(second))) as reader:
            assert reuse(engine, reader, continued(second), FULL)
            assert serve(engine, "c", continued(first), FULL) == (Hit(device=WHOLE), False)
            assert serve(engine, "d", third, FULL) == (Hit(), False)
            assert engine.stats()["commit.skipped_states"] == 2
            assert reuse(engine, reader, continued(second), FULL)  # no other request has written to the row
        context = engine.inspect.context
        assert not len(context.tree.pages["last_hidden"].held(context.tree.match(third[:WHOLE]).rows))
        evict(engine, second[:WHOLE], "last_hidden")
        assert serve(engine, "e", continued(first, 97), FULL) == (Hit(device=WHOLE), True)


def test_a_failed_load_of_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose load of the hidden state fails gets `TransferError`, before and after the failed copy has ended.
    The row is free again, and a retry works."""
    with build_engine(config(), FULL, components=[LastHidden]) as engine:
        first, component = prompt(1), engine.component(LastHidden)
        for n in range(1, 5):
            serve(engine, f"a{n}", prompt(n), FULL)
        with monkeypatch.context() as patch:
            patch.setattr(component.transfer.mover, "scatter", lambda *_: 1 / 0)
            lease = engine.acquire(CacheRequest("b", first))
            for _ in range(2):
                engine.begin_forward([lease])
                with pytest.raises(TransferError):
                    component.read(lease)
                engine.flush()
                engine.check()
            engine.release(lease)
            engine.check()
        assert serve(engine, "c", first, FULL)[1]


def test_components_are_found_by_class_and_distinguished_by_name() -> None:
    """Two components with one name are refused. An engine returns a component by its class, and raises if it has
    none."""
    with pytest.raises(ConfigError, match="last_hidden"):
        build_engine(config(), FULL, components=[OneRow, TwoRows])
    with build_engine(config(), FULL, components=[OneRow]) as engine:
        assert isinstance(engine.component(LastHidden), OneRow)
        with pytest.raises(InvalidArgument, match="TwoRows"):
            engine.component(TwoRows)
