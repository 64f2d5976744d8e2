"""A sweep of replays as one HTML page that opens without a network. Needs the extra `replay`: matplotlib and jinja2.

The page holds the facts of the trace, a table of hit rates by capacity and policy, one row of figures a result, and the
plots of `hicache.replay.plots`. `docs/replay.md` explains each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.console import counted, write_whole
from hicache.errors import ConfigError
from hicache.replay import plots
from hicache.replay.nodes import NodeSettings, NodesResult
from hicache.replay.plots import ANY_TIER, OPTIMAL, UNLIMITED, Curve, Numbers, Panel
from hicache.replay.simulation import ReplayResult, ReplaySettings
from hicache.replay.trace import Trace

_NUM_TIMES = 60  # steps of the hit rate over time
_MAX_COLUMNS = 4  # panels beside each other


class _Plot(NamedTuple):
    """A section of the page. `what` says what the figure shows, `look` what to look for in it."""

    title: str
    what: str
    look: str
    svg: str


def require_report_packages() -> None:
    """ImportError that names a missing package which a report needs: call it before a long replay."""
    import jinja2  # noqa: F401

    plots.style()


def write_report(path: Path, trace: Trace, results: Sequence[ReplayResult]) -> None:
    """Write the page of `results`, replays of `trace`, to `path`, as `write_whole` does."""
    write_whole(path, render(trace, results))


def render(trace: Trace, results: Sequence[ReplayResult]) -> str:
    """The page. `results`: at least one, each of a replay of all requests of `trace`."""
    import jinja2

    if not results:
        raise ConfigError("a report needs at least one result; replay with at least one capacity and one policy")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["rate"] = _rate
    template = environment.from_string((resources.files("hicache.replay") / "report.html.j2").read_text("utf-8"))
    sweep = _Sweep(results)
    return template.render(
        trace_name=trace.name,
        facts=[*_facts(trace), *_node_facts(sweep.nodes)],
        sweep=sweep,
        rows=result_rows(results),
        plots=_plots(sweep),
        has_times=all(_has_times(result) for result in results),
    )


class _Sweep:
    """Results by capacity and policy, both in the order in which they came. Unlimited ones stand apart."""

    def __init__(self, results: Sequence[ReplayResult]) -> None:
        self.results = results
        limited = [result for result in results if not _is_unlimited(result)]
        self.by_pair = {(_capacity(result.settings), result.name): result for result in limited}
        self.capacities = list(dict.fromkeys(capacity for capacity, _ in self.by_pair))
        self.policies = sorted(dict.fromkeys(name for _, name in self.by_pair), key=lambda name: name == OPTIMAL)
        self.unlimited = next((result for result in results if _is_unlimited(result)), None)
        self.nodes = next((result.nodes for result in results if isinstance(result, NodesResult)), None)
        self.hits_any = any(result.tokens_saved for result in results)
        told_apart = [result for result in results if not _is_bound(result)]
        self.tiers = list(dict.fromkeys(tier for r in told_apart for tier, hits in r.hit_blocks.items() if hits.any()))

    def rate(self, capacity: str, policy: str) -> float:
        """NaN for a pair that was not replayed."""
        result = self.by_pair.get((capacity, policy))
        return float("nan") if result is None else result.hit_rate

    def is_best(self, capacity: str, policy: str) -> bool:
        """Whether no policy hits more. The optimal one is left out: it knows the future."""
        if policy == OPTIMAL:
            return False
        rates = [self.rate(capacity, other) for other in self.policies if other != OPTIMAL]
        return bool(self.rate(capacity, policy) == np.nanmax(rates))

    def panels(self, values: Callable[[ReplayResult], Numbers | NDArray[np.int64]]) -> list[Panel]:
        """A panel a capacity with a curve a policy, and the unlimited one in each."""
        found = []
        for capacity in self.capacities or ["unlimited"]:
            named = {policy: self.by_pair.get((capacity, policy)) for policy in self.policies}
            pairs = {**named, UNLIMITED: self.unlimited}
            curves = [
                Curve(name, values(result).astype(np.float64)) for name, result in pairs.items() if result is not None
            ]
            found.append(Panel(f"{capacity} blocks", curves))
        return found


def _is_bound(result: ReplayResult) -> bool:
    """Whether it is what some cache could hit: that has no tiers."""
    return result.name in (OPTIMAL, UNLIMITED)


def _is_unlimited(result: ReplayResult) -> bool:
    return result.name == UNLIMITED


def _title(result: ReplayResult) -> str:
    return UNLIMITED if _is_unlimited(result) else f"{result.name}\n{_capacity(result.settings)}"


def _capacity(settings: ReplaySettings) -> str:
    """`1,000` of a device alone, `1,000 + 6,000` of device and host, and so on."""
    blocks = [settings.device_blocks, settings.host_blocks, settings.disk_blocks]
    while len(blocks) > 1 and not blocks[-1]:
        blocks.pop()
    return " + ".join(counted(size) for size in blocks)


def result_rows(results: Sequence[ReplayResult]) -> list[dict[str, str]]:
    """A line a result, its cells by column, for the page and the terminal alike."""
    sweep = _Sweep(results)
    best = {result.settings.total_blocks: result.hit_rate for result in results if _is_bound(result)}
    return [_row(result, sweep, best.get(result.settings.total_blocks)) for result in results]


def _row(result: ReplayResult, sweep: _Sweep, best: float | None) -> dict[str, str]:
    cells = {
        "policy": result.name,
        "capacity": _capacity(result.settings),
        "hit rate": _rate(result.hit_rate),
        **{tier: "" if _is_bound(result) else _rate(result.tier_hit_rates.get(tier, 0.0)) for tier in sweep.tiers},
        "of optimal": f"{result.hit_rate / best:.3f}" if best else "",
        "tokens saved": counted(result.tokens_saved),
    }
    if sweep.nodes is not None:
        cells["busiest node"] = f"{result.imbalance:.2f}" if isinstance(result, NodesResult) else ""
    if _has_times(result):
        p50, p99 = np.percentile(result.ttft_s, (50, 99))
        cells |= {"TTFT mean, s": f"{result.ttft_s.mean():.3f}", "p50": f"{p50:.3f}", "p99": f"{p99:.3f}"}
    return cells


def _facts(trace: Trace) -> list[tuple[str, str]]:
    requests = trace.requests
    prompts = np.array([request.input_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    blocks = np.concatenate([request.blocks for request in requests])
    sessions = {request.session for request in requests} - {""}
    seconds = requests[-1].time_s - requests[0].time_s
    facts = [
        ("requests", counted(len(requests))),
        ("time", f"{counted(round(seconds))} s"),
        ("tokens of a block", counted(trace.block_tokens)),
        ("tokens of a prompt", _spread(prompts)),
        ("tokens of an output", _spread(outputs)),
        ("blocks asked for", counted(len(blocks))),
        ("different blocks", counted(len(np.unique(blocks)))),
    ]
    return [*facts, ("sessions", counted(len(sessions)))] if sessions else facts


def _node_facts(nodes: NodeSettings | None) -> list[tuple[str, str]]:
    if nodes is None:
        return []
    remote = "none" if nodes.remote_blocks == 0 else f"{counted(nodes.remote_blocks)} blocks"
    return [("nodes", counted(nodes.num_nodes)), ("router", nodes.router), ("remote tier", remote)]


def _plots(sweep: _Sweep) -> list[_Plot]:
    makers = (_hit_rate_plot, _over_time_plot, _saved_plot, _first_token_plot)
    with plots.style():
        found = [plot for plot in (maker(sweep) for maker in makers) if plot is not None]
    return [plot._replace(svg=plots.inline(plot.svg, f"plot{number}")) for number, plot in enumerate(found)]


def _hit_rate_plot(sweep: _Sweep) -> _Plot | None:
    if not sweep.capacities:
        return None
    curves = [Curve(p, np.array([sweep.rate(c, p) for c in sweep.capacities])) for p in sweep.policies]
    return _Plot(
        "Hit rate by capacity",
        "The share of all blocks asked for that some tier held, for each capacity; one line a policy.",
        "A policy is worth its place where its line stands above the others, and no policy can pass the optimal one. "
        "Where a line reaches the dotted one, more capacity brings nothing.",
        plots.hit_rates(sweep.capacities, curves, sweep.unlimited.hit_rate if sweep.unlimited else None),
    )


def _over_time_plot(sweep: _Sweep) -> _Plot | None:
    first = sweep.results[0]
    edges = np.linspace(first.time_s[0], first.time_s[-1], _NUM_TIMES + 1)
    step = np.clip(np.searchsorted(edges, first.time_s, side="right") - 1, 0, _NUM_TIMES - 1)
    asked = np.bincount(step, first.num_blocks, _NUM_TIMES)
    used = asked > 0
    if used.sum() < 2 or not sweep.hits_any:
        return None

    def rate(hits: Numbers | NDArray[np.int64]) -> Numbers:
        return np.bincount(step, hits, _NUM_TIMES)[used] / asked[used]

    def curves(result: ReplayResult) -> list[Curve]:
        if _is_bound(result):
            return [Curve(ANY_TIER, rate(np.sum(list(result.hit_blocks.values()), axis=0)))]
        return [Curve(tier, rate(hits)) for tier, hits in result.hit_blocks.items() if tier in sweep.tiers]

    panels = [Panel(_title(result), curves(result)) for result in sweep.results]
    middles_s = ((edges[:-1] + edges[1:]) / 2)[used]
    return _Plot(
        "Hit rate of each tier over time",
        f"The share of the blocks asked for that each tier held, in {_NUM_TIMES} equal steps of the trace's time, "
        "stacked: the upper edge is the hit rate of all tiers. What any order, or a cache without limit, could hit has "
        "no tiers.",
        "A rise at the start is the cache filling. A fall that one policy shows and the optimal one does not is "
        "something evicted too early, often for a burst of prompts that never return. A tier that stays thin is hardly "
        "used.",
        plots.tiers_over_time(middles_s, panels, max(1, min(len(sweep.policies), _MAX_COLUMNS))),
    )


def _saved_plot(sweep: _Sweep) -> _Plot | None:
    if not sweep.hits_any:
        return None
    panels = sweep.panels(lambda result: result.hit_tokens)
    return _Plot(
        "Tokens saved per request",
        "For each number of tokens, the share of requests for which at least so many tokens of the prompt came from a "
        "tier and were not computed.",
        "The height at the left is the share of requests that hit at all. A steep fall at one number is a prefix of "
        "that length which many requests share; a line that stays up far to the right saves whole long prompts.",
        plots.saved_tokens(panels, min(2, len(panels))),
    )


def _first_token_plot(sweep: _Sweep) -> _Plot | None:
    if not all(_has_times(result) for result in sweep.results):
        return None
    panels = sweep.panels(lambda result: result.ttft_s)
    return _Plot(
        "Time to first token",
        "For each time, the share of requests whose first token came by then, by the cost model: the time to load what "
        "the tiers hold and to compute the rest, without a queue. For optimal and unlimited no load takes time.",
        "Lines further left are faster; the gap between two lines at one height is what a policy saves the requests of "
        "that rank. The upper right end are long prompts that missed.",
        plots.times_to_first_token(panels, min(2, len(panels))),
    )


def _has_times(result: ReplayResult) -> bool:
    """Whether a cost model gave times to first token."""
    return not np.isnan(result.ttft_s).any()


def _rate(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.4f}"


def _spread(values: NDArray[np.int64]) -> str:
    middle, tail = np.percentile(values, (50, 95))
    return f"mean {counted(round(values.mean()))}, median {counted(round(middle))}, p95 {counted(round(tail))}"
