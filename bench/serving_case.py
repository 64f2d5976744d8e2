"""Helpers of the benchmark `serving`: a random model of 8B geometry, engines for this model, and timed requests.

May import torch, transformers and hicache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache import EngineConfig, ModelGeometry, build_engine
from hicache.engine import CacheEngine, CacheRequest
from hicache.serving import ModelRunner, Request, Scheduler
from hicache.serving.request import RequestOutput
from hicache.storage import PageStore

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ServedModel:
    """A model with random weights, and the geometry of its cache."""

    model: Any
    geometry: ModelGeometry
    vocab: int

    @property
    def token_bytes(self) -> int:
        geometry, dtype = self.geometry, self.geometry.dtype
        assert dtype is not None
        return geometry.layer_num * 2 * geometry.head_num * geometry.head_dim * dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """The bytes of the weights that a pass reads completely. The embedding does not count, because a pass reads
        only one row of it for each token."""
        weights = sum(weight.nbytes for weight in self.model.parameters())
        return int(weights - self.model.get_input_embeddings().weight.nbytes)


def random_llama(device: torch.device) -> ServedModel:
    """Build a random model: 8B geometry in bfloat16 on CUDA, a tiny model in float32 elsewhere."""
    tiny = device.type != "cuda"
    config = LlamaConfig(
        vocab_size=512 if tiny else 128256,
        hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 14336,
        num_hidden_layers=2 if tiny else 32,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=1 << 18,
        rope_theta=500_000.0,
        attn_implementation="sdpa",
        eos_token_id=None,
    )
    dtype = torch.float32 if tiny else torch.bfloat16
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    geometry = ModelGeometry(
        layer_num=config.num_hidden_layers,
        head_num=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    return ServedModel(model.eval(), geometry, int(config.vocab_size))


@dataclass
class Served:
    """An engine and its runner. Creates schedulers for both."""

    served: ServedModel
    engine: CacheEngine
    runner: ModelRunner
    chunk_tokens: int

    def scheduler(self, max_running: int = 32, **settings: Any) -> Scheduler:
        return Scheduler(self.engine, self.runner, chunk_tokens=self.chunk_tokens, max_running=max_running, **settings)

    def first_token_s(self, request_id: str, tokens: Tokens, namespace: str = "") -> tuple[float, RequestOutput]:
        """Return the seconds from the submission of a request to its first token, and its output."""
        scheduler = self.scheduler()
        sync(self.engine.pool.device)
        start = time.perf_counter()
        scheduler.submit(Request(request_id, tokens, 1, namespace=namespace))
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = scheduler.step()
        elapsed = time.perf_counter() - start
        if outputs[0].error is not None:
            raise outputs[0].error
        return elapsed, outputs[0]

    def clear_device(self) -> None:
        """Evict all pages from the device tier. To do so, a request takes all slots and releases them unused."""
        self.engine.flush()
        page = self.engine.page_size
        free = self.engine.pool.size // page * page
        lease = self.engine.acquire(CacheRequest("evict", np.zeros(free, dtype=np.int64), namespace="evict"))
        self.engine.release(lease)


@contextmanager
def serving(
    served: ServedModel,
    *,
    chunk_tokens: int,
    compiled: bool = False,
    store: PageStore | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Build an engine with `settings` for the model, and a runner. `store`: page store to use as the disk tier."""
    defaults: dict[str, Any] = {
        "page_size": 16,
        "host_bytes": 0,
        "max_requests": 64,
        "device": str(served.model.device),
        "model_id": "serving bench",
    }
    config = EngineConfig.from_dict({**defaults, **settings})
    with build_engine(config, served.geometry, store=store) as engine:
        runner = ModelRunner(served.model, engine, served.geometry, compiled=compiled)
        yield Served(served, engine, runner, chunk_tokens)


def prompts(num: int, length: int, vocab: int, seed: int) -> Sequence[Tokens]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length, dtype=np.int64) for _ in range(num)]


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
