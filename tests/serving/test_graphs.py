"""Captured passes, as far as a CPU can test them: the loads for which a replay waits, and the compiled batch sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hicache.build.factory import build_engine
from hicache.config import EngineConfig
from hicache.engine import CacheRequest
from hicache.layout import LayerKind, ModelGeometry
from hicache.serving.attention import SlotAttention
from hicache.serving.graphs import DecodeBatch, DecodeGraphs, bucket, last_layers
from hicache.serving.passes import Chunk, PassContext
from hicache.serving.slot_passes import SlotPasses
from serving_case import VOCAB, geometry_of, prompt, shared, tiny_engine, tiny_llama

WINDOW, FULL = "window", "full"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((FULL, FULL, FULL), {2}),
        ((WINDOW, FULL, WINDOW, WINDOW, FULL), {3, 4}),
        ((FULL, WINDOW, FULL, WINDOW), {2, 3}),
        # The pool keeps all tokens of the first layer, so its load is one of full attention.
        ((WINDOW, WINDOW, WINDOW), {0, 2}),
    ],
)
def test_a_replay_waits_for_the_last_layer_of_each_load(kinds: tuple[LayerKind, ...], expected: set[int]) -> None:
    """A replay waits for one layer for full attention and one for windows, the last ones that the pool stores of either
    kind."""
    window = 8 if WINDOW in kinds else 0
    geometry = ModelGeometry(len(kinds), 1, 16, layer_kinds=kinds, window=window)
    config = EngineConfig(device_tokens=256, host_bytes=0, max_context_len=64, dtype="float32", device="cpu")
    with build_engine(config, geometry) as engine:
        assert set(last_layers(engine.pool)) == expected


@pytest.mark.long
def test_each_size_of_batch_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch size is compiled, however many there are. torch.compile alone stops compiling after some sizes."""
    model, counter = shared(tiny_llama, layers=1, device="cpu"), CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    with tiny_engine(model) as engine, torch.inference_mode():
        attention = SlotAttention(engine.pool, geometry_of(model))
        passes = SlotPasses(PassContext(model, engine, geometry_of(model)), attention, compiled=True)
        sizes = sorted({bucket(num) for num in range(1, 10)})
        for size in sizes:
            logits = passes.decode_batch(DecodeBatch.of(size, torch.device("cpu")))
            assert logits.shape == (size, VOCAB)
    assert counter.frame_count == len(sizes) == 5


@pytest.mark.gpu
def test_a_capture_that_fails_spoils_nothing() -> None:
    """Passes of a model that cannot be captured run without graphs. Random numbers and later captures still work."""
    model = shared(tiny_llama)

    def decode(batch: DecodeBatch) -> torch.Tensor:
        return batch.words.sum().item() * batch.words  # waits for the device, so the capture fails at its end

    with tiny_engine(model) as engine:
        context = PassContext(model, engine, geometry_of(model))
        graphs = DecodeGraphs(context, decode)
        tokens = prompt(5, seed=1)
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            assert graphs.run([Chunk(lease, tokens, 4, 5)]) is None
        assert torch.isfinite(torch.randn(1000, device=model.device)).all()
        graph, drawn = torch.cuda.CUDAGraph(), torch.zeros(8, device=model.device)
        with torch.cuda.graph(graph):
            drawn.normal_()
        graph.replay()
        assert drawn.any()
