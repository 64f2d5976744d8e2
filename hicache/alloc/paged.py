"""The allocator of pages: extends and decodes fill the page they stand in before they take another.

Owns nothing beyond the base. May import what the base may.
"""

from __future__ import annotations

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator, SlotStore
from hicache.config import kernel_choice
from hicache.errors import InvariantError, ShapeError
from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages 1..num_pages of `page_size` slots each; page p holds slots [p*page_size, (p+1)*page_size).

    A page belongs to one sequence, which fills it in order. Scheduler thread only.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: SlotStore | None,
        need_sort: bool,
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self._kernels = kernel_choice(self.device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """All slots of `need_size / page_size` pages, in page order. ShapeError unless it is whole pages."""
        if need_size % self.page_size:
            raise ShapeError(f"{need_size} tokens are no whole pages of page_size={self.page_size}")
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots int64 `[extend_num_tokens]` that grow each request from its prefix to its sequence length.

        Integer tensors `[requests]`; lengths in tokens, on the device and on the CPU. `last_loc` is the slot of the
        prefix's last token, -1 without one: (last_loc + 1) % page_size == prefix_len % page_size. None when pages
        are short, checked before the launch. One launch, no wait for the device. ShapeError where lengths disagree.
        """
        new_tokens = seq_lens_cpu - prefix_lens_cpu
        if new_tokens.numel() and int(new_tokens.min()) < 0:
            raise ShapeError(f"seq_lens {seq_lens_cpu.tolist()} are below prefix_lens {prefix_lens_cpu.tolist()}")
        if int(new_tokens.sum()) != extend_num_tokens:
            raise ShapeError(f"extend_num_tokens={extend_num_tokens}, but the lengths grow by {int(new_tokens.sum())}")
        if self._debug:
            self._check_last_loc(last_loc, prefix_lens)
        num_new_pages = int((self._num_pages(seq_lens_cpu) - self._num_pages(prefix_lens_cpu)).sum())
        if not self._reserve(num_new_pages):
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        longest = int(new_tokens.max()) if new_tokens.numel() else 0
        free = self.free_pages
        alloc_extend(prefix_lens, seq_lens, last_loc, free, out, self.page_size, longest, self._kernels)
        self._drop_front(num_new_pages)
        if self._debug:
            self._check_unique(out)
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot a request, int64 `[requests]`; `seq_lens` count the new token, `last_loc` is the token before it.

        None when pages are short, checked before the launch. One launch, no wait for the device.
        """
        if seq_lens_cpu.numel() and int(seq_lens_cpu.min()) < 1:
            raise ShapeError(f"seq_lens {seq_lens_cpu.tolist()} must count the new token")
        if self._debug:
            self._check_last_loc(last_loc, seq_lens - 1)
        num_new_pages = int(((seq_lens_cpu - 1) % self.page_size == 0).sum())
        if not self._reserve(num_new_pages):
            return None
        out = torch.empty(seq_lens_cpu.numel(), dtype=torch.int64, device=self.device)
        alloc_decode(seq_lens, last_loc, self.free_pages, out, self.page_size, self._kernels)
        self._drop_front(num_new_pages)
        if self._debug:
            self._check_unique(out)
        return out

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        # Several tokens of one page name it once. On CUDA this waits for the device: the count is data.
        pages: torch.Tensor = (slots.to(torch.int64) // self.page_size).unique()
        return pages

    def _num_pages(self, lens: torch.Tensor) -> torch.Tensor:
        return (lens + self.page_size - 1) // self.page_size

    def _check_last_loc(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        bad = (last_loc + 1) % self.page_size != prefix_lens % self.page_size
        if bad.any():
            raise InvariantError(
                type(self).__name__,
                [
                    f"last_loc {last_loc[bad][:8].tolist()} do not end prefixes of {prefix_lens[bad][:8].tolist()} "
                    f"tokens in pages of {self.page_size}"
                ],
            )

    def _check_unique(self, slots: torch.Tensor) -> None:
        if slots.unique().numel() != slots.numel() or (slots.numel() and int(slots.min()) < self.page_size):
            raise InvariantError(type(self).__name__, [f"slots handed out twice or from page 0: {slots.tolist()}"])
