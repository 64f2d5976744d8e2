"""`hicache plan`: the command's flags, and its plan as tables or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hicache.config import EngineConfig
from hicache.config.settings import Integer, Number, Size, Tokens, as_flag, settings_of
from hicache.console import flag_size, path_flag, progress, rounded
from hicache.errors import ConfigError
from hicache.planning.gpus import GPUS, Gpu, gpu_of
from hicache.planning.memory import DEPLOYMENTS, MemoryPlan, PlanRequest, plan_memory
from hicache.planning.presets import PRESETS, PlannedModel
from hicache.planning.report import show
from hicache.planning.times import COMPUTE_SHARE, LengthTimes, Machine, Times
from hicache.replay.flags import add_trace_flags, trace_of
from hicache.replay.simulation import ReplayResult, ReplaySettings, one_tier, replay
from hicache.replay.trace import Trace

_ENGINE = settings_of(EngineConfig)
_SIZE, _POSITIVE = (as_flag(Size("a size like 64GiB", minimum, is_tier=True)) for minimum in (0, 1))
_RATE = as_flag(Size("bytes per second like 50GB", 1))
_COUNT = as_flag(Integer("a count", 1, 1024))


@dataclass(frozen=True)
class HitRow:
    """The hit rate of a trace with some tiers, as a share of blocks. `num_tokens`: capacity of each tier; None:
    unlimited."""

    tiers: str
    num_tokens: tuple[int | None, ...]
    hit_rate: float


@dataclass(frozen=True)
class Plan:
    """The plan of a model on a machine. `break_even_*`: shortest prefix, in tokens, whose load is not slower than
    computing it; None: there is none, or a rate is unknown. `serve`: the command for these sizes, "" if there is none.
    `notes`: what a user should know about the command, or why there is none."""

    model: PlannedModel
    machine: Machine
    memory: MemoryPlan
    times: tuple[LengthTimes, ...]
    break_even_host: int | None
    break_even_disk: int | None
    hits: tuple[HitRow, ...]
    serve: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values for JSON. Sizes are in bytes. The sizes in `memory` are those of one GPU."""
        model, memory = self.model, self.memory
        geometry = model.geometry
        return {
            "model": {
                **{name: value for name, value in vars(model).items() if name not in ("geometry", "work")},
                "layers": {kind: geometry.kinds.count(kind) for kind in dict.fromkeys(geometry.kinds)},
                "window": geometry.window,
                "flops": dataclasses.asdict(model.work),
            },
            "machine": dataclasses.asdict(self.machine),
            "memory": {
                "weight_bytes": memory.weight_bytes,
                "pool_bytes": memory.pool_bytes,
                "workspace_bytes": memory.workspace_bytes,
                "token_bytes": memory.rows.full,
                "window_token_bytes": memory.rows.window,
                "state_bytes": memory.rows.state,
                "max_context_len": memory.config.max_context_len,
                "write_policy": memory.write_policy,
                "memory_tokens": memory.memory_tokens,
            },
            "deployments": _deployments(memory),
            "tiers": [dataclasses.asdict(tier) for tier in memory.tiers],
            "times": [dataclasses.asdict(times) for times in self.times],
            "break_even_tokens": {"host": self.break_even_host, "disk": self.break_even_disk},
            "hit_rates": [dataclasses.asdict(row) for row in self.hits],
            "serve": self.serve,
            "notes": self.notes,
            "engine": start_values(memory),
        }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache plan`. The usage shows MODEL as required; argparse cannot derive this from the group
    of MODEL and --model."""
    parser.usage = "%(prog)s MODEL --gpu GPU [FLAG ...]"
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "model", nargs="?", type=path_flag, default=argparse.SUPPRESS, metavar="MODEL", help="another form of --model"
    )
    model.add_argument(
        "--model",
        type=path_flag,
        metavar="MODEL",
        help=f"a transformers config.json, a folder with one, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument("--gpu", required=True, help=f"one of {', '.join(GPUS)}; or the memory of a GPU, like 80GiB")
    parser.add_argument("--gpus", type=_COUNT, default=1, help="GPUs that share the model's weights (default 1)")
    parser.add_argument(
        "--host-memory",
        type=_SIZE,
        metavar="SIZE",
        help="size of the host tier; 0: none (default: chosen by the engine)",
    )
    parser.add_argument("--disk", type=_SIZE, default=0, metavar="SIZE", help="size of the disk tier (default: none)")
    parser.add_argument("--disk-path", default=PlanRequest.disk_path, metavar="PATH", help="directory of the disk tier")
    parser.add_argument(
        "--deployment",
        choices=tuple(DEPLOYMENTS),
        help="serve: `hicache serve`; connector: vLLM with HiCacheConnector; spec: vLLM with HiCacheOffloadingSpec. "
        "Shows only its tokens, and replays the trace with its write policy (default: tokens of all, policy of serve)",
    )
    parser.add_argument(
        "--dtype",
        type=as_flag(_ENGINE["dtype"]),
        default="auto",
        help="dtype of keys and values (default: the model's)",
    )
    parser.add_argument(
        "--trace",
        type=path_flag,
        metavar="FILE",
        help="trace of requests whose hit rates to compute, as `hicache replay` reads",
    )
    add_trace_flags(parser)
    parser.add_argument("--policy", default=EngineConfig.eviction_policy, help="eviction order of that replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    serving = parser.add_argument_group("serving")
    serving.add_argument("--max-running", type=_COUNT, default=PlanRequest.max_running, help="default 32")
    serving.add_argument(
        "--chunk-tokens", type=as_flag(Tokens("")), default=PlanRequest.chunk_tokens, help="default 8192"
    )
    serving.add_argument("--max-context-len", type=as_flag(_ENGINE["max_context_len"]), help="longest sequence")
    rates = parser.add_argument_group("rates that replace known or assumed ones")
    rates.add_argument("--weight-bytes", type=_POSITIVE, metavar="SIZE", help="bytes of all weights")
    rates.add_argument(
        "--workspace", type=_SIZE, metavar="SIZE", help="of each GPU, for everything except weights and pools"
    )
    rates.add_argument("--gpu-tflops", type=as_flag(Number("", 1e-3)), help="dense TFLOP/s of a GPU in bfloat16")
    rates.add_argument("--gpu-bandwidth", type=_RATE, metavar="SIZE", help="bytes per second of a GPU's memory")
    rates.add_argument("--link-rate", type=_RATE, metavar="SIZE", help="bytes per second from the host to a GPU")
    rates.add_argument(
        "--disk-rate", type=_RATE, default=3_000_000_000, metavar="SIZE", help="bytes per second (default 3GB)"
    )
    rates.add_argument(
        "--compute-share", type=as_flag(Number("", 1e-6, 1)), default=COMPUTE_SHARE,
        help=f"share of a GPU's FLOP/s that prefill reaches (default {COMPUTE_SHARE})",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Print the plan. Returns 0."""
    trace = None if flags.trace is None else trace_of(flags)
    gpu = _gpu(flags)
    model = _model(flags)
    memory = plan_memory(model, gpu, _plan_request(flags))
    machine = Machine(gpu, flags.gpus, flags.disk_rate, flags.compute_share)
    times = Times(model, memory, machine)
    with progress("replaying the trace") as step:
        step(0, None)
        hits = () if trace is None else tuple(_hit_rows(trace, memory, flags.policy))
    serve, notes = _serve(flags, model, memory)
    plan = Plan(
        model=model,
        machine=machine,
        memory=memory,
        times=times.table(),
        break_even_host=times.break_even(lambda length: length.load_s),
        break_even_disk=times.break_even(lambda length: length.disk_s) if flags.disk else None,
        hits=hits,
        serve=serve,
        notes=tuple(notes),
    )
    if flags.json:
        print(json.dumps(plan.to_json()))
    else:
        show(plan.to_json(), flags.deployment)
    return 0


def start_values(memory: MemoryPlan) -> dict[str, Any]:
    """Return the engine settings that differ from the defaults, in the form that `EngineConfig.from_dict` takes."""
    plain = EngineConfig(device_tokens=memory.start.device_tokens)
    values = {
        name: value
        for name, value in vars(memory.start).items()
        if name == "device_tokens" or value != vars(plain)[name]
    }
    if memory.start.disk is not None:
        values["disk"] = {name: value for name, value in vars(memory.start.disk).items() if value}
    return values


def _serve(flags: argparse.Namespace, model: PlannedModel, memory: MemoryPlan) -> tuple[str, list[str]]:
    """Return the command that starts a server with the planned settings, or that prints vLLM's flag for them, and notes
    about it. The command is empty for several GPUs, which `hicache serve` does not support."""
    if flags.deployment not in (None, "serve"):
        return _vllm_config(flags, model, memory)
    if flags.gpus > 1:
        return "", []
    start = memory.start
    name = flags.model if Path(flags.model).exists() else "MODEL"
    if Path(name).is_file():
        name = str(Path(name).parent)
    given: dict[str, object] = {
        "--device-tokens": start.device_tokens,
        "--host-bytes": start.host_bytes,
        "--max-context-len": start.max_context_len,
        "--max-running": flags.max_running,
        "--chunk-tokens": flags.chunk_tokens,
    }
    if start.dtype != "auto":
        given["--dtype"] = start.dtype
    if start.disk is not None:
        given |= {"--disk-path": start.disk.path, "--disk-budget-bytes": start.disk.budget_bytes}
    return shlex.join(["hicache", "serve", name, *(str(part) for pair in given.items() for part in pair)]), []


def _vllm_config(flags: argparse.Namespace, model: PlannedModel, memory: MemoryPlan) -> tuple[str, list[str]]:
    """Return the command that prints vLLM's flag, and notes about it. The command is empty without a host tier, and if
    the host tier would add no tokens and there is no disk."""
    device, host = memory.tiers[0], next((tier for tier in memory.tiers if tier.name == "host"), None)
    if host is None:
        return "", []
    notes = []
    if flags.gpus > 1 and flags.deployment == "connector":
        notes.append("HiCacheConnector was measured on one GPU only; for several GPUs choose --deployment spec")
    if memory.memory_tokens == device.num_tokens:
        needed = device.num_tokens * host.num_bytes // host.num_tokens
        other = ", or choose --deployment connector" if flags.deployment == "spec" else ""
        notes.append(f"to add tokens, give --host-memory above {rounded(needed)}, better twice as much{other}")
        if not flags.disk:
            return "", notes
    given = ["--cpu", flag_size(host.num_bytes)]
    if {*model.geometry.kinds} == {"full"} and model.geometry.latent is None:
        given += ["--chunk-blocks", "4"]
    if flags.disk:
        path = "/PATH" if flags.disk_path == PlanRequest.disk_path else Path(flags.disk_path).absolute()
        given += ["--disk", f"{path}:{flag_size(flags.disk)}"]
    return shlex.join(["hicache", "vllm-config", "--plugin", flags.deployment, *given]), notes


def _deployments(memory: MemoryPlan) -> list[dict[str, Any]]:
    """Return the number of different tokens on device and host, and the number of tokens that the host adds, for each
    write policy of hicache's engine and for each plug-in of vLLM. Empty without a host tier."""
    if "host" not in (tier.name for tier in memory.tiers):
        return []
    device = memory.tiers[0].num_tokens
    return [
        {
            "deployment": deployment,
            "stores": store,
            "memory_tokens": (held := memory.different_tokens(store)),
            "added_tokens": held - device,
        }
        for deployment, stores in DEPLOYMENTS.items()
        for store in stores
    ]


def _model(flags: argparse.Namespace) -> PlannedModel:
    """Return the model that `--model` names: a preset, or the model of a configuration. Only reading a configuration
    needs transformers. Raises ConfigError with the most similar preset if `--model` names neither."""
    is_path = Path(flags.model).exists()
    if not is_path and flags.model not in PRESETS:
        similar = difflib.get_close_matches(Path(flags.model).name.lower(), PRESETS, 1)
        guess = f" (did you mean {similar[0]}?)" if similar else ""
        raise ConfigError(
            f"model {flags.model}: no such file and no preset{guess}; give a transformers config.json, a folder with "
            f"one, or one of {', '.join(PRESETS)}; names of the Hugging Face hub are not accepted"
        )
    if not is_path:
        known = PRESETS[flags.model]
        return dataclasses.replace(known, weight_bytes=flags.weight_bytes or known.weight_bytes)
    read: PlannedModel = importlib.import_module("hicache.planning.model").read_model(flags.model, flags.weight_bytes)
    return read


def _gpu(flags: argparse.Namespace) -> Gpu:
    """Return the GPU that `--gpu` names. Flags for rates override its known rates."""
    gpu = gpu_of(flags.gpu)
    return dataclasses.replace(
        gpu,
        flops_per_s=gpu.flops_per_s if flags.gpu_tflops is None else flags.gpu_tflops * 1e12,
        memory_bytes_per_s=float(flags.gpu_bandwidth or gpu.memory_bytes_per_s),
        link_bytes_per_s=float(flags.link_rate or gpu.link_bytes_per_s),
    )


def _plan_request(flags: argparse.Namespace) -> PlanRequest:
    return PlanRequest(
        num_gpus=flags.gpus,
        host_bytes=flags.host_memory,
        disk_bytes=flags.disk,
        disk_path=flags.disk_path,
        deployment=flags.deployment or PlanRequest.deployment,
        workspace_bytes=flags.workspace,
        dtype=flags.dtype,
        max_running=flags.max_running,
        chunk_tokens=flags.chunk_tokens,
        max_context_len=flags.max_context_len,
    )


def _hit_rows(trace: Trace, memory: MemoryPlan, policy: str) -> Iterator[HitRow]:
    """Yield the hit rates under the plan's write policy: with the device alone, then with each further tier. Then with
    a host tier of twice the size, and with device and host as one tier, which is the maximum that a host can add. At
    last with a device without a limit."""
    tiers = memory.tiers
    row = partial(_hit_row, trace, ReplaySettings(1, policy=policy, write_policy=memory.write_policy))
    for number in range(1, len(tiers) + 1):
        yield row([(tier.name, tier.num_tokens) for tier in tiers[:number]])
    if len(tiers) > 1:
        device, host = ((tier.name, tier.num_tokens) for tier in tiers[:2])
        yield row([device, ("twice the host", 2 * host[1])])
        yield row([device, ("host as one tier", host[1])], one_tier)
    unlimited = replay(trace, ReplaySettings(device_blocks=None, host_blocks=0, disk_blocks=0, policy=policy))
    yield HitRow("without a limit", (None,), unlimited.hit_rate)


def _hit_row(
    trace: Trace,
    settings: ReplaySettings,
    sizes: list[tuple[str, int]],
    replayed: Callable[[Trace, ReplaySettings], ReplayResult] = replay,
) -> HitRow:
    blocks = [num_tokens // trace.block_tokens for _, num_tokens in sizes]
    device, host, disk = [*blocks, 0, 0][:3]
    names = " + ".join(name for name, _ in sizes)
    tokens = tuple(num_tokens for _, num_tokens in sizes)
    if not device:
        return HitRow(names, tokens, 0.0)
    # A tier smaller than one block stores no block. Without a host tier there is no disk tier.
    settings = dataclasses.replace(settings, device_blocks=device, host_blocks=host, disk_blocks=disk if host else 0)
    return HitRow(names, tokens, replayed(trace, settings).hit_rate)
