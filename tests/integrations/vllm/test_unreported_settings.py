"""Stores of models whose settings vLLM does not report to a spec, with the scheduler of vLLM's connector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from hicache.integrations.vllm import HiCacheOffloadingSpec
from hicache.integrations.vllm.unreported_settings import INIT, ModelFiles, model_files, model_settings
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


@pytest.mark.smoke
def test_settings_of_the_model_that_decide_keys_and_values_name_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers have equal settings only if revision, configuration with its overrides, attention backend and draft
    model are equal. Other settings, and another path of the same model, change nothing. The files of the models are
    those that vLLM loads: of the revision, in the download directory, and of the draft model."""
    monkeypatch.chdir(tmp_path)  # vLLM runs `python -m`, which would import the checkout's folder hicache
    for name in ("model", "copy", "draft"):
        config = LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=64,
            num_hidden_layers=1 + (name == "draft"),
            num_attention_heads=2,
            vocab_size=64,
        )
        config.save_pretrained(tmp_path / name)

    def config(name: str = "model", **changes: Any) -> VllmConfig:
        arguments = EngineArgs(str(tmp_path / name), skip_tokenizer_init=True, max_model_len=64, dtype="float32")
        return replace(arguments, **changes).create_engine_config()

    def settings(name: str = "model", **changes: Any) -> str:
        return model_settings(config(name, **changes))

    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    draft = {"model": str(tmp_path / "draft"), "method": "draft_model", "num_speculative_tokens": 1}
    others = [
        {"revision": "a"},
        {"code_revision": "a"},
        {"hf_overrides": {"rope_parameters": rope}},
        {"hf_overrides": {"rope_parameters": rope | {"factor": 4.0}}},
        {"attention_backend": "TRITON_ATTN"},
        {"speculative_config": draft},
    ]
    found = [settings(), *(settings(**changes) for changes in others)]
    assert len({*found}) == len(found)
    assert settings("copy") == settings(max_num_seqs=3, seed=7) == found[0] != ""
    assert model_settings(VllmConfig()) == ""
    model, draft_model = str(tmp_path / "model"), str(tmp_path / "draft")
    assert model_files(config()) == (ModelFiles(model),)
    assert model_files(config(revision="a", download_dir="b", speculative_config=draft)) == (
        ModelFiles(model, "a", "b"),
        ModelFiles(draft_model, None, "b"),
    )
    assert model_files(VllmConfig()) == ()
