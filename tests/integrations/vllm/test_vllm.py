"""vLLM serves a tiny random model over hicache's tiers, with cached tokens by its own count and the same output."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm")
# These modules can only be imported on the kind of processor for which this vLLM was built.
if not any(map(importlib.util.find_spec, ("vllm._C", "vllm._C_stable_libtorch"))):
    pytest.skip("needs vLLM's compiled parts", allow_module_level=True)

import vllm_server
from hicache.bench.servers import vllm_worker
from hicache.storage import describe

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "vllm"
CACHED = vllm_server.PROMPT_TOKENS // 32 * 32
CHUNK_BYTES = 32 * 4 * 2 * 2 * 64 * 4  # 4 layers, keys and values of 2 heads of 64 elements in float32
LITTLE_CHUNKS = 8  # chunks of the CPU tier; a prompt has 37
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.timeout(2400)  # a start of vLLM takes minutes on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    subprocess.run([sys.executable, str(EXAMPLES / "tiny_model.py"), folder], check=True)
    return folder


class Served(NamedTuple):
    """The output of one process of vllm_server, and its log."""

    cached: list[list[int]]  # cached tokens by run and prompt
    outputs: list[list[int]]  # tokens of the answers by prompt, equal in all runs
    stored: list[vllm_server.Checksums]
    given: list[vllm_server.Checksums]
    together: list[int]
    loaded: int
    preemptions: int
    external: int  # tokens that the connector loaded
    metrics: dict[str, float]
    log: str


def serve(model: str, extra: dict[str, Any], steps: list[str], in_process: bool = True, **task: Any) -> Served:
    task |= {"model": model, "extra": extra, "steps": steps}
    result = subprocess.run(
        [sys.executable, vllm_server.__file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=model,  # vLLM starts programs with `-m`, which would find kernels/ of a checkout
        env={**os.environ, **ENVIRONMENT, **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {})},
        check=False,
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-10000:]
    printed = json.loads(result.stdout.splitlines()[-1])
    outputs = [[output for _, output in run] for run in printed["runs"]]
    assert all(output == outputs[0] for output in outputs), "what is cached changed the output"
    cached = [[cached for cached, _ in run] for run in printed["runs"]]
    counted = {
        name: printed[name] for name in ("stored", "given", "together", "loaded", "preemptions", "external", "metrics")
    }
    return Served(cached, outputs[0], **counted, log=log)


CONNECTORS = pytest.mark.parametrize("connector", [{}, {"connector": "HiCacheConnector"}], ids=["vllm", "hicache"])


def tiering(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The connector's configuration for vLLM's CPU tier and hicache's tiers."""
    # A tiny model computes faster than a disk answers, so the configuration makes every load pay.
    ours = {"type": "RecordingTier", "module_path": "vllm_server", "prefill_tokens_per_s": 0}
    secondary = [{**ours, **tier} for tier in tiers]
    of_spec = {"spec_name": "CPUTieringSpec", "spec_module_path": vllm_worker.__name__, "cpu_bytes_to_use": 64 << 20}
    return {**of_spec, "secondary_tiers": secondary, **more}


def are_bytes_of(given: vllm_server.Checksums, stored: vllm_server.Checksums) -> bool:
    """Whether each chunk was loaded with bytes with which it was stored."""
    return all(set(checksums) <= set(stored[key]) for key, checksums in given.items())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"path": str(tmp_path_factory.mktemp("tier") / "pages")}


@pytest.fixture(scope="module")
def first(model: str, pages: dict[str, str]) -> Served:
    """A server whose tier fails from some step on."""
    steps = ["run", "reset", "run", "faults", *["reset", "run"] * 3]
    policy = {"eviction_policy": "SLRUPolicy", "cache_policy_module_path": "hicache.integrations.vllm"}
    return serve(model, tiering(pages, **policy), steps)


@pytest.mark.smoke
def test_cached_tokens_after_a_reset_and_with_a_tier_at_fault(first: Served, pages: dict[str, str]) -> None:
    """By vLLM's own count, tokens that were computed once are not computed again. No fault of the tier changes an
    output token."""
    assert first.cached[:2] == [[0, 0], [CACHED, CACHED]]
    assert sum(map(sum, first.cached[2:])) > 0
    assert are_bytes_of(first.given[0], first.stored[0])
    assert "Failed to close mmap_obj" not in first.log
    assert "INFO" in next(line for line in first.log.splitlines() if "pages of vLLM's secondary tier" in line)
    [folder] = Path(pages["path"]).iterdir()
    assert describe(folder).entries == 2 * CACHED // 32


def test_cached_tokens_after_a_restart_beside_tiers_at_fault(
    model: str, first: Served, pages: dict[str, str], tmp_path: Path
) -> None:
    """The server has four tiers: a damaged one, one with its own key, one that is too small for a prompt, and the tier
    of the first server. Eight requests at once that share a prefix cause one read and one load of each chunk. A server
    with another dtype and block size on the same path shares no chunk."""
    [folder] = Path(pages["path"]).iterdir()
    shutil.copytree(folder, tmp_path / "damaged" / folder.name)
    data = tmp_path / "damaged" / folder.name / "store.json"
    data.write_bytes(b"\xff" * data.stat().st_size)
    (tmp_path / "key").write_bytes(bytes(range(32)))
    tiers = [
        {"path": str(tmp_path / "damaged")},
        {**pages, "key_file": str(tmp_path / "key")},
        {"path": str(tmp_path / "small"), "budget": "2MB"},
        pages,
    ]
    second = serve(model, tiering(*tiers), ["run", "reset", "run", "reset", "together"])
    assert second.cached == [[CACHED, CACHED]] * 2 and second.together == [CACHED] * 8
    chunks = CACHED // 32
    assert sorted(map(len, second.given[3].values())) == [2] * chunks + [3] * chunks
    assert second.loaded == 5 * chunks
    assert not second.given[0]
    assert all(are_bytes_of(given, first.stored[0]) for given in second.given)
    assert second.outputs == first.outputs
    assert f"{data} is damaged" in second.log

    third = serve(model, tiering(pages), ["run", "reset", "run"], llm={"dtype": "float16", "block_size": 64})
    assert third.cached == [[0, 0], [vllm_server.PROMPT_TOKENS // 64 * 64] * 2]


@CONNECTORS
def test_two_workers_over_our_cpu_tier_and_disk(model: str, connector: dict[str, str], tmp_path: Path) -> None:
    """With the OffloadingSpec each worker is a process. After the prefix cache was emptied, tokens are loaded from the
    CPU tier. After a restart they are loaded from the disk, also through a CPU tier that is smaller than a prompt, up
    to its size. The processes leave no shared memory."""
    workers = 1 if torch.cuda.device_count() == 1 else 2
    llm = {
        "tensor_parallel_size": workers,
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
    }

    def served(steps: list[str], cpu_bytes: int = 64 << 20) -> Served:
        extra = {
            "spec_name": "HiCacheOffloadingSpec",
            "spec_module_path": "hicache.integrations.vllm",
            "cpu_bytes_to_use": cpu_bytes,
            "disk": {"path": str(tmp_path), "budget": "256MB", "prefill_tokens_per_s": 1e-3},
        }
        ended = serve(model, extra, [*steps, "forget"], in_process=False, llm=llm, **connector)
        shared = re.findall(r"/dev/shm/vllm_offload_\S+?\.mmap", ended.log)
        assert shared and not any(Path(file).exists() for file in shared)
        return ended

    one = served(["run each", "forget", "run each"])
    assert one.cached == [[0, 0], [CACHED, CACHED]]
    two = served(["run each"])
    assert two.cached == [[CACHED, CACHED]] and two.outputs == one.outputs
    assert two.metrics["disk_budget_bytes"] == 256_000_000
    three = served(["run each"], LITTLE_CHUNKS * CHUNK_BYTES)
    # Stores of the first prompt may still pin rows when the next prompt is looked up.
    assert three.cached[0][0] == LITTLE_CHUNKS * 32 and three.outputs == one.outputs


def test_two_workers_store_what_the_gpu_evicts(model: str) -> None:
    """Without a disk, two workers store chunks when the cache of 66 blocks evicts them. A prompt has 37 blocks. Ten
    other prompts later, both prompts are loaded from the CPU tier, with the same output tokens."""
    llm = {
        "tensor_parallel_size": 1 if torch.cuda.device_count() == 1 else 2,
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "num_gpu_blocks_override": 66,
    }
    steps, extra = ["run each", "others", "run each"], {"cpu_bytes_to_use": 64 << 20}
    served = serve(model, extra, steps, in_process=False, llm=llm, connector="HiCacheConnector")
    assert served.cached == [[0, 0], [CACHED, CACHED]] and served.external == 2 * CACHED


def test_prompts_that_wait_for_rows_of_each_other_are_served(model: str, tmp_path: Path) -> None:
    """Six requests arrive together after a restart, in a CPU tier with capacity for one prompt. All chunks of each
    prompt are loaded, one prompt after the other. If the tier only has capacity for a part of a prompt, this part is
    loaded and the rest computed. The output tokens are the same."""

    def served(steps: list[str], cpu_bytes: int) -> Served:
        extra = {
            "spec_name": "HiCacheOffloadingSpec",
            "spec_module_path": "hicache.integrations.vllm",
            "cpu_bytes_to_use": cpu_bytes,
            # At this speed every load pays, and so does every wait for rows, however slow this machine is.
            "disk": {"path": str(tmp_path), "budget": "256MB", "prefill_tokens_per_s": 1e-3},
        }
        llm = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256"}
        return serve(model, extra, [*steps, "forget"], in_process=False, llm=llm, prompts=6)

    computed = served(["run each"], 64 << 20)
    loaded = served(["run"], (CACHED // 32 + 3) * CHUNK_BYTES)
    assert loaded.cached == [[CACHED] * 6] and loaded.outputs == computed.outputs
    part = served(["run"], LITTLE_CHUNKS * CHUNK_BYTES)
    assert part.outputs == computed.outputs
    assert part.cached[0][0] == LITTLE_CHUNKS * 32 and all(0 < cached < CACHED for cached in part.cached[0])


@pytest.mark.parametrize(
    "connector", [{}, pytest.param({"connector": "HiCacheConnector"}, marks=pytest.mark.smoke)], ids=["vllm", "hicache"]
)
def test_blocks_of_a_preempted_step_are_neither_hit_nor_stored(model: str, connector: dict[str, str]) -> None:
    """A request with low priority is scheduled and preempted in the same step, so its new blocks have hashes but were
    not computed. The output tokens of the preempted request, and those of the same prompt from the CPU tier, are the
    tokens of a run without caches."""
    extra = {
        "spec_name": "HiCacheOffloadingSpec",
        "spec_module_path": "hicache.integrations.vllm",
        "cpu_bytes_to_use": 64 << 20,
        "store": "computed" if connector else "auto",
    }
    llm = {
        "max_model_len": 640,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "long_prefill_token_threshold": 64,
        "num_gpu_blocks_override": 23,
        "scheduling_policy": "priority",
        "async_scheduling": False,
    }
    steps = ["preempt", "forget", "run each", "compute each"]
    served = serve(model, extra, steps, llm=llm, prompts=6, prompt_tokens=630, **connector)
    assert served.preemptions == 6
    assert served.cached[1:] == [[608] * 6, [0] * 6]


def test_packed_rows_serve_the_same_tokens(model: str, tmp_path: Path) -> None:
    """Packed bfloat16 rows give the same tokens after the prefix cache was emptied and after a restart. The same memory
    holds a fourth more chunks. Some chunks of this model do not fit 4 bits, and are only in memory, not on the disk.
    All chunks fit 3 bits, which allow more escapes."""

    def served(kv_packing: str, steps: list[str]) -> tuple[Served, int]:
        extra = {
            "spec_name": "HiCacheOffloadingSpec",
            "spec_module_path": "hicache.integrations.vllm",
            "cpu_bytes_to_use": 64 << 20,
            "kv_packing": kv_packing,
            "disk": {"path": str(tmp_path / kv_packing), "budget": "256MB", "prefill_tokens_per_s": 0},
        }
        llm = {
            "dtype": "bfloat16",
            "block_size": 64,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
        }
        ended = serve(model, extra, [*steps, "forget"], in_process=False, llm=llm)
        [chunks] = re.findall(r"primary tier \(\w+, (\d+) chunks\)", ended.log)
        return ended, int(chunks)

    cached = vllm_server.PROMPT_TOKENS // 64 * 64
    raw, raw_chunks = served("off", ["run each", "forget", "run each"])
    assert raw.cached == [[0, 0], [cached, cached]]
    for kv_packing in ("3", "4"):
        packed, chunks = served(kv_packing, ["run each", "forget", "run each"])
        assert packed.cached == raw.cached and packed.outputs == raw.outputs
        assert chunks > 1.25 * raw_chunks
        restarted, _ = served(kv_packing, ["run each"])
        assert restarted.outputs == raw.outputs
        assert kv_packing == "4" or restarted.cached == [[cached, cached]]
    assert describe(next((tmp_path / "3").iterdir())).entries == 2 * cached // 64


_COMMON = """{"hidden_act": "silu", "rms_norm_eps": 1e-5, "hidden_size": 256, "intermediate_size": 512,
    "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4, "num_hidden_layers": 4,
    "tie_word_embeddings": false}"""
_HYBRID = """{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_key_value_heads": 2,
    "head_dim": 64, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "mlp_only_layers": [0, 1, 2], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128}"""
_WINDOWS = """{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 2,
    "head_dim": 64, "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}"""
_FP8 = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 64}"""
_LATENT = """{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 8, "first_k_dense_replace": 4, "num_nextn_predict_layers": 0}"""


@pytest.mark.parametrize(
    ("config", "llm", "connector"),
    [
        pytest.param(_HYBRID, {"num_gpu_blocks_override": 60}, {}, id="hybrid"),
        pytest.param(_HYBRID, {"num_gpu_blocks_override": 60}, {"connector": "HiCacheConnector"}, id="hybrid, hicache"),
        pytest.param(
            _WINDOWS, {"num_gpu_blocks_override": 180}, {"connector": "HiCacheConnector"}, id="windows, hicache"
        ),
        pytest.param(
            _FP8,
            {"kv_cache_dtype": "fp8", "num_gpu_blocks_override": 90},
            {},
            marks=pytest.mark.skipif(
                not (torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")),
                reason="vLLM on CPUs has an fp8 KV cache only with AVX-512",
            ),
            id="fp8",
        ),
        # Without a GPU vLLM caches no prefixes of latents.
        pytest.param(_LATENT, {"num_gpu_blocks_override": 180}, {}, marks=pytest.mark.gpu, id="latent"),
    ],
)
def test_other_caches_than_of_keys_and_values(
    config: str, llm: dict[str, Any], connector: dict[str, str], tmp_path: Path
) -> None:
    """Prompts give the same tokens when vLLM has evicted them and loads them from the CPU tier, and when it loads them
    from the disk after a restart: with recurrent states and attention, with fp8, and with latents."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(json.loads(_COMMON) | json.loads(config)))
    extra = {
        "spec_name": "HiCacheOffloadingSpec",
        "spec_module_path": "hicache.integrations.vllm",
        "cpu_bytes_to_use": 256 << 20,
        "disk": {"path": str(tmp_path / "pages"), "budget": "1GB", "prefill_tokens_per_s": 0},
    }
    llm |= {
        "dtype": "bfloat16",
        "load_format": vllm_worker.LOAD_FORMAT,
        "worker_extension_cls": f"{vllm_worker.__name__}.WorkerExtension",
        "prefix_caching_hash_algo": "sha256",
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    if torch.cuda.is_available():
        llm |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}  # leaves memory for other tests
    # If a GPU computes a prompt at once, it rounds differently than after a cached prefix.
    computed = "warm" if torch.cuda.is_available() else "run each"
    one = serve(str(model), extra, [computed, "run each", "others", "run each"], llm=llm, **connector)
    *_, own, cached = one.cached
    assert min(cached) > vllm_server.PROMPT_TOKENS - 256 and cached == own and one.external == sum(cached)
    two = serve(str(model), extra, ["run each"], llm=llm, **connector)
    assert two.cached == [cached] and two.external == sum(cached) and two.outputs == one.outputs
