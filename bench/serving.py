"""Measures the reference scheduler and runner, which serve a model of 8B geometry.

    decode        one decode step of requests with one context length; the ceiling reads weights and KV once, at the
                  bandwidth of a copy within device memory. `compiled`: with torch.compile
    prefill       a prompt in chunks; the ceiling is one forward of plain transformers with sdpa over the prompt
    ttft.host     first token of a prompt whose prefix is on the host: max(load, compute) / measured; load: a plain
                  pinned copy of the same bytes; compute: the same request with the prefix on the device
    sessions-host sessions of coding agents that do not fit device and host: makespan and time to first token, over no
                  host and over other copies to it (`serving_sessions.py`)
    stream        running answers during a prompt of 128k tokens: the gaps between their tokens (`serving_streams.py`)

A case and its ceiling are measured in one process, in turns. On a CPU the model is tiny, and there are no targets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache.bench.common import (
    Report,
    add_parts,
    chosen_parts,
    free_memory,
    interleave,
    percentile,
    timer_for,
)
from hicache.bench.serving_case import Served, ServedModel, prompts, random_llama, serving
from hicache.bench.serving_sessions import measure_sessions_host
from hicache.bench.serving_streams import measure_streams
from hicache.engine import CacheRequest
from hicache.serving import Chunk

NAME = "serving"
DESCRIPTION = "decoding, prefill, first tokens from the host, agent sessions, streams; 8B geometry"

PARTS = ("decode", "prefill", "host", "sessions-host", "stream", "compiled")
NEW_TOKENS = 256
DECODE_TARGET, COMPILED_TARGET = 0.3, 0.5
PREFILL_TARGET, HOST_TARGET = 1.0, 0.9


@dataclass(frozen=True)
class Sizes:
    """Sizes in tokens, except `batches` and `steps`."""

    context: int
    batches: tuple[int, ...]
    steps: int
    prefill: int
    chunk: int
    host_prefixes: tuple[int, ...]


REAL = Sizes(8192, (1, 8), 40, 32768, 8192, (8192, 32768, 131072 - 1024))
TINY = Sizes(256, (1, 4), 5, 1024, 256, (512,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)


def run(args: argparse.Namespace, report: Report) -> None:
    sizes = REAL if args.device.type == "cuda" else TINY
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: _decode(report, served, sizes, compiled=False),
        "prefill": lambda: _prefill(report, served, sizes),
        "host": lambda: _first_token_from_host(report, served, sizes),
        "sessions-host": lambda: measure_sessions_host(report, served),
        "stream": lambda: measure_streams(report, served),
        # This part is last, because torch.compile has side effects in the process that could affect other cases.
        "compiled": lambda: _decode(report, served, sizes, compiled=True),
    }
    here = PARTS if args.device.type == "cuda" else PARTS[:-1]  # torch.compile is used only for captured passes
    served = random_llama(args.device)
    for part in chosen_parts(args, report, here):
        parts[part]()
        free_memory(args.device)


def _target(served: ServedModel, value: float) -> float | None:
    return value if served.model.device.type == "cuda" else None


# Decode


def _decode(report: Report, served: ServedModel, sizes: Sizes, *, compiled: bool) -> None:
    """Measure decode steps by the host's clock. A step is `runner.forward` and the choice of tokens, until the host has
    the tokens."""
    device = served.model.device
    bandwidth = _memory_bandwidth(device)
    ending, target = (".compiled", COMPILED_TARGET) if compiled else ("", DECODE_TARGET)
    device_tokens = (sizes.context + 512) * max(sizes.batches)
    settings: dict[str, Any] = {"device_tokens": device_tokens, "max_context_len": sizes.context + 512}
    with serving(served, chunk_tokens=sizes.chunk, compiled=compiled, **settings) as engine:
        for batch in sizes.batches:
            seconds = _decode_steps(engine, batch, sizes)
            read = served.read_bytes + batch * (sizes.context + sizes.steps) * served.token_bytes
            shares = [read / bandwidth / s for s in seconds]
            step_ms = percentile(seconds, 50) * 1e3
            note = f"step {step_ms:.2f} ms; weights and KV {read / 1e9:.1f} GB at {bandwidth / 1e12:.2f} TB/s"
            name = f"serving.decode.context{sizes.context}.batch{batch}{ending}"
            report.case(name, shares, "share", ceiling=1.0, target=_target(served, target), note=note)


def _decode_steps(engine: Served, batch: int, sizes: Sizes) -> list[float]:
    sequences = prompts(batch, sizes.context + sizes.steps + 4, engine.served.vocab, seed=batch)
    leases = []
    for i, tokens in enumerate(sequences):
        lease = engine.engine.acquire(CacheRequest(f"decode {batch} {i}", tokens[: sizes.context], f"{batch} {i}"))
        for start in range(0, sizes.context, sizes.chunk):
            engine.runner.prefill(lease, tokens, start, min(sizes.context, start + sizes.chunk))
        leases.append(lease)
    seconds = []
    for step in range(sizes.steps + 3):
        start_s = time.perf_counter()
        for lease in leases:
            engine.engine.extend(lease, 1)
        chunks = [Chunk(x, t, x.length - 1, x.length) for x, t in zip(leases, sequences, strict=True)]
        engine.runner.forward(chunks).argmax(-1).tolist()
        if step >= 3:  # earlier steps capture the graph
            seconds.append(time.perf_counter() - start_s)
    for lease in leases:
        engine.engine.release(lease)
    return seconds


def _memory_bandwidth(device: torch.device) -> float:
    """Return the maximum bytes per second, read plus written, of a copy within device memory."""
    source = torch.ones((1 << 30) if device.type == "cuda" else 64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleave({"copy": lambda: target.copy_(source)}, samples=30, timer=timer_for(device))["copy"]
    return 2 * source.nbytes / min(seconds)


# Prefill


def _prefill(report: Report, served: ServedModel, sizes: Sizes) -> None:
    device, num = served.model.device, sizes.prefill
    (tokens,) = prompts(1, num, served.vocab, seed=1)
    ids = torch.from_numpy(tokens).to(device)[None]
    with serving(served, chunk_tokens=sizes.chunk, device_tokens=num + 1024, max_context_len=num + 1024) as engine:

        def chunked() -> None:
            lease = engine.engine.acquire(CacheRequest("prefill", tokens))
            for start in range(0, num, sizes.chunk):
                engine.runner.prefill(lease, tokens, start, min(num, start + sizes.chunk))
            engine.engine.release(lease)

        @torch.inference_mode()
        def plain() -> None:
            served.model(input_ids=ids, use_cache=True, logits_to_keep=1)

        seconds = interleave({"chunked": chunked, "plain": plain}, samples=3, warmup=1, timer=timer_for(device))
    note = f"chunks of {sizes.chunk}; the ceiling is one forward of plain transformers with sdpa over all tokens"
    rates, ceiling = ([num / s for s in seconds[kind]] for kind in ("chunked", "plain"))
    target = _target(served, PREFILL_TARGET)
    report.case(f"serving.prefill.{num}", rates, "tokens/s", ceiling=ceiling, target=target, note=note)


# First tokens


def _first_token_from_host(report: Report, served: ServedModel, sizes: Sizes) -> None:
    longest = max(sizes.host_prefixes) + NEW_TOKENS + 64
    host_bytes = (longest + 1024) * served.token_bytes
    with serving(
        served, chunk_tokens=sizes.chunk, device_tokens=longest, host_bytes=host_bytes, max_context_len=longest
    ) as engine:
        for length in sizes.host_prefixes:
            _host_case(report, engine, length)


def _host_case(report: Report, engine: Served, length: int) -> None:
    (prefix,) = prompts(1, length, engine.served.vocab, seed=length)
    engine.first_token_s("warm", prefix)
    counter = iter(range(1 << 20))

    def ask(kind: str) -> float:
        """Return the seconds to the first token of a prompt that consists of the prefix and new random tokens."""
        number = next(counter)
        (new,) = prompts(1, NEW_TOKENS, engine.served.vocab, seed=number)
        seconds, output = engine.first_token_s(f"{kind} {number}", np.concatenate([prefix, new]))
        hit = output.hit.host if kind == "host" else output.hit.device
        if hit < length - 64:
            raise AssertionError(f"{hit} of {length} tokens were on the {kind}")
        return seconds

    times: dict[str, list[float]] = {"host": [], "device": []}
    for turn in range(6):
        engine.clear_device()
        for kind, taken in times.items():
            seconds = ask(kind)
            if turn:
                taken.append(seconds)
    num_bytes = length * engine.served.token_bytes
    load, compute = _plain_copy_s(num_bytes, engine.engine.pool.device), percentile(times["device"], 50)
    first = percentile(times["host"], 50)
    note = f"load {load * 1e3:.1f} ms, compute {compute * 1e3:.1f} ms, first token {first * 1e3:.1f} ms"
    shares, target = [max(load, compute) / s for s in times["host"]], _target(engine.served, HOST_TARGET)
    report.case(f"serving.ttft.host.prefix{length}", shares, "share", ceiling=1.0, target=target, note=note)


def _plain_copy_s(num_bytes: int, device: torch.device) -> float:
    """Return the seconds of a plain copy of `num_bytes` from pinned memory, extrapolated from at most 1 GiB."""
    part = min(num_bytes, 1 << 30)
    host = torch.ones(part, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(part, dtype=torch.uint8, device=device)
    copy = {"copy": lambda: target.copy_(host, non_blocking=True)}
    seconds = interleave(copy, samples=7, timer=timer_for(device))["copy"]
    return percentile(seconds, 50) * num_bytes / part
