"""`hicache plan`: its bytes are those of the built pools, its operations are those that PyTorch counts, and memory adds
up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from family_case import tiny_config, tiny_family
from hicache import EngineConfig, build_engine
from hicache.build.sizing import device_bytes, resolve, row_bytes
from hicache.errors import ConfigError, OutOfMemory, UnsupportedModel
from hicache.planning.gpus import GPUS, Gpu, gpu_of
from hicache.planning.memory import MemoryPlan, PlanRequest, plan_memory, share_of
from hicache.planning.model import read_model
from hicache.planning.presets import PRESETS, PlannedModel, PrefillWork
from hicache.planning.times import Machine, Times

MIB = 1 << 20
KINDS = [
    "llama",
    "deepseek_v3",
    "gemma3_text",
    "mimo_v2_flash",
    "gemma3n_text",
    "qwen3_next",
    "kimi_linear",
    "falcon_h1",
]
GPU = Gpu("test", 260 * MIB, 1e12, 100e12, 50e9)  # 256 MiB of its memory are staging
SMALL = PlanRequest(max_running=2, chunk_tokens=64, max_context_len=256, host_bytes=2 * MIB, disk_bytes=4 * MIB)


def described(row: str, folder: Path, **changes: Any) -> PlannedModel:
    """The plan's view of a tiny model, from its configuration in a file."""
    tiny_config(row, dtype="float32", **changes).save_pretrained(folder)
    return read_model(str(folder))


def built(plan: MemoryPlan, model: PlannedModel, num_gpus: int = 1) -> tuple[int, dict[str, float]]:
    """Bytes of the buffers of one GPU's pools as the factory builds them, and the engine's figures."""
    config = dataclasses.replace(plan.config, device="cpu", disk=None)
    with build_engine(config, share_of(model.geometry, num_gpus)) as engine:
        spaces = engine.pool.slot_spaces
        num_bytes = sum(b.nbytes for s in spaces for layer in s.layout.layers for b in s.layer_buffers(layer))
        return num_bytes, engine.stats()


@pytest.mark.parametrize("row", KINDS)
def test_the_pools_take_the_planned_bytes(row: str, tmp_path: Path) -> None:
    """From the configuration alone the plan knows the bytes of every pool, including windows and states. Weights, pools
    and workspace are the memory of the GPU. Host tokens are those of the host pool. A plan with one more page would not
    fit."""
    model = described(row, tmp_path)
    weights = tiny_family(row, "cpu")
    assert model.weight_bytes == sum(weight.nbytes for weight in weights.parameters())
    plan = plan_memory(model, GPU, SMALL)
    num_bytes, stats = built(plan, model)
    assert plan.pool_bytes == num_bytes > 0
    assert plan.weight_bytes + plan.pool_bytes + plan.workspace_bytes == GPU.memory_bytes
    device, host, disk = plan.tiers
    assert device.num_tokens == plan.config.device_tokens
    assert host.num_tokens == stats["host.free_pages"] * plan.config.host_page_size
    assert disk.num_tokens >= 2 * host.num_tokens
    assert host.num_states == plan.config.host_states and bool(host.num_states) == bool(plan.rows.state)
    larger = dataclasses.replace(plan.start, device_tokens=device.num_tokens + plan.config.cache_page_size)
    left = GPU.memory_bytes - plan.weight_bytes - plan.workspace_bytes
    assert device_bytes(resolve(larger, model.geometry, 1 << 50), plan.rows) > left
    assert EngineConfig.from_dict({**vars(plan.start), "disk": None, "advanced": {}}).device_tokens == device.num_tokens


QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "max_position_embeddings": 40960}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The published configuration of each model. Missing sizes are the defaults of transformers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA | dict(zip(SIZES, (4096, 14336, 32, 32), strict=True)),
    "llama-3.1-70b": LLAMA | dict(zip(SIZES, (8192, 28672, 80, 64), strict=True)),
    "qwen3-8b": QWEN3 | {"head_dim": 128} | dict(zip(SIZES, (4096, 12288, 36, 32), strict=True)),
    "qwen3-32b": QWEN3 | {"head_dim": 128} | dict(zip(SIZES, (5120, 25600, 64, 64), strict=True)),
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }
    | dict(zip(SIZES, (5376, 21504, 62, 32), strict=True)),
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "qwen3-next-80b-a3b": {"model_type": "qwen3_next", "max_position_embeddings": 262144},
}


@pytest.mark.parametrize(
    "name", [name if name == "qwen3-8b" else pytest.param(name, marks=pytest.mark.long) for name in PRESETS]
)
def test_a_known_model_is_what_transformers_makes_of_its_configuration(name: str, tmp_path: Path) -> None:
    """The recorded geometry, weights and work of a known model are those that transformers computes from its published
    configuration."""
    (tmp_path / f"{name}.json").write_text(json.dumps({"dtype": "bfloat16", **PUBLISHED[name]}))
    assert read_model(str(tmp_path / f"{name}.json")) == PRESETS[name]


@pytest.mark.parametrize(
    ("row", "num_gpus"), [("llama", 3), ("deepseek_v3", 2), ("mimo_v2_flash", 8), ("qwen3_next", 2)]
)
def test_several_gpus_share_heads(row: str, num_gpus: int, tmp_path: Path) -> None:
    """The pools of each GPU's share are built as planned, and memory adds up on each GPU. Heads are divided until one
    is left; latent rows are complete on every GPU."""
    model = described(row, tmp_path)
    plan = plan_memory(
        model, GPU, dataclasses.replace(SMALL, num_gpus=num_gpus, host_bytes=num_gpus * 2 * MIB, disk_bytes=0)
    )
    assert plan.pool_bytes == built(plan, model, num_gpus)[0]
    assert plan.weight_bytes + plan.pool_bytes + plan.workspace_bytes == GPU.memory_bytes
    alone = row_bytes(model.geometry, plan.config.torch_dtype)
    if model.geometry.latent is not None:
        assert plan.rows == alone
    else:
        assert plan.rows.full == alone.full * -(-model.geometry.head_num // num_gpus) // model.geometry.head_num
    assert plan.tiers[0].num_bytes == num_gpus * plan.pool_bytes


@pytest.mark.parametrize(("row", "stored"), [("llama", 2), ("deepseek_v3", 1), ("kimi_linear", 1)])
def test_the_disk_has_latent_rows_once(row: str, stored: int, tmp_path: Path) -> None:
    """Two GPUs store the rows of a token `stored` times, so the disk has capacity for `stored` times fewer tokens. Each
    GPU stores its states. All processes share the budget of the path."""
    model = described(row, tmp_path, **({"num_attention_heads": 4, "num_key_value_heads": 4} if row == "llama" else {}))
    request = dataclasses.replace(SMALL, num_gpus=2, host_bytes=4 * MIB, disk_bytes=64 * MIB)
    plan = plan_memory(model, GPU, request)
    shared = dataclasses.replace(model, geometry=share_of(model.geometry, 2))
    alone = plan_memory(shared, GPU, dataclasses.replace(request, num_gpus=1, host_bytes=2 * MIB))
    assert alone.tiers[2].num_tokens / plan.tiers[2].num_tokens == pytest.approx(stored, rel=0.01)
    assert alone.tiers[2].num_states == pytest.approx(2 * plan.tiers[2].num_states, rel=0.1)
    assert plan.tiers[1].num_tokens == alone.tiers[1].num_tokens
    assert plan.tiers[2].num_bytes == 64 * MIB and plan.start.disk is not None
    assert plan.start.disk.budget_bytes == 64 * MIB


@pytest.mark.parametrize("row", ["gpt2", "mixtral", "deepseek_v3", "gemma3_text", "hrm_text"])
def test_operations_are_those_that_pytorch_counts(row: str, tmp_path: Path) -> None:
    """A pass over 9 tokens has the operations of the formula. In the counted pass every query attends to every key, and
    the head computes every token."""
    work, n = described(row, tmp_path).work, 9
    model = tiny_family(row, "cpu")
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    ids = torch.arange(n)[None]
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, position_ids=ids, use_cache=False)
    pairs = work.full_pair_flops + work.window_pair_flops + work.chunk_pair_flops
    assert counted(counter) == n * (work.token_flops + work.head_flops) + n * n * pairs


@pytest.mark.parametrize(("row", "of_model"), [("llama4_text", {"interleave_moe_layer_step": 2}), ("granitemoe", {})])
def test_of_experts_those_that_a_token_chooses_count(row: str, of_model: dict[str, Any], tmp_path: Path) -> None:
    """Doubling the experts only adds rows of the router to the work of a token, also in families that multiply with all
    experts. Choosing one more expert adds the weights of an expert."""
    few, many, more = (
        described(row, tmp_path / name, num_local_experts=experts, num_experts_per_tok=chosen, **of_model)
        for name, experts, chosen in (("few", 4, 1), ("many", 8, 1), ("more", 8, 2))
    )
    layers = 2 if row == "llama4_text" else few.geometry.layer_num
    expert, routed = 3 * 32 * 48, 4 * 32
    assert many.num_weights - few.num_weights == layers * (4 * expert + routed)
    assert many.num_active - few.num_active == layers * routed
    assert more.num_active - many.num_active == layers * expert


def counted(counter: FlopCounterMode) -> int:
    """The counted operations without those of rotary frequencies, which the formula leaves out."""
    counts = counter.get_flop_counts().items()
    rotary = sum(sum(ops.values()) for name, ops in counts if name.split(".")[-1].startswith("rotary"))
    return counter.get_total_flops() - rotary


def test_the_work_of_windows_and_chunks_is_bounded() -> None:
    """The formula equals a count of queries and keys one by one, in windows of 4 and chunks of 4."""
    for n in range(12):
        keys = {
            "full": sum(i + 1 for i in range(n)),
            "window": sum(min(i + 1, 4) for i in range(n)),
            "chunk": sum(i % 4 + 1 for i in range(n)),
        }
        work = PrefillWork(7, 5, 1, 100, 10000, window=4, chunk=4)
        assert work.flops(n) == 7 * n + 5 + keys["full"] + 100 * keys["window"] + 10000 * keys["chunk"]


@pytest.mark.parametrize(("row", "link"), [("llama", 1e6), ("gemma3_text", 2e8), ("qwen3_next", 1e3), ("llama", 1e12)])
def test_the_break_even_is_where_loading_starts_to_pay(row: str, link: float, tmp_path: Path) -> None:
    """From the break-even on, at every multiple of a page, loading takes at most as long as computing; one page below
    the break-even, loading takes longer. Without a break-even, loading takes longer at the longest context. Windows
    limit the loaded bytes."""
    model = described(row, tmp_path)
    gpu = dataclasses.replace(GPU, flops_per_s=1e9, memory_bytes_per_s=0.0, link_bytes_per_s=link)
    plan = plan_memory(model, gpu, SMALL)
    times, page = Times(model, plan, Machine(gpu, 1, 1e9, 1.0)), plan.config.host_page_size
    longest = times.table()[-1].num_tokens // page * page
    pays = {n: times.at(n).load_s <= times.at(n).compute_s for n in range(page, longest + 1, page)}  # type: ignore[operator]
    found = times.break_even(lambda at: at.load_s)
    if found is None:
        assert not pays[longest]
    else:
        assert all(pays[n] for n in pays if n >= found) and not pays.get(found - page, False)
    rows, window = plan.rows, model.geometry.window
    assert times.at(512).num_bytes == 512 * rows.full + min(512, window) * rows.window + rows.state
    assert times.at(512).compute_s == model.work.flops(512) / 1e9


def test_unknown_rates_give_no_times(tmp_path: Path) -> None:
    """If only the memory of a GPU is known, its plan has no times and no break-even."""
    model, gpu = described("llama", tmp_path), gpu_of("300MiB")
    times = Times(model, plan_memory(model, gpu, SMALL), Machine(gpu, 1, 1e9))
    assert {(at.compute_s, at.load_s, at.disk_s) for at in times.table()} == {(None, None, None)}
    assert times.break_even(lambda at: at.load_s) is None


def test_weights_that_do_not_fit_name_the_gpus_that_would() -> None:
    """The number of GPUs in the message suffices for the model, and half of it does not. If no number suffices, the
    message says so."""
    model = PRESETS["llama-3.1-70b"]
    with pytest.raises(OutOfMemory, match="--gpus 4"):
        plan_memory(model, GPUS["l40s"], PlanRequest())
    assert plan_memory(model, GPUS["l40s"], PlanRequest(num_gpus=4)).tiers[0].num_tokens > 0
    with pytest.raises(OutOfMemory, match="--gpus 4"):
        plan_memory(model, GPUS["l40s"], PlanRequest(num_gpus=2))
    with pytest.raises(OutOfMemory, match="no number"):
        plan_memory(model, gpu_of("100MiB"), PlanRequest())


def test_no_sequence_is_longer_than_the_device_tier() -> None:
    """The longest context of a server is that of the model, if the device tier has capacity for it."""
    model = PRESETS["llama-3.1-8b"]
    small, large = (plan_memory(model, gpu_of(size), PlanRequest()) for size in ("24GB", "80GiB"))
    assert small.start.max_context_len == small.config.max_context_len == small.tiers[0].num_tokens
    assert small.tiers[0].num_tokens < large.start.max_context_len == model.max_context_len


def test_tiers_too_small_for_a_page_are_refused(tmp_path: Path) -> None:
    """A workspace smaller than its known part, and a host or disk tier without capacity for a page, are errors that
    name the flag."""
    model = described("llama", tmp_path)
    with pytest.raises(ConfigError, match="--workspace"):
        plan_memory(model, GPU, dataclasses.replace(SMALL, workspace_bytes=5))
    with pytest.raises(ConfigError, match="--host-memory"):
        plan_memory(model, GPU, dataclasses.replace(SMALL, host_bytes=1000))
    none = plan_memory(model, GPU, dataclasses.replace(SMALL, host_bytes=0, disk_bytes=0))
    assert [tier.name for tier in none.tiers] == ["device"]
    with pytest.raises(ConfigError):
        plan_memory(model, GPU, dataclasses.replace(SMALL, host_bytes=0))


def test_files_that_are_no_model_are_refused_in_one_line(tmp_path: Path) -> None:
    """A missing file, other JSON, an unknown type, wrong values, and a model that cannot be served are refused in one
    line."""
    path = tmp_path / "config.json"

    wrong = (None, "{", "[1]", "{}", '{"model_type": "novel"}', '{"model_type": "vit"}', '{"model_type": "t5"}')
    for text in (*wrong, '{"model_type": "llama", "hidden_size": "wide"}', '{"model_type": "mamba"}'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(UnsupportedModel if text and "mamba" in text else ConfigError) as caught:
            read_model(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_weights_are_counted_by_files_bits_or_dtype(tmp_path: Path) -> None:
    """The index of safetensors gives the bytes of the weights. Without the index the configuration's quantisation and
    dtype give the bytes; modules that are not quantised have the dtype's bytes. For a quantisation of unknown size, the
    error asks for the bytes."""
    config = tiny_config("llama", dtype="float32")
    config.save_pretrained(tmp_path)
    plain = read_model(str(tmp_path))
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}}))
    inner = plain.num_active  # of a dense model: all weights of its layers
    assert read_model(str(tmp_path)).weight_bytes == plain.weight_bytes - 4 * inner + inner * 13 // 16
    spared = 3 * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    attention = [[f"self_attn.{part}_proj" for part in "qkvo"]]
    for named in (
        {"modules_to_not_convert": ["model.layers.*.mlp"]},
        {"ignored_layers": ["gate_proj", "up_proj", "down_proj"]},
        {"dynamic": {r"-:.*\.mlp\.": {}, r"\+:.*q_proj": {"bits": 4}}},
        {"modules_in_block_to_quantize": attention},
    ):
        quantization = {"quant_method": "gptq", "bits": 4, "group_size": 8, **named}
        file.write_text(json.dumps({**values, "auto_map": {}, "quantization_config": quantization}))
        assert read_model(str(tmp_path)).weight_bytes == plain.weight_bytes - (4 - 13 / 16) * (inner - spared), named
    for unknown in ({"modules_to_not_convert": ["("]}, {"dynamic": 3}, {"modules_in_block_to_quantize": [3]}):
        file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8", **unknown}}))
        with pytest.raises(ConfigError, match="--weight-bytes"):
            read_model(str(tmp_path))
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "novel"}}))
    with pytest.raises(ConfigError, match="--weight-bytes"):
        read_model(str(tmp_path))
    assert read_model(str(tmp_path), weight_bytes=77).weight_bytes == 77
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 123456}}))
    assert read_model(str(tmp_path)).weight_bytes == 123456
    index.write_text("{}")
    with pytest.raises(ConfigError, match="--weight-bytes"):
        read_model(str(tmp_path))
