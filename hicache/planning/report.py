"""Prints the plan as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache.console import columns, counted, gib, milliseconds, percent, print_table, printable


def show(plan: Mapping[str, Any], deployment: str | None = None) -> None:
    """Print a plan as tables; `plan` is the result of `Plan.to_json`. `deployment`: prints the tokens of device and
    host only for this key of DEPLOYMENTS."""
    model, machine, memory = plan["model"], plan["machine"], plan["memory"]
    gpus, gpu = machine["num_gpus"], machine["gpu"]
    layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    longest, positions = counted(memory["max_context_len"]), counted(model["max_context_len"])
    rows = [
        ("weights", f"{model['num_weights'] / 1e9:.2f} billion, {model['num_active'] / 1e9:.2f} for a token"),
        ("layers", layers + (f"; window of {model['window']} tokens" if model["window"] else "")),
        ("longest context", f"{longest} of the model's {positions}"),
        ("a token", f"{memory['token_bytes']:,} bytes on each GPU"),
    ]
    if memory["window_token_bytes"]:
        rows.append(("a token in a window", f"{memory['window_token_bytes']:,} bytes on each GPU"))
    if memory["state_bytes"]:
        rows.append(("a state of a request", f"{memory['state_bytes']:,} bytes on each GPU"))
    print(printable(f"{model['name']} on {gpus} x {gpu['name']}"))
    print(columns(rows), end="\n\n")
    parts = [(part, memory[f"{part}_bytes"]) for part in ("weight", "pool", "workspace")]
    shares = [(part, gib(num_bytes), percent(num_bytes / gpu["memory_bytes"])) for part, num_bytes in parts]
    print_table(("", "GiB", "share"), shares, title="memory of a GPU")
    tiers = [
        (tier["name"], gib(tier["num_bytes"]), counted(tier["num_tokens"]), f"{tier['num_states'] or ''}")
        for tier in plan["tiers"]
    ]
    of_serve = (
        "the device tier is the GPU cache of hicache serve; vLLM logs the tokens of its own as `GPU KV cache size`"
    )
    notes = [] if deployment in (None, "serve") else [of_serve]
    all_gpus_bytes = memory["token_bytes"] * plan["machine"]["num_gpus"]
    packed = [tier["name"] for tier in plan["tiers"][1:] if tier["num_tokens"] * all_gpus_bytes > tier["num_bytes"]]
    if packed and not memory["window_token_bytes"]:
        notes.append(f"pages of {' and '.join(packed)} are packed: a token has fewer bytes there")
    print_table(("tier", "GiB", "tokens", "states"), tiers, title="tiers", notes=notes)
    _show_deployments(plan, deployment)
    _show_times(plan)
    if plan["hit_rates"]:
        hits = [
            (row["tiers"], " + ".join(map(counted, row["num_tokens"])), f"{row['hit_rate']:.4f}")
            for row in plan["hit_rates"]
        ]
        print_table(("tiers", "tokens", "hit rate"), hits, title="hit rate of the trace")
    for note in plan["notes"]:
        print(f"note: {note}")
    if plan["serve"]:
        print("start with", f"  {printable(plan['serve'])}", sep="\n")
    elif deployment in (None, "serve"):
        settings = " ".join(f"{setting}={value}" for setting, value in plan["engine"].items())
        other = f"hicache serve uses one GPU. For each of {gpus} processes of another server:"
        print(other, f"  {printable(settings)}", sep="\n")


def _show_deployments(plan: Mapping[str, Any], deployment: str | None) -> None:
    """Print how many different tokens device and host store together, and how many of them the host adds."""
    rows, without_gain = [], []
    for row in plan["deployments"]:
        if deployment not in (None, row["deployment"]):
            continue
        name = f"write_policy={row['stores']}" if row["deployment"] == "serve" else f"vLLM, {row['stores']}"
        adds_up = row["memory_tokens"] == sum(tier["num_tokens"] for tier in plan["tiers"][:2])
        stored = "evicted from the device" if adds_up else "computed"
        rows.append((name, stored, counted(row["memory_tokens"]), counted(row["added_tokens"])))
        if not row["added_tokens"]:
            without_gain.append(name)
    if rows:
        names = " and ".join(without_gain)
        notes = [f"{names}: the host adds no tokens, because it is not larger than the device"] if names else []
        headings = ("deployment", "host stores pages", "different tokens", "added by host")
        print_table(headings, rows, title="device and host together", notes=notes)


def _show_times(plan: Mapping[str, Any]) -> None:
    rows = [
        (
            counted(at["num_tokens"]),
            gib(at["num_bytes"]),
            *(milliseconds(at[f"{name}_s"]) for name in ("compute", "load", "disk")),
        )
        for at in plan["times"]
    ]
    notes = []
    gpu = plan["machine"]["gpu"]
    if not gpu["flops_per_s"] or not gpu["link_bytes_per_s"]:
        notes.append("rates are unknown: give --gpu-tflops, --gpu-bandwidth and --link-rate")
    else:
        for tier, tokens in plan["break_even_tokens"].items():
            if tier in {t["name"] for t in plan["tiers"]}:
                verdict = "for no length" if tokens is None else f"from {counted(tokens)} tokens on"
                rate = plan["machine"]["disk_bytes_per_s"] / 1e9
                where = f"a disk of {rate:g} GB/s (--disk-rate)" if tier == "disk" else f"the {tier}"
                notes.append(f"loading from {where} is not slower than computing {verdict}")
    headings = ("tokens", "GiB", "compute ms", "from host ms", "from disk ms")
    print_table(headings, rows, title="time of a prefix", notes=notes)
