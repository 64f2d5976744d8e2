"""Streams beside a long prompt as a benchmark, on a clock that passes alone move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from disk_case import Clock
from hicache.bench.common import Report
from hicache.bench.serving_streams import StreamRun, StreamSizes, add_stream_cases, serve_beside_streams
from hicache.serving import Chunk, Scheduler
from serving_case import VOCAB, assert_released, shared, tiny_engine, tiny_llama

SIZES = StreamSizes(3, question=16, answer=64, context=1024, prompt_answer=4, chunk=256, max_pass_s=0.5)


class _TimedRunner:
    """Passes that take 10 ms, and for prompts what attention adds to 2 ms a token; they compute nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        work = sum((chunk.end - chunk.start) * (1 + chunk.start / 1024) for chunk in chunks if not chunk.is_decode)
        self._clock.now_s += 0.01 + 2e-3 * work
        return torch.zeros(len(chunks), VOCAB)


def _run(sizes: StreamSizes, max_pass_s: float) -> StreamRun:
    clock, model = Clock(), shared(tiny_llama, device="cpu")
    with tiny_engine(model, device_tokens=sizes.device_tokens, max_context_len=sizes.context) as engine:
        settings = {"chunk_tokens": sizes.chunk, "max_pass_s": max_pass_s, "clock": clock}
        try:
            return serve_beside_streams(Scheduler(engine, _TimedRunner(clock), **settings), sizes, VOCAB, clock)
        finally:
            assert_released(engine)


def test_gaps_are_those_beside_the_prompt() -> None:
    """With the bound every pass of the prompt is a gap of each stream, and all that the prompt waits for; without it
    the same holds for its four chunks. Cases say what was met, and nothing where there are no targets."""
    bounded, unbounded = _run(SIZES, SIZES.max_pass_s), _run(SIZES, 0.0)
    chunks = [0.01 + 2e-3 * size * (1 + start / 1024) for start, size in ((0, 253), (253, 253), (506, 253), (759, 253))]
    last = 0.01 + 2e-3 * 8 * (1 + 1012 / 1024)
    assert sorted(unbounded.gaps_s) == pytest.approx(sorted(3 * [*chunks, last]))
    assert unbounded.first_s == pytest.approx(sum(chunks) + last)
    assert bounded.first_s == pytest.approx(sum(bounded.gaps_s) / 3) and max(bounded.gaps_s) <= 0.5

    report = Report.start("serving", torch.device("cpu"), "test", "0" * 40)
    add_stream_cases(report, SIZES, bounded, unbounded, has_targets=True)
    found = {case.name: (case.value, case.ceiling, case.met) for case in report.cases}
    assert found == {
        "serving.stream.gap": (max(bounded.gaps_s), 0.5, True),
        "serving.stream.gap.p99": (bounded.p99_s, 0.5, True),
        "serving.stream.prompt": (bounded.first_s, unbounded.first_s, True),
    }
    bare = Report.start("serving", torch.device("cpu"), "test", "0" * 40)
    add_stream_cases(bare, SIZES, unbounded, bounded, has_targets=False)
    assert [case.met for case in bare.cases] == [None] * 3


def test_a_stream_that_ends_before_the_prompt_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="stream 0 ended: length"):
        _run(replace(SIZES, answer=17), SIZES.max_pass_s)
