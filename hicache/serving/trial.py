"""A trial run of a model: two sequences served over a small engine, against the model's own plain forward.

The passes are those of the runner (`PoolForward`), so a trial sees the strides, masks and paddings that requests will.

    short   7 tokens in three pieces: one, many and one again, then one alone and two in a batch
    long    beyond every bound that the configuration names, in two pieces, then two in the same batch

May import torch, the engine's factory and what stands below it, and its own package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.config import EngineConfig
from hicache.engine import CacheEngine, CacheRequest
from hicache.errors import UnsupportedModel
from hicache.factory import build_engine
from hicache.layout import ModelGeometry
from hicache.serving.forward import PoolForward

_SHORT_ENDS = (1, 2, 6, 7)
_NUM_DECODED = 3
_LEAST_LONG = 20
# A sliding window beyond this is cut down for the trial; other bounds cannot be, and are exceeded up to a limit.
_MAX_WINDOW, _CUT_WINDOW = 64, 3
_MAX_BOUND = 4096
_BOUND = re.compile(r"window|chunk|block|local|keep|sparse|stride|span|topk")
_NO_BOUND = re.compile(r"^num_|^max_window_layers$|experts")


@contextmanager
def cut_window(config: Any) -> Iterator[None]:
    """Have a model whose sliding window is long look back on a few tokens."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window <= _MAX_WINDOW:
        yield
        return
    config.sliding_window = _CUT_WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def trial_length(config: Any) -> int:
    """Tokens of a sequence that leaves behind whatever `config` may bound a layer's view by, as far as positions go.

    To be asked while the sliding window is cut. Raises UnsupportedModel where the sequence would be too long to try.
    """
    bounds = {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 1 and _BOUND.search(name) and not _NO_BOUND.search(name)
    }
    positions = getattr(config, "max_position_embeddings", None)
    most = positions - _NUM_DECODED if isinstance(positions, int) and positions > 0 else 1 << 30
    reached = {name: value for name, value in bounds.items() if value < most}
    for name, value in reached.items():
        if value > _MAX_BOUND:
            raise UnsupportedModel(
                f"{type(config).__name__} has {name}={value}, and no trial of more than {_MAX_BOUND} tokens is made to "
                "see what layers do beyond it"
            )
    longest = max(reached.values(), default=0)
    return min(most, max(_LEAST_LONG, longest + longest // 2 + 1))


def lookahead_difference(model: Any, num_tokens: int) -> float:
    """By how much tokens that come later change the logits of those before them, in the logits' spread."""
    tokens = _tokens(model, num_tokens, step=3)
    half = num_tokens // 2
    return relative_difference(plain_logits(model, tokens[:half])[-1], plain_logits(model, tokens)[half - 1])


def numbering_difference(model: Any) -> float:
    """By how much logits change when tokens are said to be at 0, 1, 2, ..., in the logits' spread."""
    tokens = _tokens(model, _SHORT_ENDS[-1], step=1)
    ids = torch.arange(len(tokens), device=model.device)[None]
    return relative_difference(plain_logits(model, tokens, position_ids=ids)[-1], plain_logits(model, tokens)[-1])


def served_difference(model: Any, geometry: ModelGeometry, num_tokens: int) -> float:
    """By how much the logits of served requests differ from plain forwards, the longest of `num_tokens` and a few."""
    short = _tokens(model, _SHORT_ENDS[-1] + _NUM_DECODED, step=1)
    long = _tokens(model, num_tokens + _NUM_DECODED - 1, step=3)
    with _small_engine(model, geometry, len(short) + len(long)) as engine:
        served = _serve(PoolForward(model, engine.pool, engine.req_to_token, geometry), engine, short, long)
    plain = {"short": plain_logits(model, short), "long": plain_logits(model, long)}
    return max(relative_difference(logits, plain[name][position]) for name, position, logits in served)


@torch.inference_mode()
def plain_logits(model: Any, tokens: npt.NDArray[np.int64], **arguments: torch.Tensor) -> torch.Tensor:
    """float32 [len, vocab] of one forward without any cache."""
    ids = torch.from_numpy(tokens).to(model.device)[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **arguments).logits[0]
    return logits.float()


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the expected logits' spread; infinite where one is no number."""
    largest = (logits - expected).abs().max() / expected.std().clamp_min(1e-6)
    return float(largest.nan_to_num(nan=float("inf")))


def _serve(
    forward: PoolForward, engine: CacheEngine, short: npt.NDArray[np.int64], long: npt.NDArray[np.int64]
) -> list[tuple[str, int, torch.Tensor]]:
    """Logits that the passes gave: of which sequence, of which of its tokens."""
    served: list[tuple[str, int, torch.Tensor]] = []
    leases = []
    for name, tokens, ends in (
        ("short", short, _SHORT_ENDS),
        ("long", long, ((len(long) - _NUM_DECODED + 1) // 2, len(long) - _NUM_DECODED + 1)),
    ):
        lease, start = engine.acquire(CacheRequest(name, tokens[: ends[-1]])), 0
        leases.append(lease)
        for end in ends:
            served.append((name, end - 1, forward.prefill(lease.row, tokens, start, end)))
            start = end
    lengths = [lease.length for lease in leases]
    for rows in ([0], [0, 1], [0, 1]):
        for row in rows:
            engine.extend(leases[row], 1)
            lengths[row] += 1
        last = [int((short, long)[row][lengths[row] - 1]) for row in rows]
        logits = forward.decode([leases[row].row for row in rows], [lengths[row] for row in rows], last)
        served.extend((("short", "long")[row], lengths[row] - 1, logits[at]) for at, row in enumerate(rows))
    for lease in leases:
        engine.release(lease)
    return served


def _small_engine(model: Any, geometry: ModelGeometry, num_tokens: int) -> CacheEngine:
    """Room for `num_tokens` in the model's dtype, with nothing below the device."""
    num_tokens += 2 * (geometry.window + 1)  # what the engine keeps free beside a window
    return build_engine(
        EngineConfig(
            device_tokens=num_tokens,
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
