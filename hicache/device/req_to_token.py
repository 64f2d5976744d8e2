"""The request table: the slot of every token of each running request.

    row 0           for padding, never allocated
    rows [1, size]  one for each request; columns [0, req_lens[row]) hold slots

The request table owns its rows, but not the slots in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import torch

from hicache.device.memory import allocate_zeros, allocation_region
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


class TableRequest(Protocol):
    """The attribute of a request that the table reads and sets: the request's row, or None."""

    req_pool_idx: int | None


class ReqToTokenPool:
    """Rows of `req_to_token`, int32 `[size + 1, max_context_len]` on `device`. Scheduler thread only.

    `free_slots` lists the free rows; its last row is allocated next. `req_lens`, int32 `[size + 1]` on the CPU, is the
    number of slots that `set_token_loc` wrote to each row. `generation[row]` is incremented when the row is freed, so a
    reader that remembers the number can detect that the row was freed since. Only callers with SGLang's interface use
    `set_token_loc` and `req_lens`.
    """

    def __init__(
        self, size: int, max_context_len: int, device: str | torch.device, enable_memory_saver: bool = False
    ) -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"size={size}, max_context_len={max_context_len}: raise max_requests, max_context_len")
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        with allocation_region(enable_memory_saver):
            (self.req_to_token,) = allocate_zeros([(size + 1, max_context_len)], torch.int32, self.device)
        self.req_lens = torch.zeros(size + 1, dtype=torch.int32)
        self._lens = self.req_lens.numpy()  # numpy writes one element many times faster than torch
        self.generation = [0] * (size + 1)
        self._taken = [False] * (size + 1)
        self.free_slots = list(range(size, 0, -1))

    @overload
    def alloc(self) -> int: ...

    @overload
    def alloc(
        self, need_size: int | Sequence[TableRequest], reqs: Sequence[TableRequest] | None = None
    ) -> list[int] | None: ...

    @overload
    def alloc(self, *, reqs: Sequence[TableRequest]) -> list[int] | None: ...

    def alloc(
        self, need_size: int | Sequence[TableRequest] | None = None, reqs: Sequence[TableRequest] | None = None
    ) -> int | list[int] | None:
        """Allocate `need_size` rows, or one row for each request. Returns None, without any change, if too few rows are
        free.

        Either argument may be the list of requests. If both arguments are given, `need_size` must be the number of
        requests; otherwise raises ShapeError. A request that has a row (`req_pool_idx`) keeps this row; raises
        InvariantError if the row is not allocated. Without arguments, returns one row, or -1 if no row is free.
        """
        if isinstance(need_size, Sequence):
            need_size, reqs = None, need_size
        if reqs is not None:
            if need_size not in (None, len(reqs)):
                raise ShapeError(f"need_size={need_size} for {len(reqs)} requests; leave it out")
            return self._take_for(reqs)
        if need_size is not None:
            return self._take(need_size)
        rows = self._take(1)
        return rows[0] if rows else -1

    def free(self, what: int | Sequence[int] | TableRequest) -> None:
        """Free one row, several rows, or the row of a request, whose `req_pool_idx` becomes None. Raises DoubleFree,
        before any change, for a row that is not allocated."""
        if isinstance(what, int):
            self._free([what])
        elif isinstance(what, Sequence):
            self._free(list(what))
        else:
            if what.req_pool_idx is None:
                raise DoubleFree("the request has no row; it was freed before, or never had one")
            self._free([what.req_pool_idx])
            what.req_pool_idx = None

    def write(
        self, indices: tuple[int | torch.Tensor, slice | int | torch.Tensor] | list[int], values: torch.Tensor
    ) -> None:
        """Write slots to the table: `req_to_token[indices] = values`. `indices`: (row, slice), tensors of rows and
        positions, or rows that are written completely."""
        # If the index is a slice, torch accepts values of any integer type. With other indices, the values must have
        # the dtype of the table.
        is_slice = isinstance(indices, tuple) and isinstance(indices[1], slice)
        self.req_to_token[indices] = values if is_slice else values.to(torch.int32)

    def set_token_loc(self, req_idx: int, start: int, kv_indices: torch.Tensor) -> None:
        """Write the slots of tokens [start, start + n) of a row and set the length of the row. Raises ShapeError if
        start + n exceeds the number of columns."""
        end = start + kv_indices.numel()
        if not self._holds(req_idx):
            raise ShapeError(f"row {req_idx} is not allocated; rows are 1..{self.size}")
        if start < 0 or end > self.max_context_len:
            raise ShapeError(f"tokens [{start}, {end}) do not fit max_context_len={self.max_context_len}; raise it")
        self.req_to_token[req_idx, start:end] = kv_indices
        self.req_lens[req_idx] = end

    def available_size(self) -> int:
        return len(self.free_slots)

    def clear(self) -> None:
        """Free all rows."""
        self._free([row for row in range(1, self.size + 1) if self._taken[row]])
        self.free_slots = list(range(self.size, 0, -1))

    def check(self) -> None:
        """Raise InvariantError with all violations. Violations are a row that is free twice, or both free and
        allocated, or neither, and an allocated row 0."""
        violations = []
        free = set(self.free_slots)
        if len(free) != len(self.free_slots):
            violations.append(f"{len(self.free_slots) - len(free)} rows are free more than once")
        if not free <= set(range(1, self.size + 1)):
            violations.append(f"free rows {sorted(free - set(range(1, self.size + 1)))} are outside 1..{self.size}")
        if self._taken[0]:
            violations.append("row 0 is allocated")
        wrong = [row for row in range(1, self.size + 1) if self._taken[row] == (row in free)]
        if wrong:
            violations.append(f"rows {wrong[:8]} are both free and allocated, or neither")
        if violations:
            raise InvariantError("ReqToTokenPool", violations)

    def _holds(self, row: int) -> bool:
        return 0 < row <= self.size and self._taken[row]

    def _take_for(self, requests: Sequence[TableRequest]) -> list[int] | None:
        stale, waiting = list[int](), dict[int, TableRequest]()
        for request in requests:
            if request.req_pool_idx is None:
                waiting[id(request)] = request
            elif not self._holds(request.req_pool_idx):
                stale.append(request.req_pool_idx)
        if stale:
            raise InvariantError("ReqToTokenPool", [f"requests name rows {stale} that are not allocated"])
        rows = self._take(len(waiting))
        if rows is None:
            return None
        for request, row in zip(waiting.values(), rows, strict=True):
            request.req_pool_idx = row
        return [request.req_pool_idx for request in requests if request.req_pool_idx is not None]

    def _take(self, num_rows: int) -> list[int] | None:
        num_left = len(self.free_slots) - num_rows
        if num_left < 0:
            return None
        rows = self.free_slots[num_left:][::-1]
        del self.free_slots[num_left:]
        for row in rows:
            self._taken[row] = True
            self._lens[row] = 0
        return rows

    def _free(self, rows: list[int]) -> None:
        bad = [row for row in rows if not self._holds(row)]
        if bad or len(set(rows)) != len(rows):
            raise DoubleFree(f"rows {bad or rows} were freed and are not allocated, or are named twice")
        for row in rows:
            self._taken[row] = False
            self.generation[row] += 1
        self.free_slots.extend(reversed(rows))
