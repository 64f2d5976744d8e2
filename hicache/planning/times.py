"""Compares the time to load a prefix with the time to compute it, for each length of the prefix.

    compute   max(flops / (GPUs * flops_per_s * share), chunks * weights of a GPU / memory_bytes_per_s)
    load      bytes of a GPU's rows / link_bytes_per_s
    disk      max(load, bytes of all GPUs' rows / disk_bytes_per_s)

n tokens have `full * n + window * min(n, window tokens) + state` bytes. If pages on the host and the disk are packed,
these are the bytes of packed pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.build.sizing import RowBytes
from hicache.planning.gpus import Gpu
from hicache.planning.memory import MemoryPlan
from hicache.planning.presets import PlannedModel

# The share of an H200's peak FLOP/s that prefill of an 8B model reaches (docs/all_results.md: 23 400 tokens/s over 32k
# tokens).
COMPUTE_SHARE = 0.55
_MAX_TOKENS = 1 << 20
_MIN_TOKENS = 1 << 10


@dataclass(frozen=True)
class LengthTimes:
    """The seconds to compute a prefix of `num_tokens` tokens (`compute_s`), to load it from the host (`load_s`), and to
    load it from the disk (`disk_s`). A time is None if a rate is unknown. `num_bytes`: bytes of the prefix on all
    GPUs."""

    num_tokens: int
    num_bytes: int
    compute_s: float | None
    load_s: float | None
    disk_s: float | None


@dataclass(frozen=True)
class Machine:
    """The rates of a machine with `num_gpus` equal GPUs. `compute_share`: share of the peak FLOP/s that prefill
    reaches, in (0, 1]. A rate of 0 is unknown."""

    gpu: Gpu
    num_gpus: int
    disk_bytes_per_s: float
    compute_share: float = COMPUTE_SHARE


class Times:
    """The times of one plan, for any prefix length."""

    def __init__(self, model: PlannedModel, plan: MemoryPlan, machine: Machine) -> None:
        self._model = model
        self._plan = plan
        self._machine = machine
        self._longest = max(_MIN_TOKENS, min(model.max_context_len, _MAX_TOKENS))

    def at(self, num_tokens: int) -> LengthTimes:
        gpus, num_bytes = self._machine.num_gpus, self._bytes(self._plan.rows, num_tokens)
        moved_bytes = self._bytes(self._plan.moved, num_tokens)
        load_s = _over(moved_bytes, self._machine.gpu.link_bytes_per_s)
        read_s = _over(moved_bytes * gpus, self._machine.disk_bytes_per_s)
        disk_s = None if load_s is None or read_s is None else max(load_s, read_s)
        return LengthTimes(num_tokens, num_bytes * gpus, self._compute_s(num_tokens), load_s, disk_s)

    def table(self) -> tuple[LengthTimes, ...]:
        """Return the times of prefixes of 1024, 2048, 4096, ... tokens, and of the longest context, which has at most
        1048576 tokens."""
        lengths = [_MIN_TOKENS << step for step in range(_MAX_TOKENS.bit_length())]
        return tuple(self.at(n) for n in [*(n for n in lengths if n < self._longest), self._longest])

    def break_even(self, seconds: Callable[[LengthTimes], float | None]) -> int | None:
        """Return the length from which on loading a prefix takes no longer than computing it, in tokens, as a multiple
        of the host page. Returns None if loading takes longer even at the longest context, or if a rate is unknown.
        `seconds`: returns the time of the load, `load_s` or `disk_s`, of the given `LengthTimes`."""
        page = self._plan.config.host_page_size
        found = None
        for num_tokens in range(self._longest // page * page, 0, -page):
            times = self.at(num_tokens)
            load_s, compute_s = seconds(times), times.compute_s
            if load_s is None or compute_s is None or load_s > compute_s:
                break
            found = num_tokens
        return found

    def _bytes(self, rows: RowBytes, num_tokens: int) -> int:
        """Return the bytes that one GPU stores for a prefix of `num_tokens`."""
        return rows.full * num_tokens + rows.window * min(num_tokens, self._model.geometry.window) + rows.state

    def _compute_s(self, num_tokens: int) -> float | None:
        gpu, plan = self._machine.gpu, self._plan
        flops_s = _over(
            self._model.work.flops(num_tokens), self._machine.num_gpus * gpu.flops_per_s * self._machine.compute_share
        )
        chunks = -(-num_tokens // plan.config.prefill_chunk_tokens)
        weights_s = _over(chunks * plan.weight_bytes, gpu.memory_bytes_per_s)
        return flops_s if flops_s is None or weights_s is None else max(flops_s, weights_s)


def _over(amount: float, rate: float) -> float | None:
    return amount / rate if rate else None
