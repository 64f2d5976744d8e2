"""The counts of `steps`: what a call of the scheduler's thread calls, by a profile hook."""

from __future__ import annotations

import pytest

from hicache.bench.counting import Calls, classes_of, modules_of
from hicache.bench.step_counts import MODELS, calls_of_poll, three_requests, waiting_requests


class Outer:
    class Inner:
        def method(self) -> list[int]:
            return sorted((2, 1), key=lambda n: n)


def test_a_call_counts_by_its_module_and_its_class() -> None:
    """Each call is recorded, also of a function inside a method, which belongs to the class of that method. C functions
    are apart, and tests are no part of the package."""
    calls = Calls()
    assert calls.record(Outer.Inner().method) == [1, 2]
    assert [function.code.co_name for function in calls.python] == ["method", "<lambda>", "<lambda>"]
    assert calls.c == ["sorted"]
    assert calls.total == 4
    assert modules_of(calls.python) == {__name__}
    assert classes_of(calls.python) == {f"{__name__}.Outer.Inner"}
    assert calls.in_package() == []


@pytest.mark.parametrize("model", MODELS)
def test_three_requests_call_the_same_functions_each_time(model: str) -> None:
    """A second run of a miss, a commit and a prefetch has the calls of the first, one by one, whatever threads do
    meanwhile. The first run in a process may fill caches, so it does not count."""
    three_requests(model)
    first, second = three_requests(model), three_requests(model)
    for request in ("miss", "commit", "prefetch"):
        assert first.functions(request) == second.functions(request)
        assert len(first.functions(request)) > 0


def test_polls_without_news_are_counted_while_requests_wait() -> None:
    """A poll calls functions of the package, and every request still waits."""
    with waiting_requests("auto", 10) as engine:
        assert calls_of_poll(engine) > 0
        assert engine.stats()["prefetch.waiting_requests"] == 10
