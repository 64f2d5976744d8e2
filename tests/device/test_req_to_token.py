"""The request table: rows are allocated once, freed once, and carry a generation."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import refused
from device_case import Request
from hicache.device import ReqToTokenPool
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


def table(size: int = 4, length: int = 16, device: str = "cpu") -> ReqToTokenPool:
    return ReqToTokenPool(size, length, device, False)


def test_rows_that_are_not_allocated_are_refused() -> None:
    """A row that is freed twice, named twice, never allocated, or 0 raises DoubleFree. If one request has such a row,
    no request gets a row. Nothing changes."""
    pool, fresh = table(), Request()
    rows = pool.alloc(3)
    assert rows is not None
    pool.free(rows[0])
    bad = (rows[0], [rows[1], rows[1]], [rows[2], rows[0]], 0, 9, Request(), Request(rows[0]))
    refused(DoubleFree, *(functools.partial(pool.free, what) for what in bad))
    refused(InvariantError, lambda: pool.alloc([fresh, Request(rows[0])]))
    assert fresh.req_pool_idx is None and pool.available_size() == 2
    pool.free(rows[1:])
    assert pool.available_size() == 4
    pool.check()


def test_slots_are_kept_by_row(device: str) -> None:
    """`write` and `set_token_loc` put slots only at their positions and set the lengths. A row begins at length 0 for a
    new owner."""
    pool = table(2, 6, device)
    rows = pool.alloc(2)
    assert rows is not None
    pool.set_token_loc(rows[0], 0, torch.tensor([7, 8, 9], device=device))
    pool.set_token_loc(rows[0], 3, torch.tensor([20], device=device))
    pool.write((rows[1], slice(1, 3)), torch.tensor([5, 6], device=device))
    pool.write(
        (torch.tensor(rows, device=device), torch.tensor([5, 4], device=device)), torch.tensor([30, 31]).to(device)
    )
    expected = torch.zeros(3, 6, dtype=torch.int32)
    expected[rows[0]] = torch.tensor([7, 8, 9, 20, 0, 30])
    expected[rows[1]] = torch.tensor([0, 5, 6, 0, 31, 0])
    assert pool.req_to_token.dtype == torch.int32 and torch.equal(pool.req_to_token.cpu(), expected)
    assert pool.req_lens[rows].tolist() == [4, 0]
    pool.free(rows[0])
    assert pool.alloc(1) == [rows[0]] and pool.req_lens[rows[0]] == 0


def test_slots_past_the_end_are_refused() -> None:
    """Slots beyond the end of the row, or for a row that is not allocated, raise ShapeError, and nothing is written."""
    pool = table(2, 4)
    pool.alloc(1)
    wrong = ((1, 3, 2), (1, -1, 1), (2, 0, 1), (0, 0, 1))
    refused(
        ShapeError, *(functools.partial(pool.set_token_loc, row, at, torch.arange(1, n + 1)) for row, at, n in wrong)
    )
    assert not pool.req_to_token.any() and not pool.req_lens.any()
    refused(ConfigError, lambda: table(0), lambda: table(2, 0))


def test_check_names_every_violation() -> None:
    """`check` lists rows that are free twice, out of range, both free and allocated, or neither, and row 0 if it is
    allocated."""
    pool = table()
    pool.alloc(2)
    pool._taken[0] = True
    pool.free_slots += [1, 3, 0]
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert len(caught.value.violations) == 4
    pool = table()
    pool.free_slots.pop()
    refused(InvariantError, pool.check)


@given(
    st.lists(
        st.tuples(st.sampled_from(["rows", "requests", "free", "clear"]), st.integers(0, 4)), min_size=20, max_size=40
    )
)
def test_rows_are_conserved(steps: list[tuple[str, int]]) -> None:
    """After any calls, each of the rows 1..size has one owner or is free. A request with a row keeps it, also if it is
    named twice. If there are too few rows, no request gets one. Each free of a row raises its generation, so that a
    reader that kept both notices the new owner."""
    pool = table(5)
    rows: list[int] = []
    requests: list[Request] = []
    for kind, n in steps:
        capacity, generation = 5 - len(rows) - len(requests), list(pool.generation)
        before = [*rows, *(r.req_pool_idx for r in requests)]
        if kind == "rows":
            got = pool.alloc(n)
            assert (got is None) == (n > capacity)
            rows += got or []
        elif kind == "requests":
            new, held = [Request() for _ in range(n)], [r.req_pool_idx for r in requests]
            named = [*requests, *new, *new[:1]]
            given_rows = pool.alloc(named)
            assert (given_rows is None) == (n > capacity) and [r.req_pool_idx for r in requests] == held
            if given_rows is not None:
                assert given_rows == [r.req_pool_idx for r in named]
                requests += new
            assert given_rows is not None or all(r.req_pool_idx is None for r in new)
        elif kind == "clear" and n == 0:
            pool.clear()
            rows, requests = [], []
        elif kind == "free" and n % 2 and requests:
            request = requests.pop()
            pool.free(request)
            assert request.req_pool_idx is None
        elif kind == "free":
            pool.free(rows[:n])
            del rows[:n]
        owners = rows + [r.req_pool_idx for r in requests]
        returned = {row for row in before if row not in owners}
        assert all((now > generation[row]) == (row in returned) for row, now in enumerate(pool.generation))
        assert len(set(owners)) == len(owners) and pool.available_size() == 5 - len(owners)
        assert all(row is not None and 1 <= row <= 5 for row in owners)
        pool.check()
