"""Tables of cases: pairs of parameters in place of their product, and calls that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize with every pair of values of two axes; the rest of their product is `long`."""
    product = list(itertools.product(*(range(len(values)) for values in axes.values())))

    def pairs(row: tuple[int, ...]) -> set[object]:
        return set(itertools.combinations(enumerate(row), 2))

    missing, chosen = set().union(*map(pairs, product)), set()
    while missing:
        row = max(product, key=lambda row: len(pairs(row) & missing))
        chosen.add(row)
        missing -= pairs(row)
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(values[i] for values, i in zip(axes.values(), row, strict=True)),
                marks=[] if row in chosen else [pytest.mark.long],
            )
            for row in product
        ],
    )


def refused(error: type[Exception], *calls: Callable[[], object]) -> None:
    """Each call raises `error`."""
    for position, call in enumerate(calls):
        with pytest.raises(error):
            pytest.fail(f"call {position} of {len(calls)} returned {call()!r}")
