"""Prompts with equal tokens but different adapters, images or salts share no chunk, by vLLM's own hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from vllm_prompts_case import BLOCK_TOKENS, COMPLETE, CONNECTORS, PROMPT_CHUNKS, prompt_of
from vllm_tier_case import scheduler

PROMPT = prompt_of(1)


def image(identifier: str, offset: int) -> dict[str, Any]:
    """An image of 20 tokens."""
    place = PlaceholderRange(offset=offset, length=20)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


ADAPTERS: list[dict[str, Any]] = [
    {},
    {"lora_request": LoRARequest("sql", 1, "/adapters/sql")},
    {"lora_request": LoRARequest("sql", 2, "/adapters/sql-2")},
    {"lora_request": LoRARequest("chat", 3, "/adapters/chat")},
    {"cache_salt": "tenant"},
]
IMAGES: list[dict[str, Any]] = [
    image("a", 0),
    image("b", 0),
    image("a", 8),
    {**image("a", 0), "lora_request": LoRARequest("sql", 1, "/adapters/sql")},
]


@pytest.mark.smoke
def test_the_names_of_their_chunks_differ_in_cpu_memory_and_on_disk(tmp_path: Path) -> None:
    """The names of all chunks from the one with the image on differ. Equal requests have equal names."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def keys_of(given: dict[str, Any]) -> list[bytes]:
        request = Request("request", PROMPT, SamplingParams(), None, block_hasher=hasher, **given)
        return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]

    requests = [*ADAPTERS, *IMAGES]
    found = [keys_of(given) for given in requests]
    assert found == [keys_of(given) for given in requests]
    keys = [key for of_request in found for key in of_request]
    assert len({*keys}) == len(keys) == len(requests) * PROMPT_CHUNKS
    with scheduler(tmp_path) as server:
        assert len({*server.tiers[0]._server.keys(keys)}) == len(keys)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_prompt_finds_the_chunks_of_its_own_adapter_alone(
    servers: Any, connector: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same tokens with each adapter and salt are computed once. After a reset each prompt finds its own chunks on
    the disk."""
    disk = {"path": str(tmp_path_factory.mktemp("disk")), "prefill_tokens_per_s": 0}
    server = servers(connector, disk=disk)
    assert [server.ask(PROMPT, given) for given in ADAPTERS] == [0] * len(ADAPTERS)
    server.reset()
    [tier] = server.engine.connector.manager.secondary_tiers
    assert tier._backend.stats().puts == len(ADAPTERS) * PROMPT_CHUNKS
    assert [server.ask(PROMPT, given) for given in ADAPTERS] == [COMPLETE] * len(ADAPTERS)
