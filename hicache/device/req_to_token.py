"""The request table: for each running request, the slot of every token of it.

    row 0           the sink for padding, never handed out
    rows [1, size]  one a request; columns [0, req_lens[row]) hold slots

Owns the table. The slots in it belong to whoever allocated them. May import errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import torch

from hicache.device.memory import allocate_zeros, allocation_region
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


class TableRequest(Protocol):
    """What the table asks of a request: a place to keep its row."""

    req_pool_idx: int | None


class ReqToTokenPool:
    """Rows of `req_to_token`, int32 `[size + 1, max_context_len]` on `device`. Scheduler thread only.

    `req_lens`, int32 `[size + 1]` on the CPU, counts what `set_token_loc` filled. `generation[row]` grows whenever the
    row is given back, so that a reader that kept it can tell that the row is no longer its own.
    """

    def __init__(self, size: int, max_context_len: int, device: str | torch.device, enable_memory_saver: bool) -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"size={size}, max_context_len={max_context_len}: raise max_requests, max_context_len")
        self.size, self.max_context_len = size, max_context_len
        self.device = torch.device(device)
        with allocation_region(enable_memory_saver):
            (self.req_to_token,) = allocate_zeros([(size + 1, max_context_len)], torch.int32, self.device)
        self.req_lens = torch.zeros(size + 1, dtype=torch.int32)
        self.generation = [0] * (size + 1)
        self._taken = [False] * (size + 1)
        self._free_rows = list(range(size, 0, -1))

    @overload
    def alloc(self, need: int) -> list[int] | None: ...

    @overload
    def alloc(self, need: Sequence[TableRequest]) -> list[int] | None: ...

    def alloc(self, need: int | Sequence[TableRequest]) -> list[int] | None:
        """`need` rows, or a row for each request; None when short, which changes nothing.

        A request that has a row (`req_pool_idx`) keeps it. InvariantError where that row is not handed out.
        """
        if isinstance(need, int):
            return self._take(need)
        stale = [r.req_pool_idx for r in need if r.req_pool_idx is not None and not self._holds(r.req_pool_idx)]
        if stale:
            raise InvariantError("ReqToTokenPool", [f"requests name rows {stale} that are not handed out"])
        waiting = list({id(request): request for request in need if request.req_pool_idx is None}.values())
        rows = self._take(len(waiting))
        if rows is None:
            return None
        for request, row in zip(waiting, rows, strict=True):
            request.req_pool_idx = row
        return [request.req_pool_idx for request in need if request.req_pool_idx is not None]

    def free(self, what: int | Sequence[int] | TableRequest) -> None:
        """Give back a row, several, or a request's (whose `req_pool_idx` becomes None). DoubleFree changes nothing."""
        if isinstance(what, int):
            self._give([what])
        elif isinstance(what, Sequence):
            self._give(list(what))
        else:
            if what.req_pool_idx is None:
                raise DoubleFree("the request has no row; it was freed before, or never had one")
            self._give([what.req_pool_idx])
            what.req_pool_idx = None

    def write(self, indices: tuple[int | torch.Tensor, slice | int | torch.Tensor], values: torch.Tensor) -> None:
        """`req_to_token[indices] = values`: slots for (row, slice), or for tensors of rows and positions."""
        self.req_to_token[indices] = values.to(torch.int32)

    def set_token_loc(self, req_idx: int, start: int, kv_indices: torch.Tensor) -> None:
        """Put the slots of tokens [start, start + n) of a row in place and set its length. ShapeError past the end."""
        end = start + kv_indices.numel()
        if not self._holds(req_idx):
            raise ShapeError(f"row {req_idx} is not handed out; rows are 1..{self.size}")
        if start < 0 or end > self.max_context_len:
            raise ShapeError(f"tokens [{start}, {end}) do not fit max_context_len={self.max_context_len}; raise it")
        self.req_to_token[req_idx, start:end] = kv_indices
        self.req_lens[req_idx] = end

    def available_size(self) -> int:
        return len(self._free_rows)

    def clear(self) -> None:
        """Take all rows back."""
        self._give([row for row in range(1, self.size + 1) if self._taken[row]])
        self._free_rows = list(range(self.size, 0, -1))

    def check(self) -> None:
        """Raise InvariantError with all violations: a row free twice, free and taken, or neither; row 0 anywhere."""
        violations = []
        free = set(self._free_rows)
        if len(free) != len(self._free_rows):
            violations.append(f"{len(self._free_rows) - len(free)} rows are free more than once")
        if not free <= set(range(1, self.size + 1)):
            violations.append(f"free rows {sorted(free - set(range(1, self.size + 1)))} are outside 1..{self.size}")
        if self._taken[0]:
            violations.append("row 0 is handed out")
        wrong = [row for row in range(1, self.size + 1) if self._taken[row] == (row in free)]
        if wrong:
            violations.append(f"rows {wrong[:8]} are both free and taken, or neither")
        if violations:
            raise InvariantError("ReqToTokenPool", violations)

    def _holds(self, row: int) -> bool:
        return 0 < row <= self.size and self._taken[row]

    def _take(self, num_rows: int) -> list[int] | None:
        if num_rows > len(self._free_rows):
            return None
        rows = [self._free_rows.pop() for _ in range(num_rows)]
        for row in rows:
            self._taken[row] = True
            self.req_lens[row] = 0
        return rows

    def _give(self, rows: list[int]) -> None:
        bad = [row for row in rows if not self._holds(row)]
        if bad or len(set(rows)) != len(rows):
            raise DoubleFree(f"rows {bad or rows} were freed and are not handed out, or are named twice")
        for row in rows:
            self._taken[row] = False
            self.generation[row] += 1
        self._free_rows.extend(reversed(rows))
