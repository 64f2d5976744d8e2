"""The plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hicache.terminal import printable

_GIB = 1 << 30


def show(plan: Mapping[str, Any], console: Console) -> None:
    """Print what `Plan.to_json` gives."""
    model, machine, memory = plan["model"], plan["machine"], plan["memory"]
    gpus = machine["num_gpus"]
    layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    name = f"{printable(model['name'])} on {gpus} x {printable(machine['gpu']['name'])}"
    rows = [
        ("weights", f"{model['num_weights'] / 1e9:.2f} billion, {model['num_active'] / 1e9:.2f} for a token"),
        ("layers", layers + (f"; window of {model['window']} tokens" if model["window"] else "")),
        ("longest context", f"{_tokens(memory['max_context_len'])} of the model's {_tokens(model['max_context_len'])}"),
        ("a token, kept whole", f"{memory['token_bytes']:,} bytes on each GPU"),
    ]
    if memory["window_token_bytes"]:
        rows.append(("a token in a window", f"{memory['window_token_bytes']:,} bytes on each GPU"))
    if memory["state_bytes"]:
        rows.append(("a state of a request", f"{memory['state_bytes']:,} bytes on each GPU"))
    console.print(_table(name, ("", ""), rows))
    total = machine["gpu"]["memory_bytes"]
    parts = [(part, memory[f"{part}_bytes"]) for part in ("weight", "pool", "workspace")]
    shares = [(part, _gib(num_bytes), f"{num_bytes / total:.0%}") for part, num_bytes in parts]
    console.print(_table("memory of a GPU", ("", "GiB", "share"), shares))
    tiers = [(t["name"], _gib(t["num_bytes"]), _tokens(t["num_tokens"]), _states(t)) for t in plan["tiers"]]
    console.print(_table("tiers", ("tier", "GiB", "tokens", "states"), tiers))
    _show_times(plan, console)
    if plan["hit_rates"]:
        hits = [(row["tiers"], " + ".join(map(_tokens, row["num_tokens"])), f"{row['hit_rate']:.4f}")
                for row in plan["hit_rates"]]  # fmt: skip
        console.print(_table("hit rate of the trace", ("tiers", "tokens", "hit rate"), hits))
    if plan["serve"]:
        console.print("start with", style="bold")
        console.print(f"  {plan['serve']}", soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(f"hicache serve uses one GPU. For each of {gpus} processes of another server:", style="bold")
        settings = " ".join(f"{setting}={value}" for setting, value in plan["engine"].items())
        console.print(f"  {printable(settings)}", soft_wrap=True, markup=False, highlight=False)


def _show_times(plan: Mapping[str, Any], console: Console) -> None:
    rows = [
        (
            _tokens(at["num_tokens"]),
            _gib(at["num_bytes"]),
            *(_ms(at[f"{name}_s"]) for name in ("compute", "load", "disk")),
        )
        for at in plan["times"]
    ]
    console.print(_table("time of a prefix", ("tokens", "GiB", "compute ms", "from host ms", "from disk ms"), rows))
    gpu = plan["machine"]["gpu"]
    if not gpu["flops_per_s"] or not gpu["link_bytes_per_s"]:
        console.print("rates are unknown: give --gpu-tflops, --gpu-bandwidth and --link-rate")
        return
    for tier, tokens in plan["break_even_tokens"].items():
        if tier in {t["name"] for t in plan["tiers"]}:
            verdict = "never pays" if tokens is None else f"pays from {_tokens(tokens)} tokens on"
            console.print(f"loading from the {tier} {verdict}")


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not column else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _states(tier: Mapping[str, Any]) -> str:
    return _tokens(tier["num_states"]) if tier["num_states"] else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.2f}"


def _tokens(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"
