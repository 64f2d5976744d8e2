"""A vLLM of its own: serves some prompts, with hicache's CPU and disk tier, and prints what vLLM says of each request.

    python vllm_offload_program.py MODEL OPTIONS

OPTIONS, JSON: `extra`, the connector's configuration; `rounds`, how often the prompts are asked, each time with an
empty prefix cache; `workers`, processes that share the model. The last line of the output is JSON: one list a round of
[cached tokens, output tokens] for each prompt.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS, NUM_PROMPTS = 600, 8, 3
BLOCK_TOKENS = 32
_SETTLE_S = 60.0


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def main(model: str, options: dict[str, Any]) -> list[list[tuple[int, list[int]]]]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",  # in bfloat16 two logits of the test's model are equal, and a last bit would decide on a token
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256",
        tensor_parallel_size=options["workers"],
        distributed_executor_backend="mp",
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options["extra"],
        ),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    rounds = []
    for _ in range(options["rounds"]):
        outputs = [llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0] for prompt in prompts()]
        rounds.append([(output.num_cached_tokens or 0, list(output.outputs[0].token_ids)) for output in outputs])
        deadline = time.monotonic() + _SETTLE_S
        while not llm.reset_prefix_cache() and time.monotonic() < deadline:  # refused while blocks are being copied
            llm.generate({"prompt_token_ids": [3]}, sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return rounds


if __name__ == "__main__":
    result = main(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps(result))
