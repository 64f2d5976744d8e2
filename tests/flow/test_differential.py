"""The program that compares two checkouts: of one and the same it finds nothing, and what differs it tells."""

from __future__ import annotations

import contextlib

import pytest

import differential
from differential import KINDS, Checkout, History, Outcome, drive
from programs import PIPE, program


def test_a_checkout_serves_what_it_serves() -> None:
    """Two processes of this one, with a few dozen requests of each model: every byte is right, and every hit equal."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(program(differential.__file__, "--serve", stdin=PIPE)) for _ in range(2)]
        sides = [Checkout(at.stdin, at.stdout) for at in running]
        drive(sides, KINDS, 75, 0, outcome)
    assert (outcome.wrong, outcome.differing) == ([], [])
    assert {group[0] for group in outcome.requests} == {*KINDS}
    assert all(counts["device"] and counts["host"] for counts, _ in outcome.tokens.values())
    assert sum(sum(how.values()) for how in outcome.requests.values()) > 50


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        ({"hit": [8, 0, 0, 0]}, {"hit": [8, 0, 0, 0]}, "equal"),
        ({"hit": [8, 0, 0, 0]}, {"hit": [0, 8, 0, 0]}, "moved"),
        ({"hit": [8, 0, 0, 0]}, {"hit": [8, 8, 0, 0]}, "better"),
        ({"hit": [8, 0, 8, 0]}, {"hit": [8, 0, 0, 0]}, "worse"),
        ({"refused": "OutOfSlots"}, {"hit": [0, 0, 0, 0]}, "refused"),
    ],
)
def test_answers_are_compared(old: dict[str, object], new: dict[str, object], how: str) -> None:
    outcome = Outcome()
    outcome.enter(("full",), "admit", "line 1", [old, new])
    assert outcome.requests == {("full",): {how: 1}}
    assert len(outcome.differing) == (how != "equal") and not outcome.wrong


def test_a_wrong_answer_is_told() -> None:
    outcome = Outcome()
    outcome.enter(("full",), "grow", "line 1", [{}, {"wrong": "AssertionError: a byte"}])
    assert outcome.wrong == ["new: line 1: AssertionError: a byte"]


def test_a_history_follows_from_its_number() -> None:
    first, again, other = (list(History("full", number).lines(20)) for number in (1, 1, 2))
    assert first == again != other
