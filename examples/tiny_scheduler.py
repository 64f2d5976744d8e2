"""A small scheduler: continuous batching with chunked prefill over the tiers, for a random model on any machine.

python examples/tiny_scheduler.py
"""

from collections import deque

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache import CacheEngine, CacheRequest, EngineConfig, OutOfSlots, ResourceExhausted, build_engine
from hicache.serving import Chunk, ModelRunner, check_supported

CHUNK_TOKENS, NEW_TOKENS = 64, 16


def serve(engine: CacheEngine, runner: ModelRunner, prompts: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Greedy answers of NEW_TOKENS tokens to all prompts, by name."""
    waiting, running, answers = deque(prompts), {}, {}  # running: name -> (lease, tokens so far, tokens in the cache)
    for name, tokens in prompts.items():
        engine.prefetch(name, tokens)  # reads pages from disk to the host in the background
    while waiting or running:
        engine.poll()  # finishes copies, so that requests find their pages
        while waiting:
            try:
                lease = engine.acquire(CacheRequest(waiting[0], prompts[waiting[0]]))
            except ResourceExhausted:
                break  # there are no free slots, or the prefetch is in flight: retry in a later step
            running[waiting.popleft()] = (lease, list(prompts[lease.request_id]), lease.cached_len)
        chunks: list[Chunk] = []
        for lease, tokens, start in list(running.values()):
            end = engine.next_stop(lease, start, min(len(tokens), start + CHUNK_TOKENS))
            try:
                engine.extend(lease, max(0, end - lease.length))
            except OutOfSlots:
                continue  # skips this step; a real scheduler would preempt another request
            chunks.append(Chunk(lease, np.array(tokens), start, end))
        if not chunks:
            continue
        for chunk, logits in zip(chunks, runner.forward(chunks), strict=True):
            lease, tokens, name = chunk.lease, chunk.tokens.tolist(), chunk.lease.request_id
            engine.commit(lease, chunk.tokens[: chunk.end])  # shares complete pages, and backs them up
            if chunk.end == len(tokens):
                tokens.append(int(logits.argmax()))
            running[name] = (lease, tokens, chunk.end)
            if len(tokens) == len(prompts[name]) + NEW_TOKENS:
                answers[name] = tokens[-NEW_TOKENS:]
                engine.release(lease)
                del running[name]
    return answers


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
