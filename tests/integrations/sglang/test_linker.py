"""The linker under SGLang's own tree, allocators and device pools, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang

if sglang.__version__ != "0.5.23":
    pytest.skip("the linker interface begins with 0.5.23", allow_module_level=True)

from sglang_linker_case import CONFIGS, LinkerCase

Make = Callable[..., LinkerCase]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    cases: list[LinkerCase] = []

    def build(name: str, **settings: Any) -> LinkerCase:
        cases.append(LinkerCase(CONFIGS[name], tmp_path / "store", **settings))
        return cases[-1]

    yield build
    for case in cases:
        case.linker.check()
        case.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_offloaded_comes_back_layer_by_layer(make: Make, name: str) -> None:
    """Pages that left the device, and then the host too, are restored with the bytes that they had, in every layer."""
    case = make(name)
    prompt = case._make_seq(0, 8)
    case.insert(prompt)
    case.settle()
    for tier in ("host", "disk"):
        case.evict()
        if tier == "disk":
            case.cache.reset()
        admitted = case.admit(prompt)
        assert len(admitted.loaded) == len(prompt), tier
        wrong, failed = case.forward([admitted])
        assert (wrong, failed) == ([], []), tier
        case.end(admitted)
        case.settle()
        case.linker.check()
