"""The linker on a GPU: pinned pages, copy engine and streams, under SGLang's own tree, allocators and device pools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang")
if sglang.__version__ != "0.5.23":
    pytest.skip("0.5.17 has no linker interface", allow_module_level=True)

from sglang_linker_case import CONFIGS, LinkerCase  # noqa: E402

pytestmark = pytest.mark.gpu
PAGE = 64
LARGE = {"page_size": PAGE, "kv_size": 8192, "max_context_len": 4096, "num_layers": 8, "head_num": 8, "head_dim": 128}
SETTINGS = {"host_bytes": "1GiB", "budget": "2GiB"}


def build(name: str, store: Path) -> LinkerCase:
    cfg = dataclasses.replace(CONFIGS[name], **LARGE)
    if cfg.sliding_window_size:
        cfg = dataclasses.replace(cfg, sliding_window_size=2 * PAGE)
    return LinkerCase(cfg, store, "cuda", **SETTINGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_survive_offload_and_load(name: str, tmp_path: Path) -> None:
    """What forwards on a stream of their own wrote comes back layer by layer, from host, disk and a restart: the
    offload waits for the forward that writes, the forward that reads for each layer of the load."""
    case = build(name, tmp_path / "store")
    prompts = [[*case._make_seq(0, 4), *case._make_seq(10_000 * i, 3 * i)] for i in (1, 2, 3)]
    for prompt in prompts:
        case.insert(prompt)
    case.settle()
    for source in ("host", "disk", "restart"):
        case.evict()
        if source == "disk":
            case.cache.reset()
        elif source == "restart":
            case.close()
            case = build(name, tmp_path / "store")
        batch = [case.admit(prompt) for prompt in prompts]
        assert [each.covered for each in batch] == prompts, source
        assert case.forward(batch) == ([], []), source
        for each in batch:
            case.end(each)
        case.settle()
        case.linker.check()
    case.close()
    assert case.linker.stats["faults"] == 0
