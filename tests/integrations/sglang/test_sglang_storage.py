"""SGLang's own controller and storage threads over our backend: bytes come back, faults are misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_case import Case, Server, tokens

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("v1", [False, True], ids=["generic", "v1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_after_a_restart(tmp_path: Path, layout: str, v1: bool, mla: bool) -> None:
    """Byte by byte, up to the first page that was not stored; more pages than one batch of SGLang's has."""
    case = Case(tmp_path, layout, v1, mla, page_size=1 if layout == "layer_first" else 8)
    num_pages = 140 if case.page_size == 1 else 20
    with Server(case) as first:
        stored, num_tokens = first.backup(tokens(num_pages, case))
        assert num_tokens == num_pages * case.page_size
        assert first.prefetch(tokens(num_pages, case)) == stored
    with Server(case) as second:
        assert second.prefetch(tokens(num_pages + 2, case)) == stored
        assert second.prefetch(tokens(num_pages, case, first=9000)) == []
        assert not second.backend.failures
