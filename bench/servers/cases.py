"""Computes the cases of a result file: numbers for each setting, and comparisons of modes with equal sizes.

    servers.<server>.<workload>.<mode>[.<GiB>][.<variant>].makespan, .first, .p99, .between, .cached, .start, .moved,
        .missed, .declined
    servers.<server>.<workload>.<comparison>[.<GiB>][.<variant>]

The value of a case is the median over the runs of a setting. The ratio of a comparison is this value over the median of
the other mode. A variant names the sizes that are not the defaults: c8 (clients), tmpfs (files), 12x8x6000 (sessions,
turns, growth), gpu81920.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.bench.common import Report, percentile
from hicache.bench.servers.runs import Run, Setting

_Values = Callable[[Run], float]


@dataclass(frozen=True)
class _Row:
    """A comparison of the medians of `mode` and of the best of `others`. `targets`: targets by GiB of the CPU tier; {0:
    x} applies to all sizes, and the case's name then has no size. `needs_all`: compare only if all `others` were
    measured."""

    name: str
    mode: str
    others: tuple[str, ...]
    targets: Mapping[float, float]
    values: _Values = field(default=lambda run: run.makespan_s)
    unit: str = "s"
    needs_all: bool = True


_OTHERS = ("none", "cpu", "lazy", "lmcache")
_ROWS: dict[tuple[str, str], tuple[_Row, ...]] = {
    ("vllm", "agents"): (
        _Row("over_lazy", "hicache", ("lazy",), {32: 0.92, 64: 0.82, 96: 0.87}),
        _Row("over_cpu", "hicache", ("cpu",), {64: 0.65}),
        _Row("over_none", "hicache", ("none",), {64: 0.65}),
        _Row("over_lmcache", "hicache", ("lmcache",), {64: 0.70}),
        _Row("packing", "hicache", ("raw",), {64: 1.0}),
        _Row("ttft_mean", "hicache", _OTHERS, {64: 0.85}, lambda run: run.first_ms["mean"], "ms", needs_all=False),
        _Row("ttft_p99", "hicache", _OTHERS, {64: 1.0}, lambda run: run.first_ms["p99"], "ms", needs_all=False),
        _Row("start", "hicache", ("cpu",), {96: 1.1}, lambda run: run.start_s),
        _Row("disk.over_fs", "disk", ("fs",), {0: 0.85}),
        _Row("disk.gate", "disk", ("disk-always", "disk-never"), {0: 1.03}),
    ),
    ("vllm", "conversation"): (
        _Row("over_none", "hicache", ("none",), {0: 1.01}),
        _Row("over_cpu", "hicache", ("cpu",), {0: 1.01}),
    ),
    ("sglang", "agents"): (
        _Row("over_files", "hicache", ("files",), {0: 0.9}),
        _Row("over_none", "hicache", ("none",), {0: 0.8}),
    ),
}
_SHARE_TARGETS = {32.0: 0.73, 64.0: 0.80}
_CONTROL = "cpu"  # mode whose runs are compared with each other, to measure noise


def add_cases(report: Report, runs: Sequence[Run], *, small: bool) -> None:
    """Add all cases of the runs. `small`: the model is tiny, so the cases have no targets."""
    samples: dict[Setting, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.setting.cpu_gib):
        samples.setdefault(run.setting, []).append(run)
    for setting, found in samples.items():
        base = f"servers.{setting.server}.{setting.workload}"
        _add_setting(report, f"{base}.{_named(setting.mode, setting)}", found)
        if (setting.server, setting.workload, setting.mode) == ("vllm", "agents", "hicache"):
            shares, target = [run.cached["all"] for run in found], _SHARE_TARGETS.get(setting.cpu_gib)
            name, note = f"{base}.{_named('share', setting)}", found[0].cached_text
            report.case(name, shares, "share", ceiling=1.0, target=_target(target, setting, small), note=note)
        if setting.mode == _CONTROL and len(found) > 1:
            _add_control(report, f"{base}.{_named('control', setting)}", found)
        for row in _ROWS.get((setting.server, setting.workload), ()):
            if row.mode == setting.mode:
                _add_row(report, base, row, setting, samples, small)


def _named(name: str, setting: Setting, *, has_size: bool = True) -> str:
    size = [f"{setting.cpu_gib:g}"] if has_size and setting.cpu_gib else []
    return ".".join([name, *size, *([setting.variant] if setting.variant else [])])


def _target(target: float | None, setting: Setting, small: bool) -> float | None:
    return None if small or setting.variant else target


def _add_setting(report: Report, name: str, runs: Sequence[Run]) -> None:
    first, setting = runs[0], runs[0].setting
    cap = f"{setting.gpu_tokens} tokens" if setting.gpu_tokens else "not capped"
    about = f"{setting.clients} clients; the GPU's cache {cap}; {first.prompts}"
    about += f"; files on {setting.files}" if setting.files else ""
    about += f"; {first.num_gpus} GPUs at once" if first.num_gpus > 1 else ""
    span = [run.makespan_s for run in runs]
    report.case(f"{name}.makespan", span, "s", better="lower", note=f"{_range(span)}; {about}")
    means, p99 = [run.first_ms["mean"] for run in runs], [run.first_ms["p99"] for run in runs]
    report.case(f"{name}.first", means, "ms", better="lower", note="; ".join(run.first_text for run in runs))
    report.case(f"{name}.p99", p99, "ms", better="lower", note=_range(p99))
    if measured := [run for run in runs if run.between_ms]:
        note = "; ".join(run.between_text for run in measured)
        report.case(f"{name}.between", [run.between_ms["mean"] for run in measured], "ms", better="lower", note=note)
    cached = "; ".join(run.cached_text for run in runs)
    report.case(f"{name}.cached", [run.cached["all"] for run in runs], "share", note=cached)
    report.case(f"{name}.start", [run.start_s for run in runs], "s", better="lower")
    if first.moved_gb:
        moved = ", ".join(f"{what} {gb:.2f} GB" for what, gb in first.moved_gb.items())
        report.case(f"{name}.moved", [sum(run.moved_gb.values()) for run in runs], "GB", better="lower", note=moved)
    if first.missed:
        note = "; ".join(", ".join(f"{why} {share:.3f}" for why, share in run.missed.items()) for run in runs)
        report.case(f"{name}.missed", [sum(run.missed.values()) for run in runs], "share", better="lower", note=note)
    if decided := sum(first.gate.values()):
        note = ", ".join(f"{what} {number:.0f}" for what, number in first.gate.items())
        report.case(f"{name}.declined", [first.gate.get("declined", 0.0) / decided], "share", note=note)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g} in {len(values)} runs"


def _add_control(report: Report, name: str, runs: Sequence[Run]) -> None:
    """Add a case with the slowest run of a mode over its fastest run. Smaller differences between modes are noise."""
    ordered = sorted(runs, key=lambda run: run.makespan_s)
    differing = ordered[-1].differing_share(ordered[0])
    note = f"the same mode twice; {differing:.3f} of the answers differ"
    fastest, slowest = ordered[0].makespan_s, ordered[-1].makespan_s
    report.case(name, [slowest], "s", better="lower", ceiling=fastest, note=note)


def _add_row(
    report: Report, base: str, row: _Row, setting: Setting, samples: Mapping[Setting, Sequence[Run]], small: bool
) -> None:
    others: dict[str, Sequence[Run]] = {}
    for other, runs in samples.items():
        is_as_large = other.cpu_gib == setting.cpu_gib or other.mode == "none"
        if other.mode in row.others and is_as_large and _outer(other, setting) == _outer(setting, setting):
            others[other.mode] = runs
    if not others or (row.needs_all and len(others) < len(row.others)):
        return
    best = min(others, key=lambda mode: percentile([row.values(run) for run in others[mode]], 50))
    target = row.targets.get(0, row.targets.get(setting.cpu_gib))
    alike = {one.cpu_gib for one in samples if one.mode == row.mode and one.variant == setting.variant}
    has_size = 0 not in row.targets or len(alike) > 1
    values, ceiling = ([row.values(run) for run in runs] for runs in (samples[setting], others[best]))
    differing = samples[setting][0].differing_share(others[best][0])
    note = f"{setting.mode}, {_range(values)}, over {best}, {_range(ceiling)}; {differing:.3f} of the answers differ"
    note += f"; of {', '.join(others)}" if len(row.others) > 1 else ""
    report.case(
        f"{base}.{_named(row.name, setting, has_size=has_size)}",
        values,
        row.unit,
        better="lower",
        ceiling=ceiling,
        target=_target(target, setting, small),
        note=note,
    )


def _outer(setting: Setting, of: Setting) -> tuple[object, ...]:
    """Return the sizes in `setting` that must equal the sizes in `of`, so that both settings can be compared."""
    shared = (setting.server, setting.workload, setting.sizes, setting.clients, setting.gpu_tokens)
    return *shared, setting.files or of.files
