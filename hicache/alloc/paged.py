"""The allocator of pages: an extend or a decode fills the last page of its sequence before it allocates another
page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hicache.alloc.base import AllocatorState, BaseTokenToKVPoolAllocator, are_runs, distinct, slots_of
from hicache.errors import InvariantError, ShapeError
from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend


def distinct_first(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct ids, ascending, at the front of a tensor as long as `ids`, and the index `[1]` of the last
    distinct id.

    The sizes of all tensors are independent of the ids, so the host need not wait for the device, unlike for `unique`.
    Elements after the last distinct id are undefined.
    """
    ascending = ids.sort().values
    rank = torch.zeros_like(ascending)
    torch.cumsum(ascending[1:] != ascending[:-1], 0, out=rank[1:])
    # Equal ids have the same rank, so their writes to one element write the same id.
    return torch.empty_like(ascending).scatter_(0, rank, ascending), rank[-1:]


@dataclass(frozen=True)
class _Tally:
    """Freed pages that are being counted on the device.

    `pages` int64 `[tokens]` has `count` distinct ids, ascending, at its front; `count` int64 `[1]` is in pinned memory
    and valid once the event `counted` is reached.
    """

    pages: torch.Tensor
    count: torch.Tensor
    counted: torch.cuda.Event

    @classmethod
    def of(cls, pages: torch.Tensor) -> _Tally:
        """Start to count the distinct ids of `pages`, which has at least one id, with launches whose sizes do not
        depend on the ids."""
        distinct, last = distinct_first(pages)
        count = torch.empty(1, dtype=torch.int64, pin_memory=True)
        count.copy_(last + 1, non_blocking=True)
        counted = torch.cuda.Event()
        counted.record(torch.cuda.current_stream(pages.device))
        return cls(distinct, count, counted)

    def distinct(self) -> torch.Tensor:
        """Return the distinct ids, after waiting for the count."""
        self.counted.synchronize()
        return self.pages[: int(self.count)].clone()


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Allocates pages 1..num_pages of `page_size` slots each; page p has the slots [p*page_size, (p+1)*page_size).

    A page belongs to one sequence, which fills it in order. Scheduler thread only.

    `free` accepts any tokens of a page, some or all, and never waits for the device. On CUDA the distinct pages are
    counted on the device, and the count is copied to the host asynchronously. Only `available_size`, `check`, a
    snapshot or an allocation that would otherwise fail waits for this count. `free_run` knows the positions of tokens
    in their sequence, so it computes the number of pages from lengths without a count.
    """

    def clear(self) -> None:
        self._tallies: list[_Tally] = []
        self._group_runs: list[torch.Tensor] = []
        super().clear()

    @cached_property
    def _offsets(self) -> torch.Tensor:
        return torch.arange(self.page_size, dtype=torch.int64, device=self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size / page_size` pages and return all their slots, in page order. Raises ShapeError if
        `need_size` is not a multiple of the page size."""
        if need_size % self.page_size:
            raise ShapeError(f"{need_size} tokens are not a multiple of page_size={self.page_size}")
        pages = self._take(need_size // self.page_size)
        return None if pages is None else slots_of(pages, self.page_size, self._offsets)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Allocate slots for the tokens of each request from its prefix length to its sequence length; returns int64
        `[extend_num_tokens]`, or None, without any change, if too few pages are free.

        Lengths are integer tensors `[requests]` in tokens, given on the device and on the CPU. `last_loc`: slot of the
        prefix's last token, -1 without a prefix; (last_loc + 1) % page_size equals prefix_len % page_size. The call
        needs one kernel launch, and does not wait for the device. Raises ShapeError if lengths disagree. Raises
        InvariantError if a `last_loc` does not end its prefix; on CUDA outside debug mode, the check is an assertion on
        the device. If this assertion fails, the process can no longer use the device.
        """
        prefix, seq = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        new_tokens = seq - prefix
        longest = int(new_tokens.max(initial=0))
        if new_tokens.min(initial=0) < 0:
            raise ShapeError(f"seq_lens {seq.tolist()} are below prefix_lens {prefix.tolist()}")
        if int(new_tokens.sum()) != extend_num_tokens:
            raise ShapeError(f"extend_num_tokens={extend_num_tokens}, but the lengths grow by {int(new_tokens.sum())}")
        self._check_last_loc(last_loc, prefix_lens)
        num_new_pages = int((self._num_pages(seq) - self._num_pages(prefix)).sum())
        if not self._reserve(num_new_pages):
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        free = self._free_pages
        alloc_extend(prefix_lens, seq_lens, last_loc, free, out, self.page_size, longest, self._kernels)
        self._drop_front(self._free_pages[:num_new_pages])
        if self._debug:
            self._check_unique(out)
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Allocate one slot for each request; returns int64 `[requests]`, or None, without any change, if too few pages
        are free.

        `seq_lens` count the new token; `last_loc` is the slot of the token before the new token. One launch allocates
        the slots, and the host does not wait for the device. A wrong `last_loc` is an error as in `alloc_extend`.
        """
        seq = seq_lens_cpu.numpy()
        if seq.min(initial=1) < 1:
            raise ShapeError(f"seq_lens {seq.tolist()} must count the new token")
        self._check_last_loc(last_loc, seq_lens - 1)
        num_new_pages = int(np.count_nonzero((seq - 1) % self.page_size == 0))
        if not self._reserve(num_new_pages):
            return None
        out = torch.empty(seq_lens_cpu.numel(), dtype=torch.int64, device=self.device)
        alloc_decode(seq_lens, last_loc, self._free_pages, out, self.page_size, self._kernels)
        self._drop_front(self._free_pages[:num_new_pages])
        if self._debug:
            self._check_unique(out)
        return out

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """Free a run of slots, without any later wait for the device; see the base class. Raises DoubleFree.

        If `first_position` is within a page, this method is the same as `free`, because the earlier tokens of the page
        may be freed too.
        """
        if first_position % self.page_size:
            self.free(slots)
        elif slots.numel():
            self.free_pages_of(self._pages_of_run(slots))

    def free_pages_of(self, pages: torch.Tensor) -> None:
        if self._group is None:
            self._give(pages)
        else:
            self._group_runs.append(pages)

    def free_group_end(self) -> None:
        runs, self._group_runs = self._group_runs, []
        if runs and self._group:
            # Single tokens of a free group may be in pages of a run. Runs and single tokens are both passed as slots,
            # so that each page is freed once.
            self._group.extend(pages * self.page_size for pages in runs)
        elif runs:
            self._give(torch.cat(runs))
        super().free_group_end()

    def restore_state(self, state: AllocatorState) -> None:
        self._tallies = []
        super().restore_state(state)

    def _apply_free(self, slots: torch.Tensor) -> None:
        if self.device.type == "cpu" or self._owned is not None:
            self._give(self._pages_of(slots))
        elif slots.numel() == 1:
            self._give(slots.to(torch.int64) // self.page_size)
        else:
            self._tallies.append(_Tally.of(slots.to(torch.int64) // self.page_size))

    def _settle(self) -> None:
        if self._tallies:
            tallies, self._tallies = self._tallies, []
            for tally in tallies:
                self._give(tally.distinct())

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the distinct pages of slots, ascending. On CUDA, the host waits until the device has counted the
        pages."""
        return distinct(slots.to(torch.int64) // self.page_size, self.page_size)

    def _pages_of_run(self, slots: torch.Tensor) -> torch.Tensor:
        if self._owned is not None:
            self._check_run(slots)
        # The page of P tokens [0, P), [P, 2P), ... is the page of the first of these tokens.
        pages: torch.Tensor = slots[:: self.page_size].to(torch.int64) // self.page_size
        return pages

    def _num_pages(self, lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-lens // self.page_size)

    def _check_run(self, slots: torch.Tensor) -> None:
        # Called only on the host or in debug mode, because the comparison would wait for the device.
        if slots.device.type == "cpu" and are_runs(slots, self.page_size):
            return
        pages = slots // self.page_size
        if not torch.equal(pages, pages[:: self.page_size].repeat_interleave(self.page_size)[: len(pages)]):
            raise ShapeError(
                f"{len(slots)} slots were freed as a run from a page's start, but {pages.tolist()[:8]}… are "
                f"their pages of {self.page_size}; free them by free()"
            )

    def _check_last_loc(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """Raise if the offset of a `last_loc` in its page differs from the offset of its prefix's last token, because
        new tokens would then get slots of another sequence.

        InvariantError on the CPU and in debug mode. On CUDA, an assertion on the device checks the offsets, by five
        small launches per batch: the host does not wait, and no later kernel runs if the assertion fails.
        """
        ends = (prefix_lens - last_loc) % self.page_size == 1 % self.page_size
        if self.device.type == "cuda" and not self._debug:
            torch._assert_async(ends.all(), "last_loc does not end its prefix: see alloc_extend and alloc_decode")
        elif not ends.all():
            bad = ~ends
            raise InvariantError(
                type(self).__name__,
                [
                    f"last_loc {last_loc[bad][:8].tolist()} do not end prefixes of {prefix_lens[bad][:8].tolist()} "
                    f"tokens in pages of {self.page_size}"
                ],
            )

    def _check_unique(self, slots: torch.Tensor) -> None:
        if slots.unique().numel() != slots.numel() or (slots.numel() and int(slots.min()) < self.page_size):
            raise InvariantError(type(self).__name__, [f"slots allocated twice or from page 0: {slots.tolist()}"])
