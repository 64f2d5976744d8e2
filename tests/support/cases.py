"""Tables of test cases: rows that cover every pair of parameters, and checks that calls are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from _pytest.mark import ParameterSet

KERNELS = ("torch", "triton")


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test. The default rows have every pair of values of two axes; the other rows of the product are
    `long`. The axis `kernels` is passed to the fixture of that name."""
    return _covering(2, axes)


def each_value(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test as `pairwise` does, but the default rows only have every value of each axis."""
    return _covering(1, axes)


def _covering(strength: int, axes: Mapping[str, Sequence[object]]) -> pytest.MarkDecorator:
    product = list(itertools.product(*(range(len(values)) for values in axes.values())))

    def covered(row: tuple[int, ...]) -> set[object]:
        return set(itertools.combinations(enumerate(row), strength))

    missing, chosen = set().union(*map(covered, product)), set()
    while missing:
        row = max(product, key=lambda row: len(covered(row) & missing))
        chosen.add(row)
        missing -= covered(row)
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(values[i] for values, i in zip(axes.values(), row, strict=True)),
                marks=[] if row in chosen else [pytest.mark.long],
            )
            for row in product
        ],
        indirect=[name for name in axes if name == "kernels"],
    )


def long(*rows: object) -> list[ParameterSet]:
    """Mark rows of a table as `long`. A row that is a tuple has one value for each parameter."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]


def refused(error: type[Exception], *calls: Callable[[], object]) -> None:
    """Assert that each call raises `error`."""
    for position, call in enumerate(calls):
        with pytest.raises(error):
            pytest.fail(f"call {position} of {len(calls)} returned {call()!r}")
