"""Measures the gaps between tokens of running answers (streams) when a long prompt arrives, and how much a bound on the
time of passes delays this prompt.

    stream.gap      the longest time between two tokens of a stream, over `max_pass_s`
    stream.gap.p99  p99 of all such times, over `max_pass_s`
    stream.prompt   time to first token of the prompt, over that with chunks of one size

One engine serves both runs, one after the other, each with an empty device tier. The benchmark `serving` uses this
module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hicache.bench.common import Report, percentile
from hicache.bench.serving_case import ServedModel, prompts, serving
from hicache.serving import Request, Scheduler
from hicache.serving.warm_up import warm_up

_GAP_TARGET, _PROMPT_TARGET = 1.0, 1.25
_BEFORE = 16  # tokens of each stream before the prompt arrives


@dataclass(frozen=True)
class StreamSizes:
    """Sizes in tokens, except `streams`. `question`, `answer`: tokens of a stream's prompt and of its answer, which
    takes longer than the long prompt. `context`: tokens of the long prompt and of its answer, `prompt_answer`.
    `max_pass_s`: maximum seconds of a pass, in the run with a bound."""

    streams: int
    question: int
    answer: int
    context: int
    prompt_answer: int
    chunk: int
    max_pass_s: float

    @property
    def device_tokens(self) -> int:
        return self.context + self.streams * (self.question + self.answer) + self.chunk


REAL = StreamSizes(8, 512, 1024, 131_072, 16, 8192, 0.5)  # `max_pass_s` is the default of `hicache serve`
TINY = StreamSizes(4, 32, 1024, 8192, 16, 1024, 0.1)


@dataclass(frozen=True)
class StreamRun:
    """`gaps_s`: seconds between two tokens of a stream while the prompt was computed, for all streams. `first_s`:
    seconds to the prompt's first token."""

    gaps_s: Sequence[float]
    first_s: float

    @property
    def p99_s(self) -> float:
        return percentile(self.gaps_s, 99)

    def __str__(self) -> str:
        gaps = f"gaps {percentile(self.gaps_s, 50):.3f} s (p99 {self.p99_s:.3f}, longest {max(self.gaps_s):.3f})"
        return f"{gaps}, first token of the prompt {self.first_s:.2f} s"


def measure_streams(report: Report, served: ServedModel) -> None:
    """Measure all cases."""
    sizes = REAL if served.model.device.type == "cuda" else TINY
    runs: dict[float, StreamRun] = {}
    with serving(
        served, chunk_tokens=sizes.chunk, device_tokens=sizes.device_tokens, max_context_len=sizes.device_tokens
    ) as engine:
        warm_up(engine.engine, engine.runner, sizes.chunk, sizes.streams + 1)
        for max_pass_s in (sizes.max_pass_s, 0.0):
            engine.clear_device()
            runs[max_pass_s] = serve_beside_streams(engine.scheduler(max_pass_s=max_pass_s), sizes, served.vocab)
    add_stream_cases(report, sizes, runs[sizes.max_pass_s], runs[0.0], has_targets=served.model.device.type == "cuda")


def serve_beside_streams(scheduler: Scheduler, sizes: StreamSizes, vocab: int) -> StreamRun:
    """Serve streams, and a prompt that arrives while the streams decode, until the prompt has its first token. Raises
    AssertionError if a request ends before that."""
    times: list[list[float]] = [[] for _ in range(sizes.streams + 1)]
    *streams, prompt = times

    def submit(name: str, num_tokens: int, answer: int, into: list[float], seed: int) -> None:
        (tokens,) = prompts(1, num_tokens, vocab, seed)
        scheduler.submit(Request(name, tokens, answer), lambda _: into.append(time.perf_counter()))

    def step_until(has_arrived: Callable[[], bool]) -> None:
        while not has_arrived():
            for output in scheduler.step():
                raise AssertionError(f"{output.request_id} ended: {output.finish_reason}") from output.error

    try:
        for number, into in enumerate(streams):
            submit(f"stream {number}", sizes.question, sizes.answer, into, number)
        step_until(lambda: all(len(into) >= _BEFORE for into in streams))
        submitted_s = time.perf_counter()
        submit("prompt", sizes.context - sizes.prompt_answer, sizes.prompt_answer, prompt, sizes.streams)
        step_until(lambda: bool(prompt))
    finally:
        scheduler.abort_all()
    pairs = [pair for into in streams for pair in pairwise(into)]
    return StreamRun([later - before for before, later in pairs if later > submitted_s], prompt[0] - submitted_s)


def add_stream_cases(
    report: Report, sizes: StreamSizes, bounded: StreamRun, unbounded: StreamRun, *, has_targets: bool
) -> None:
    """Add the cases, which compare a run with a bound with the bound itself, and with a run without a bound."""
    note = f"{sizes.streams} streams, a prompt of {sizes.context - sizes.prompt_answer} tokens; {bounded}; "
    note += f"with chunks of {sizes.chunk} always {unbounded}"
    target = _GAP_TARGET if has_targets else None
    report.time(
        "serving.stream.gap", [max(bounded.gaps_s)], "s", ceiling_seconds=[sizes.max_pass_s], target=target, note=note
    )
    report.time("serving.stream.gap.p99", [bounded.p99_s], "s", ceiling_seconds=[sizes.max_pass_s], target=target)
    target = _PROMPT_TARGET if has_targets else None
    report.time("serving.stream.prompt", [bounded.first_s], "s", ceiling_seconds=[unbounded.first_s], target=target)
