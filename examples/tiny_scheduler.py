"""A small scheduler with continuous batching and chunked prefill over the tiers. It serves a random model on any
machine. A scheduler of hybrid models also calls `engine.track` after each decode step.

python examples/tiny_scheduler.py
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache import CacheEngine, CacheRequest, EngineConfig, Lease, OutOfSlots, ResourceExhausted, build_engine
from hicache.serving import Chunk, ModelRunner, check_supported

CHUNK_TOKENS, NEW_TOKENS = 64, 16


def serve(engine: CacheEngine, runner: ModelRunner, prompts: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Return greedy answers of NEW_TOKENS tokens to all prompts, by name."""
    sequences = {name: list(tokens) for name, tokens in prompts.items()}
    waiting, running, answers = deque(prompts), {}, {}  # running: name -> (lease, number of tokens with KV)
    for name, tokens in prompts.items():
        announce(engine, name, tokens)
    while waiting or running:
        engine.poll()  # finishes copies, so that requests find their pages
        while waiting:
            name = waiting[0]
            try:
                lease = engine.acquire(CacheRequest(name, np.array(sequences[name])))
            except ResourceExhausted:
                break  # too few free slots, or the prefetch is in flight: try again in a later step
            running[waiting.popleft()] = (lease, lease.cached_len)
        chunks: list[Chunk] = []
        for name in list(running):
            while name in running:
                lease, start = running[name]
                end = engine.next_stop(lease, start, min(len(sequences[name]), start + CHUNK_TOKENS))
                try:
                    engine.extend(lease, max(0, end - lease.length))
                except OutOfSlots:
                    last = list(running)[-1]  # the request itself, or a later one without a chunk
                    preempt(engine, running.pop(last)[0])
                    announce(engine, last, np.array(sequences[last]))
                    waiting.appendleft(last)
                else:
                    chunks.append(Chunk(lease, np.array(sequences[name]), start, end))
                    break
        if not chunks:
            continue
        for chunk, token in zip(chunks, forward(engine, runner, chunks), strict=True):
            lease, name = chunk.lease, chunk.lease.request_id
            engine.commit(lease, chunk.tokens[: chunk.end])  # shares complete pages, and backs them up
            if chunk.end == len(chunk.tokens):
                sequences[name].append(token)
            running[name] = (lease, chunk.end)
            if len(sequences[name]) == len(prompts[name]) + NEW_TOKENS:
                answers[name] = sequences[name][-NEW_TOKENS:]
                engine.release(lease)
                del running[name]
    return answers


def announce(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    """Announce a queued request to the engine."""
    engine.prefetch(name, tokens)  # reads pages from disk to the host in the background
    engine.expect(name, tokens)  # the request counts as delayed by computing, and its pages are evicted last


def preempt(engine: CacheEngine, lease: Lease) -> None:
    """Take the slots of a running request. Its committed pages are loaded when the request is admitted again."""
    engine.backup(lease)
    engine.release(lease, continues=True)


def forward(engine: CacheEngine, runner: ModelRunner, chunks: Sequence[Chunk]) -> list[int]:
    """Run one pass, and return the next token of each chunk. Report the prefill speed to the engine, unless the pass
    waits for a load."""
    prefill = [chunk for chunk in chunks if not chunk.is_decode]
    waits_for_load = any(not load.completed for chunk in chunks for load in chunk.lease.loads)
    begin_s = time.perf_counter()
    tokens = runner.forward(chunks).argmax(-1).tolist()  # calls engine.begin_forward; `tolist` waits for the device
    num_tokens = sum(chunk.end - chunk.start for chunk in prefill)
    if num_tokens and not waits_for_load:
        positions = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) / 2 for chunk in prefill)
        engine.observe_prefill(num_tokens, time.perf_counter() - begin_s, positions / num_tokens)
    return tokens


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **shape)).eval()
    geometry = check_supported(model)
    config = EngineConfig(device_tokens=1024, host_bytes=1 << 22, dtype="float32", device="cpu", model_id="random")
    document = np.random.default_rng(0).integers(0, 512, 300)
    prompts = {f"question {i}": np.append(document, np.arange(i, i + 9)) for i in range(6)}
    with build_engine(config, geometry) as engine:
        runner = ModelRunner(model, engine, geometry)
        for turn in ("first", "second"):
            answers = serve(engine, runner, prompts)
            stats = engine.stats()
            print(f"{turn}: {len(answers)} answers, {stats['admit.device_hit_tokens']:.0f} tokens were cached so far")
        engine.check()


if __name__ == "__main__":
    main()
