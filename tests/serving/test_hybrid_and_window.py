"""A hybrid model end to end: where a long prompt leaves states that later prompts start from."""

from __future__ import annotations

import numpy as np

from hicache.serving.request import Request, RequestOutput
from hicache.serving.scheduler import Scheduler
from hybrid_case import tiny_qwen3_next
from serving_case import VOCAB, prompt, shared, tiny_engine, tiny_runner


def serve(scheduler: Scheduler, name: str, tokens: np.ndarray, max_new_tokens: int) -> RequestOutput:
    (output,) = scheduler.run([Request(name, tokens, max_new_tokens)])
    assert output.error is None
    return output


def test_states_of_a_long_prompt_hit() -> None:
    """A prompt of 2250 tokens in chunks of 2048 leaves states at 2048, at powers of two below, at the last multiple of
    64 and at its end."""
    model = shared(tiny_qwen3_next, max_position_embeddings=4096)
    settings = {"device_tokens": 5120, "max_context_len": 3072, "mamba_chunk_tokens": 64, "mamba_size": 14}
    with tiny_engine(model, **settings, page_size=1, mamba_track_interval=256) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=2048)
        tokens = prompt(2250, 5)
        first = serve(scheduler, "first", tokens, 3)
        assert first.cached_len == 0
        # A prompt of 2048 tokens hits at most 2047: first the state at 1024 of the longer one, then its own at 1984.
        for num_tokens, hit in ((2250, 2240), (2225, 2048), (2048, 1024), (2048, 1984)):
            again = serve(scheduler, f"again {num_tokens}", tokens[:num_tokens], 3)
            assert again.cached_len == hit, num_tokens
            if num_tokens == 2250:
                assert again.tokens == first.tokens
        longer = np.concatenate([tokens, [int(first.tokens[0])], prompt(40, 6) % VOCAB])
        assert serve(scheduler, "longer", longer, 3).cached_len >= 2250
        engine.check()
