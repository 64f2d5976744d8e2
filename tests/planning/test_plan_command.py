"""`hicache plan` as a user meets it: JSON, tables, settings that other commands accept."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli_case import output, stats
from family_case import save_model, tiny_config
from hicache import EngineConfig
from hicache.replay.simulation import ReplaySettings, replay
from hicache.replay.trace import read_trace
from hicache.serving.server import flags as serve
from server_case import serving

TINY = ("--gpu", "270MiB", "--host-memory", "2MiB", "--max-running", "2", "--max-context-len", "256")
RATES = ("--gpu-tflops", "0.001", "--gpu-bandwidth", "1GB", "--link-rate", "50MB", "--disk-rate", "1MB")


def planned(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> dict[str, Any]:
    return stats(capsys, "plan", "--model", model, *flags)


def saved(folder: Path, row: str = "llama") -> Path:
    tiny_config(row, dtype="float32").save_pretrained(folder)
    return folder


def write_trace(path: Path, num_rounds: int = 3) -> Path:
    """Write a trace of two conversations that take turns, and whose prompts grow by a block of 512 tokens. In three
    rounds, 6 of 12 blocks are repeated."""
    prompts = [list(range(first, first + n)) for n in range(1, num_rounds + 1) for first in (100, 200)]
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("row", ["gemma3_text", "qwen3_next"])
def test_settings_that_other_commands_accept(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hicache serve` accepts the printed flags, and they give the plan's settings. The settings of the plan build an
    EngineConfig, and `hicache config` shows them unchanged."""
    disk = ("--disk", "8MiB", "--disk-path", str(tmp_path / "a store"), "--dtype", "bfloat16")
    plan = planned(capsys, saved(tmp_path / "model", row), *TINY, *disk)
    config = EngineConfig.from_dict(plan["engine"])
    program, name, *arguments = shlex.split(plan["serve"])
    assert (program, name, arguments[0]) == ("hicache", "serve", str(tmp_path / "model"))
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    flags = parser.parse_args(arguments)
    served = EngineConfig.from_flags(
        flags, device="cuda", max_requests=flags.max_running, prefill_chunk_tokens=flags.chunk_tokens, model_id="model"
    )
    assert served == config
    file = tmp_path / "engine.yaml"
    file.write_text(json.dumps(plan["engine"]))
    shown = stats(capsys, "config", "--show", "--config", file)["settings"]
    assert plan["engine"].pop("disk")["budget_bytes"] == 8 << 20
    assert {setting: shown[setting]["value"] for setting in plan["engine"]} == plan["engine"]
    assert shown["disk.budget_bytes"]["value"] == 8 << 20


@pytest.mark.long
def test_the_flags_start_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hicache serve` starts with the plan's command and answers."""
    save_model(tmp_path / "model", tiny_config("llama", vocab_size=258, initializer_range=0.2))
    _, _, *arguments = shlex.split(planned(capsys, tmp_path / "model", *TINY)["serve"])
    with serving(tmp_path, *arguments) as server:
        answer = server.client().completions.create(model="model", prompt="Good morning", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens >= 1


def test_everything_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory adds up, times grow with length, and the given rates are used. The hit rates of a trace grow with the
    tiers, up to the share of repeated blocks."""
    trace = ("--trace", str(write_trace(tmp_path / "trace.jsonl")))
    plan = planned(capsys, saved(tmp_path / "model"), *TINY, *RATES, *trace, "--disk", "8MiB")
    memory, gpu = plan["memory"], plan["machine"]["gpu"]
    assert memory["weight_bytes"] + memory["pool_bytes"] + memory["workspace_bytes"] == gpu["memory_bytes"] == 270 << 20
    assert (gpu["flops_per_s"], gpu["memory_bytes_per_s"], gpu["link_bytes_per_s"]) == (1e9, 1e9, 5e7)
    assert [tier["name"] for tier in plan["tiers"]] == ["device", "host", "disk"]
    times = [[at["compute_s"], at["load_s"], at["disk_s"]] for at in plan["times"]]
    assert all(a < b for short, long in pairwise(times) for a, b in zip(short, long, strict=True))
    rates = [row["hit_rate"] for row in plan["hit_rates"]]
    assert [row["tiers"] for row in plan["hit_rates"]] == [
        "device", "device + host", "device + host + disk", "device + twice the host", "device + host as one tier",
        "without a limit",
    ]  # fmt: skip
    assert rates[-1] == 0.5 and rates[0] <= rates[1] <= rates[2] <= 0.5 and rates[1] <= rates[4]
    assert plan["break_even_tokens"]["disk"] is None or plan["break_even_tokens"]["disk"] % 64 == 0


@pytest.mark.parametrize(
    ("row", "disk", "policy"),
    [("llama", (), "exclusive"), ("llama", ("--disk", "8MiB"), "write_through"), ("qwen3_next", (), "exclusive")],
)
@pytest.mark.parametrize("host", ["1MiB", "64MiB"])
def test_hits_that_a_host_adds(
    row: str, disk: Sequence[str], policy: str, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hits that a host adds depend on the write policy that an engine chooses. If device and host hold different
    pages, all its tokens count; otherwise only those beyond the size of the device. The trace is replayed with this
    policy."""
    model, trace = saved(tmp_path / "model", row), write_trace(tmp_path / "trace.jsonl", num_rounds=12)
    flags = (*TINY, "--host-memory", host, "--trace", str(trace), *disk)
    plan = planned(capsys, model, *flags)
    device, below, *_ = (tier["num_tokens"] for tier in plan["tiers"])
    held = device + below if policy == "exclusive" else max(device, below)
    assert (plan["memory"]["write_policy"], plan["memory"]["memory_tokens"]) == (policy, held)
    settings = ReplaySettings(device // 512, below // 512, policy="auto", write_policy=policy)
    assert plan["hit_rates"][1]["hit_rate"] == replay(read_trace(trace), settings).hit_rate


@pytest.mark.parametrize("host", ["1MiB", "64MiB"])
@pytest.mark.parametrize("disk", [(), ("--disk", "8MiB")])
@pytest.mark.parametrize(("row", "connector_adds_up"), [("llama", True), ("qwen3_next", False)])
def test_tokens_that_a_host_adds_in_each_deployment(
    row: str, connector_adds_up: bool, disk: Sequence[str], host: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """All tokens of the host count if it stores what the device evicts: under `exclusive`, and under HiCacheConnector
    unless the model has recurrent states. Otherwise only tokens beyond the size of the device count."""
    flags = (*TINY, "--host-memory", host, *disk)
    model = saved(tmp_path / "model", row)
    plan = planned(capsys, model, *flags)
    device, below, *_ = (tier["num_tokens"] for tier in plan["tiers"])
    beyond = max(0, below - device)
    assert {row["stores"]: row["added_tokens"] for row in plan["deployments"]} == {
        "exclusive": below,
        "write_through": beyond,
        "HiCacheConnector": below if connector_adds_up else beyond,
        "HiCacheOffloadingSpec": beyond,
    }
    assert all(row["memory_tokens"] == device + row["added_tokens"] for row in plan["deployments"])
    shown = [" ".join(line.split()) for line in output(capsys, "plan", "--model", model, *flags).splitlines()]
    assert f"write_policy=exclusive evicted from the device {device + below:,} {below:,}" in shown
    assert f"vLLM, HiCacheOffloadingSpec computed {device + beyond:,} {beyond:,}" in shown


@pytest.mark.parametrize(
    ("deployment", "policy"), [("serve", "write_through"), ("connector", "exclusive"), ("spec", "write_through")]
)
def test_one_deployment(deployment: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--deployment` shows only the rows of this deployment, replays the trace with its write policy, and proposes its
    command."""
    model, trace = saved(tmp_path / "model"), write_trace(tmp_path / "trace.jsonl", num_rounds=12)
    flags = (*TINY, "--trace", str(trace), "--disk", "8MiB", "--deployment", deployment)
    plan = planned(capsys, model, *flags)
    device, below, disk = (tier["num_tokens"] // 512 for tier in plan["tiers"])
    settings = ReplaySettings(device, below, disk, policy="auto", write_policy=policy)
    assert plan["hit_rates"][2]["hit_rate"] == replay(read_trace(trace), settings).hit_rate
    shown = output(capsys, "plan", "--model", model, *flags)
    assert ("HiCacheConnector" in shown) is (deployment == "connector")
    assert ("write_policy=" in shown) is (deployment == "serve")
    assert ("vLLM logs the tokens of its own as `GPU KV cache size`" in shown) is (deployment != "serve")
    if deployment != "serve":
        command = f"hicache vllm-config --plugin {deployment} --cpu 2MiB --chunk-blocks 4 --disk"
        assert plan["serve"] == f"{command} /PATH:8MiB" and f"  {command} /PATH:8MiB\n" in shown
        assert planned(capsys, model, *flags, "--disk-path", str(tmp_path))["serve"] == f"{command} {tmp_path}:8MiB"


@pytest.mark.parametrize("is_several", [False, True])
def test_a_command_that_would_not_help_has_a_note(
    is_several: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the CPU tier of `HiCacheOffloadingSpec` adds no tokens, a note gives a size that adds some, in place of the
    command. For several GPUs, a note before the command says that `HiCacheConnector` was measured on one."""
    model = saved(tmp_path / "model")
    flags = (*TINY, "--host-memory", "64KiB", "--gpus", str(1 + is_several), "--deployment")
    connector, spec = (planned(capsys, model, *flags, name) for name in ("connector", "spec"))
    assert any("on one GPU only" in note for note in connector["notes"]) is is_several
    assert connector["serve"] and not spec["serve"]
    (note,) = spec["notes"]
    size = re.search(r"above ([0-9.]+) (MiB|KiB)", note)
    assert size is not None
    larger = f"{float(size[1]) * 1.1:.2f}{size[2]}"
    again = planned(capsys, model, *TINY, "--host-memory", larger, "--gpus", flags[-2], "--deployment", "spec")
    assert again["serve"] and not again["notes"] and again["deployments"][3]["added_tokens"] > 0
    assert note in output(capsys, "plan", "--model", model, *flags, "spec")
    before, _, after = output(capsys, "plan", "--model", model, *flags, "connector").partition("start with")
    assert ("on one GPU only" in before) is is_several and after and "note" not in after


def test_several_gpus_have_settings_and_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For several GPUs the plan only has the engine's settings, because `hicache serve` uses one GPU."""
    model = saved(tmp_path / "model")
    plan = planned(capsys, model, *TINY, "--gpus", "2")
    assert (
        plan["serve"] == "" and EngineConfig.from_dict(plan["engine"]).device_tokens == plan["tiers"][0]["num_tokens"]
    )
    out = output(capsys, "plan", "--model", model, *TINY, "--gpus", "2")
    assert f"device_tokens={plan['engine']['device_tokens']}" in out


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_what_a_plan_assumes_is_shown(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of the disk, and packed pages, in which a token has fewer bytes than on the GPUs."""
    flags = ("llama-3.1-8b", "--gpu", "h100", "--gpus", gpus, "--disk", "500GB", "--disk-rate", "2GB")
    plan, shown = planned(capsys, *flags), output(capsys, "plan", *flags)
    token_bytes = plan["memory"]["token_bytes"] * int(gpus)
    assert all(tier["num_tokens"] * token_bytes > tier["num_bytes"] for tier in plan["tiers"][1:])
    assert "pages of host and disk are packed" in shown
    assert "loading from a disk of 2 GB/s (--disk-rate) is not slower" in shown


def test_the_page_shows_lines_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of the first example on the page are lines of the plan, in this order."""
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    _, command, block = re.split(r"\n    hicache (plan [^\n]*)\n\n```text\n", page, maxsplit=1)
    shown = [" ".join(line.split()) for line in block.partition("```")[0].splitlines()]
    lines = iter(" ".join(line.split()) for line in output(capsys, *command.split()).splitlines())
    assert shown and all(line in lines for line in shown)
