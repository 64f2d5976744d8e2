"""Without SGLang the tests of this folder are not collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

# This folder itself is found as a package of that name, without the module asked for.
if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang").origin is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import sglang_on_cpu

    sglang_on_cpu.prepare()


@pytest.fixture(autouse=True)
def nothing_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """SGLang's threads log what a backend raises, and go on: no test passes over it."""
    yield
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.name.startswith("sglang") and record.exc_info] == []
