"""The state machine of a prefetch: every pair of a stage and an event, on an engine with a request in that stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from disk_case import Gate
from hicache import CacheEngine, CacheRequest
from hicache.errors import InvariantError
from hicache.flow import reads
from hicache.flow.reads import TRANSITIONS, Event, PendingPrefetch, Prefetcher, Stage
from prefetch_case import PacedStore, engine_of, fill, tokens_of, until_found
from toy_model import settled
from waiting import eventually


@contextmanager
def request_in(
    stage: Stage, store: PacedStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CacheEngine, PendingPrefetch]]:
    """An engine with a prefetch of 24 pages in `stage`, for which a lease can be acquired. At the end the request is
    cancelled, and the engine releases everything."""
    tokens, before = tokens_of(1), tokens_of(3)
    fill(store, tokens, before)
    gate = Gate("contains")
    with engine_of(store, prefetch_host_share=0.1) as engine:
        prefetcher = engine.inspect.prefetcher
        assert prefetcher is not None
        prefetcher.least_overlap_pages = 8
        claims = engine.prefetch("claims the share", before) if stage is Stage.DEFERRED else None
        eventually(lambda: engine.poll() or claims is None or claims.ended)
        if stage is Stage.QUEUED:
            monkeypatch.setattr(reads, "_MAX_ACTIVE", 0)
        if stage is Stage.LOOKING_UP:
            store.trouble = gate
        store.hold()
        handle = engine.prefetch("a", tokens, overlaps=stage is Stage.OVERLAPPING)
        request, lease = prefetcher._requests["a"], engine.acquire(CacheRequest("b", tokens_of(2, 9)))
        request.lease = lease
        if stage is Stage.READING:
            until_found(engine, store, handle)
        elif stage is Stage.OVERLAPPING:
            request.lease = None
            engine.release(lease)
            eventually(lambda: engine.poll() or handle.ready)
            lease = engine.acquire(CacheRequest("a", tokens))
        elif stage is Stage.ENDED:
            engine.cancel("a")
        else:
            eventually(lambda: engine.poll() or request.stage is stage)
        assert request.stage is stage
        yield engine, request
        engine.release(lease)
        engine.cancel("a")
        gate.open()
        store.allow()
        engine.cancel("claims the share")
        settled(engine)


@pytest.mark.parametrize(("stage", "event"), [*itertools.product(Stage, Event)], ids=lambda of: of.name)
def test_each_event_in_each_stage(
    stage: Stage, event: Event, store: PacedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event of the table moves the request to the new stage and runs its action once; then all accounts hold. If the
    new stage is ENDED, the action itself sets it. An event that the table does not have for the stage raises and
    changes nothing."""
    with request_in(stage, store, monkeypatch) as (engine, request):
        prefetcher, seen = engine.inspect.prefetcher, list[Stage]()
        assert prefetcher is not None
        if (stage, event) not in TRANSITIONS:
            with pytest.raises(InvariantError, match=f"{event.name} in stage {stage.name}"):
                prefetcher.apply(request, event)
            assert request.stage is stage
            engine.check()
            return
        target, action = TRANSITIONS[stage, event]

        def seen_action(owner: Prefetcher, acted_on: PendingPrefetch) -> None:
            assert owner is prefetcher
            seen.append(acted_on.stage)
            action(owner, acted_on)

        monkeypatch.setitem(TRANSITIONS, (stage, event), (target, seen_action))
        if event is Event.ANSWERED:
            request.lookup = None
        prefetcher.apply(request, event)
        assert seen == [stage if target is Stage.ENDED else target]
        assert request.stage is Stage.ENDED or target is not Stage.ENDED
        engine.check()


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.ENDED], ids=lambda of: of.name)
def test_an_end_that_raised_is_repeated(stage: Stage, store: PacedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel raises before the request has released its pages. The next cancel ends the request."""
    with request_in(stage, store, monkeypatch) as (engine, request):
        prefetcher = engine.inspect.prefetcher
        assert prefetcher is not None
        with monkeypatch.context() as patch:
            patch.setattr(prefetcher, "_release", raising(MemoryError))
            with pytest.raises(MemoryError):
                prefetcher.cancel("a")
        prefetcher.cancel("a")
        assert request.stage is Stage.ENDED
        engine.check()


def raising(error: type[BaseException]) -> Callable[..., None]:
    def raise_error(*_: object) -> None:
        raise error

    return raise_error


def test_the_documented_table_is_the_table() -> None:
    """The docstring of the module lists each transition once, with the name of its action."""
    assert reads.__doc__ is not None
    rows = [line.split("|")[1:-1] for line in reads.__doc__.splitlines() if line.strip().startswith("| ")]
    documented = {tuple(cell.strip() for cell in row) for row in rows[1:]}
    assert documented == {
        (event.name, stage.name, target.name, action.__name__.removeprefix("_"))
        for (stage, event), (target, action) in TRANSITIONS.items()
    }


def test_a_request_that_waits_for_its_pages_takes_three_stages(store: PacedStore) -> None:
    """Stores are asked for the pages of a request, its pages are read, and the request ends."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        prefetcher = engine.inspect.prefetcher
        assert prefetcher is not None
        handle = engine.prefetch("a", tokens)
        request, stages = prefetcher._requests["a"], list[Stage]()
        eventually(lambda: stages.append(request.stage) or engine.poll() or handle.ended)
        stages.append(request.stage)
        assert [stage for stage, _ in itertools.groupby(stages)] == [Stage.LOOKING_UP, Stage.READING, Stage.ENDED]
        engine.cancel("a")
        settled(engine)
