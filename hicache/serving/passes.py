"""Types for both kinds of forward passes (`slot_passes`, `padded_passes`): chunks to compute, and the context of a
pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.engine import Lease
from hicache.layout import ModelGeometry
from hicache.serving.cache import cache_keyword


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of one request to compute in the next pass: a part of its prompt, or its last generated
    token. `tokens`: int64 [at least end], the request's sequence. `lease` has slots for [0, end). The pass returns
    logits for the last `num_logits` tokens of the chunk, at least one."""

    lease: Lease
    tokens: npt.NDArray[np.int64]
    start: int
    end: int
    num_logits: int = 1

    @property
    def is_decode(self) -> bool:
        """Return whether the chunk is one token at the end of its sequence: the last generated token, or the only
        uncached token of a prompt."""
        return self.end == self.start + 1 == self.lease.length


class ForwardEngine(Protocol):
    """The methods of an engine that the runner uses."""

    @property
    def pool(self) -> KVCache: ...

    @property
    def req_to_token(self) -> ReqToTokenPool: ...

    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """Announce that the next pass is for `leases`, so that its layers wait for the loads of these leases."""
        ...


@dataclass(frozen=True)
class PassContext:
    """The context of passes: a model, its geometry and an engine that was built for the model."""

    model: Any
    engine: ForwardEngine
    geometry: ModelGeometry

    @property
    def pool(self) -> KVCache:
        return self.engine.pool

    @property
    def table(self) -> torch.Tensor:
        """The slots of every request's tokens, int32 [requests, max_context_len]."""
        return self.engine.req_to_token.req_to_token

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @cached_property
    def states(self) -> HybridReqToTokenPool | None:
        """The pool of recurrent states. Returns None if the model has none."""
        requests = self.engine.req_to_token
        return requests if isinstance(requests, HybridReqToTokenPool) else None

    @cached_property
    def cache_keyword(self) -> str:
        """The name of the model's argument that takes the cache."""
        name = cache_keyword(self.model)
        assert name is not None, "models that take no cache are refused"
        return name

    @cached_property
    def takes_logits_to_keep(self) -> bool:
        """Return whether the model accepts the number of tokens for which to compute logits."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters


class Passes(Protocol):
    """Computes chunks. The two implementations are passes over slots and passes over padded sequences."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute and store KV of `chunks`. Returns float32 logits [sum of `num_logits`, vocab], in the order of the
        chunks."""
        ...
