"""Answers a few prompts with `Scheduler`, using device and host, with streaming, priorities and a deadline.

python examples/serve_offline.py
"""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache import EngineConfig, build_engine
from hicache.serving import ModelRunner, Request, SamplingParams, Scheduler, check_supported


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # any model family that `hicache serve` supports works here
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **shape)).eval()
    config = EngineConfig(device_tokens=2048, host_bytes=1 << 22, dtype="float32", device="cpu", model_id="random")
    prompt = np.random.default_rng(0).integers(0, 512, 400)
    with build_engine(config, check_supported(model)) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine, check_supported(model)))
        scheduler.submit(Request("greedy", prompt, max_new_tokens=8))
        scheduler.submit(Request("sampled", prompt, 8, SamplingParams(temperature=0.8, top_p=0.95, seed=1)))
        scheduler.submit(Request("urgent", prompt[:300], 8, priority=1), on_token=lambda token: print("urgent:", token))
        scheduler.submit(Request("short of time", prompt, max_new_tokens=1000, deadline_s=0.5))
        while scheduler.num_unfinished:
            for output in scheduler.step():
                print(f"{output.request_id}: {output.finish_reason}, {output.cached_len} cached, {output.tokens[:8]}")


if __name__ == "__main__":
    main()
