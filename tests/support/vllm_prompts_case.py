"""A vLLM scheduler with a small GPU cache and CPU tier, which answers one prompt after the other."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from vllm_scheduler_case import BLOCK_TOKENS, CHUNK_BYTES, VOCABULARY, Engine, answer_to

CONNECTORS = ["HiCacheConnector", "OffloadingConnector"]
OF_SPEC = {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}
NUM_CHUNKS = 40  # chunks of the CPU tier
PROMPT_CHUNKS = 8
GPU_BLOCKS = 12
COMPLETE = PROMPT_CHUNKS * BLOCK_TOKENS  # tokens of the complete chunks of a prompt


class Server:
    """Answer one prompt after the other, and compare the answers with those without a cache."""

    def __init__(self, folder: Path, connector: str, **extra: Any) -> None:
        given = {"cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES, "kv_packing": "off", **extra}
        if connector == "OffloadingConnector":
            given |= OF_SPEC
        self.engine = Engine(
            folder, given, connector=connector, is_async=False, num_blocks=GPU_BLOCKS, max_num_batched_tokens=512
        )
        self.policy = self.engine.connector.manager.primary_tier._policy
        self._names = itertools.count()

    def ask(self, prompt: list[int], of_request: dict[str, Any] | None = None, **given: Any) -> int:
        """Answer a prompt; returns the number of its cached tokens. `given`: its hints. `of_request`: more arguments of
        vLLM's `Request`."""
        name, before = f"request-{next(self._names)}", self.engine.num_cached
        params = {"hicache": given} if given else None
        self.engine.ask(name, prompt, 2, kv_transfer_params=params, **(of_request or {}))
        self.engine.finish()
        assert self.engine.answers[name] == answer_to(prompt, 2)
        assert not self.policy._order.violations()
        return self.engine.num_cached - before

    def ask_others(self, num: int) -> None:
        """Answer `num` other prompts, each of them once."""
        for _ in range(num):
            self.ask(prompt_of(10_000 + next(self._names)))

    def reset(self) -> None:
        """Empty the GPU cache and the CPU tier."""
        assert self.engine.scheduler.reset_prefix_cache(reset_connector=True)
        self.engine.finish()


def prompt_of(seed: int, num_chunks: int = PROMPT_CHUNKS, beginning: list[int] | None = None) -> list[int]:
    """A prompt that begins with `beginning` and has `num_chunks` complete chunks and one more token."""
    num = num_chunks * BLOCK_TOKENS + 1 - len(beginning or ())
    return [*(beginning or ()), *random.Random(seed).choices(range(3, VOCABULARY), k=num)]
