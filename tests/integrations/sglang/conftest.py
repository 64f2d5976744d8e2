"""The tests of this folder are only collected if SGLang is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

# Python may find this folder as a package named sglang; unlike the real package it has no origin.
if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang").origin is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import sglang_on_cpu

    sglang_on_cpu.prepare()


@pytest.fixture(autouse=True)
def nothing_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test if SGLang's threads have logged an exception: they log what a backend raises, and continue."""
    yield
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.name.startswith("sglang") and record.exc_info] == []
