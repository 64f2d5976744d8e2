"""The disk tier of callers that wait: where pages land, on which thread, and what happens where landing fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.integrations.server_store import ServerStore, ServerStoreConfig
from hicache.integrations.sglang.blocking_tier import BlockingTier
from hicache.storage import PageBuffer, PageFormat

PAGE_BYTES, NUM_PAGES = 1 << 19, 12
NAMES = [b"page %d" % n for n in range(NUM_PAGES)]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[BlockingTier]:
    """A tier whose store holds a page of bytes n for each name."""
    config = ServerStoreConfig(path=str(tmp_path), budget=64 << 20)
    tier = BlockingTier(ServerStore.open(config, {"server": "sglang 0.5.23"}, [PageFormat(PAGE_BYTES)]), readers=2)

    def fill(i: int, page: PageBuffer) -> None:
        page[:] = i

    assert all(tier.write(NAMES, PAGE_BYTES, fill))
    yield tier
    assert tier.close()


def test_pages_land_on_the_threads_that_read_them(tier: BlockingTier) -> None:
    landed: dict[int, tuple[bytes, int]] = {}

    def land(i: int, page: PageBuffer) -> None:
        landed[i] = (page.tobytes(), threading.get_ident())

    assert tier.read(NAMES, PAGE_BYTES, land) == [True] * NUM_PAGES
    assert {i: page for i, (page, _) in landed.items()} == {i: bytes([i]) * PAGE_BYTES for i in range(NUM_PAGES)}
    assert threading.get_ident() not in {thread for _, thread in landed.values()}


@pytest.mark.parametrize("failing", [0, 5, NUM_PAGES - 1])
def test_a_page_that_cannot_land_is_the_callers_error(tier: BlockingTier, failing: int) -> None:
    """It is raised once no thread reads any more, and neither the store nor the next call suffers."""
    target = np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8)

    def land(i: int, page: PageBuffer) -> None:
        if i == failing:
            raise ValueError(f"no room for page {i}")
        target[i] = page

    with pytest.raises(ValueError, match=f"no room for page {failing}"):
        tier.read(NAMES, PAGE_BYTES, land)
    target[:] = 255
    before = target.copy()
    kept = np.zeros_like(target)
    assert all(tier.read(NAMES, PAGE_BYTES, lambda i, page: np.copyto(kept[i], page)))
    assert np.array_equal(kept, np.arange(NUM_PAGES, dtype=np.uint8)[:, None].repeat(PAGE_BYTES, 1))
    assert np.array_equal(target, before)
