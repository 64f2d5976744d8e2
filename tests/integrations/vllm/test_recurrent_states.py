"""Stores of models with recurrent layers, with the scheduler of vLLM's connector."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from hicache.integrations.vllm import HiCacheOffloadingSpec
from hicache.integrations.vllm.recurrent_states import INIT
from vllm_offload_case import BLOCK_TOKENS, Cache, offloading_config

HYBRID = Cache(widths=(4096,), groups=((0,), (0,)))


@pytest.fixture(autouse=True)
def own_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore vLLM's own constructor before and after a test."""
    monkeypatch.setattr(OffloadingConnectorScheduler, "__init__", INIT)


def stores_of(folder: Path, states: torch.dtype) -> set[str]:
    """Start and end a server whose states have this dtype; returns the names of the stores in `folder`."""
    extra = {"cpu_bytes_to_use": 8 * HYBRID.chunk_bytes, "disk": {"path": str(folder), "budget": "64MB"}}
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    shapes, dtypes = ((3, 16), (2, 8, 8)), (torch.bfloat16, states)
    recurrent = MambaSpec(block_size=BLOCK_TOKENS, shapes=shapes, dtypes=dtypes, page_size_padded=4096)
    groups = [KVCacheGroupSpec(["layers.0.0.attn"], attention), KVCacheGroupSpec(["layers.1.0.mixer"], recurrent)]
    spec = HiCacheOffloadingSpec(offloading_config(HYBRID, extra))
    scheduler = OffloadingConnectorScheduler(spec, VllmConfig(), KVCacheConfig(HYBRID.num_blocks, [], groups))
    scheduler.shutdown()
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.smoke
def test_states_of_other_dtypes_have_a_store_of_their_own(tmp_path: Path) -> None:
    """States of each dtype have their own store. vLLM pads states to the size of an attention block, so the chunks of
    all dtypes have equal sizes. A server with the dtype of an earlier one uses the same store."""
    found = [stores_of(tmp_path, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32)]
    assert [len(stores) for stores in found] == [1, 2, 3, 3]
