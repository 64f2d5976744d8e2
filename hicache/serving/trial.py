"""A trial of a model, which serves two sequences with a small engine and compares the logits with forwards without a
cache.

The trial uses `ModelRunner`, so its passes have the same strides, masks and padding as passes of real requests.

    short   7 tokens in chunks of one, several and one token; then decoded in a pass with a chunk of the other, and in a
            batch of two twice
    long    a sequence longer than every bound in the configuration, in two chunks; then decoded in the same batches
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.build.factory import build_engine
from hicache.config import EngineConfig
from hicache.engine import CacheEngine, CacheRequest
from hicache.errors import UnsupportedModel
from hicache.layout import ModelGeometry
from hicache.serving.attention import Attention
from hicache.serving.positions import position_limit
from hicache.serving.runner import Chunk, ModelRunner

_SHORT_ENDS = (1, 2, 6, 7)  # ends of the chunks of the short sequence
_NUM_DECODED = 3
_MIN_LONG = 20  # minimum tokens of the long sequence
# During the trial, sliding windows and chunks of more than `_MAX_WINDOW` tokens are replaced by `_TRIAL_WINDOW` tokens.
# Other bounds cannot be replaced, so the long sequence is longer than these bounds, but at most `_MAX_BOUND` tokens.
_MAX_WINDOW, _TRIAL_WINDOW = 64, 3
_MAX_BOUND = 4096
_BOUND = re.compile(r"window|chunk|block|local|keep|sparse|stride|span|topk")
_NO_BOUND = re.compile(r"^num_|^max_window_layers$|experts")


@contextmanager
def short_window(config: Any) -> Iterator[None]:
    """Replace a sliding window or attention chunk of more than 64 tokens by 3 tokens within the `with` block."""
    with ExitStack() as stack:
        for name in ("sliding_window", "attention_chunk_size"):
            size = getattr(config, name, None)
            if isinstance(size, int) and size > _MAX_WINDOW:
                setattr(config, name, _TRIAL_WINDOW)
                stack.callback(setattr, config, name, size)
        yield


def trial_length(config: Any) -> int:
    """Return a sequence length that exceeds every limit of a layer's attention, if the model has enough positions.

    Callers use it within `short_window`. Raises UnsupportedModel if the sequence would be too long for a trial.
    """
    bounds = {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 1 and _BOUND.search(name) and not _NO_BOUND.search(name)
    }
    positions = position_limit(config)
    max_len = positions - _NUM_DECODED if positions else 1 << 30
    reachable = {name: value for name, value in bounds.items() if value < max_len}
    for name, value in reachable.items():
        if value > _MAX_BOUND:
            raise UnsupportedModel(
                f"{type(config).__name__} has {name}={value}, and a trial has at most {_MAX_BOUND} tokens, too few to "
                "see what layers do beyond it"
            )
    longest = max(reachable.values(), default=0)
    return min(max_len, max(_MIN_LONG, longest + longest // 2 + 1))


class Trial:
    """Compares passes of the runner with forwards of `model` without a cache. The constructor runs these forwards for
    two sequences: a short one, and a long one with a few more than `num_tokens` tokens.

    A difference is the maximum difference of logits, relative to their standard deviation.
    """

    def __init__(self, model: Any, num_tokens: int) -> None:
        self._model = model
        self._sequences = [
            _tokens(model, _SHORT_ENDS[-1] + _NUM_DECODED, step=1),
            _tokens(model, num_tokens + _NUM_DECODED - 1, step=3),
        ]
        self._plain = [plain_logits(model, tokens) for tokens in self._sequences]

    def lookahead_difference(self) -> float:
        """Return how much the logits of earlier tokens change if later tokens are added."""
        long, half = self._sequences[1], len(self._sequences[1]) // 2
        return relative_difference(plain_logits(self._model, long[:half])[-1], self._plain[1][half - 1])

    def numbering_difference(self) -> float:
        """Return how much the logits change if the forward gets explicit positions 0, 1, 2, ...."""
        short = self._sequences[0]
        ids = torch.arange(len(short), device=self._model.device)[None]
        return relative_difference(plain_logits(self._model, short, position_ids=ids)[-1], self._plain[0][-1])

    def served_difference(self, geometry: ModelGeometry, attention: Attention) -> float:
        """Return the difference between the logits of the served sequences and the logits of forwards without a
        cache."""
        num_tokens = sum(len(tokens) for tokens in self._sequences)
        with _small_engine(self._model, geometry, num_tokens) as engine:
            runner = ModelRunner(self._model, engine, geometry, attention=attention, use_graphs=False)
            served = self._serve(runner, engine)
        return max(relative_difference(logits, self._plain[i][position]) for i, position, logits in served)

    def _serve(self, runner: ModelRunner, engine: CacheEngine) -> list[tuple[int, int, torch.Tensor]]:
        """Serve both sequences. Returns (index of the sequence, position, logits) for each pass and sequence."""
        served: list[tuple[int, int, torch.Tensor]] = []
        long_end = len(self._sequences[1]) - _NUM_DECODED + 1
        ends = (_SHORT_ENDS, ((long_end + 1) // 2, long_end))
        leases = [engine.acquire(CacheRequest(str(i), self._sequences[i][: ends[i][-1]])) for i in (0, 1)]

        def run(*parts: tuple[int, int, int]) -> None:
            """Run one pass over tokens [start, end) of sequences, given as (index, start, end)."""
            for i, _, end in parts:
                if end > leases[i].length:
                    engine.extend(leases[i], end - leases[i].length)
            logits = runner.forward([Chunk(leases[i], self._sequences[i], *part) for i, *part in parts])
            served.extend((i, end - 1, row) for (i, _, end), row in zip(parts, logits, strict=True))

        for start, end in zip((0, *_SHORT_ENDS), _SHORT_ENDS, strict=False):
            run((0, start, end))
        short_end, middle = _SHORT_ENDS[-1], ends[1][0]
        run((1, 0, middle))
        run((0, short_end, short_end + 1), (1, middle, long_end))
        for step in (0, 1):
            run((0, short_end + 1 + step, short_end + 2 + step), (1, long_end + step, long_end + step + 1))
        for lease in leases:
            engine.release(lease)
        return served


@torch.inference_mode()
def plain_logits(model: Any, tokens: npt.NDArray[np.int64], **arguments: torch.Tensor) -> torch.Tensor:
    """Return the logits, float32 [len, vocab], of one forward pass without a cache."""
    ids = torch.from_numpy(tokens).to(model.device)[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **arguments).logits[0]
    return logits.float()


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the maximum difference divided by the standard deviation of `expected`; infinite if a logit is NaN."""
    largest = (logits - expected).abs().max() / expected.std().clamp_min(1e-6)
    return float(largest.nan_to_num(nan=float("inf")))


def _small_engine(model: Any, geometry: ModelGeometry, num_tokens: int) -> CacheEngine:
    """Create an engine with capacity for `num_tokens` in the model's dtype and no host or disk tier."""
    num_tokens += 2 * (geometry.window + 1)  # slots that the engine reserves for windows
    return build_engine(
        EngineConfig(
            device_tokens=num_tokens,
            host_bytes=0,
            page_size=1,
            host_page_size=1,
            max_requests=2,
            max_context_len=num_tokens,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
        ),
        geometry,
    )


def _tokens(model: Any, num_tokens: int, step: int) -> npt.NDArray[np.int64]:
    vocab_size = int(model.config.get_text_config().vocab_size)
    return (np.arange(num_tokens, dtype=np.int64) * step + step) % vocab_size
