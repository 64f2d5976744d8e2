"""What captured passes need that a CPU can show: which loads a replay waits for."""

from __future__ import annotations

import pytest

from hicache.config import EngineConfig
from hicache.factory import build_engine
from hicache.layout import LayerKind, ModelGeometry
from hicache.serving.graphs import last_layers

WINDOW, FULL = "window", "full"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((FULL, FULL, FULL), {2}),
        ((WINDOW, FULL, WINDOW, WINDOW, FULL), {3, 4}),
        ((FULL, WINDOW, FULL, WINDOW), {2, 3}),
        # The pool keeps the first layer whole: its load is one of full attention.
        ((WINDOW, WINDOW, WINDOW), {0, 2}),
    ],
)
def test_a_replay_waits_for_the_last_layer_of_each_load(kinds: tuple[LayerKind, ...], expected: set[int]) -> None:
    """One layer for full attention and one for windows, whichever layers the pool stores with either."""
    window = 8 if WINDOW in kinds else 0
    geometry = ModelGeometry(len(kinds), 1, 16, layer_kinds=kinds, window=window)
    config = EngineConfig(device_tokens=256, host_bytes=0, max_context_len=64, dtype="float32", device="cpu")
    with build_engine(config, geometry) as engine:
        assert set(last_layers(engine.pool)) == expected
