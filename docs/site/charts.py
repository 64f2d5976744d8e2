"""Charts of the result files and the picture of the demo, as SVG: `make tables` writes them into docs/pictures/.

A chart compares the measured bar of each case with the other side of the case, its ceiling. A chart has one light and
one dark palette, and the viewer's setting chooses. Text has no font of its own. Drawings are narrow, so that their text
is legible on a phone.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hicache.bench.common import Case, Report, percentile, read_report
from hicache.bench.machine import RESULTS
from hicache.bench.servers.runs import Run

PICTURES = Path(__file__).resolve().parent.parent / "pictures"
_WIDTH, _MARGIN, _BAR, _NUMBER_WIDTH = 440, 24, 13, 50  # pixels of the drawing
_SHOWN = 540  # pixels of its width on a page that is wide enough
_STYLE = """
  .card { fill: #ffffff; stroke: #d5dae0 } text { fill: #1b1f24 } .dim { fill: #59636e }
  .own { fill: #0072b2 } .other { fill: #b4bcc6 } .range { stroke: #1b1f24; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #363c43 } text { fill: #e6edf3 } .dim { fill: #9aa4af }
    .own { fill: #56b4e9 } .other { fill: #57606a } .range { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True)
class Row:
    """A case of a file. `other`: the words for its ceiling, if the chart has none for all rows."""

    label: str
    case: str
    file: str = ""
    other: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of bars. `unit`: of the values. `own`, `other`: names of the two bars. `file`:
    for rows without a file."""

    name: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    file: str
    own: str = "hicache"
    other: str = ""
    is_less_better: bool = False


def _rows(pattern: str, labels: Mapping[str | tuple[str, int], str]) -> tuple[Row, ...]:
    keys = {key if isinstance(key, tuple) else (key,): label for key, label in labels.items()}
    return tuple(Row(label, pattern.format(*key)) for key, label in keys.items())


_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
_SIZES = {"2mib": "2 MiB", "64mib": "64 MiB", "512mib": "512 MiB"}
_KERNELS = {"store": "store of k and v", "gather": "gather of pages", "move": "move of slots"}
_REMOTES = (
    ("mooncake", "Mooncake", 16, "remote-nvidia-h200.json"),
    ("mooncake", "Mooncake", 2, "remote-cpu-2core.json"),
    ("s3", "S3", 2, "remote-cpu-2core.json"),
)
CHARTS = (
    Chart(
        "device", "Kernels of the device tier, one H200", "GB/s",
        tuple(
            Row(f"{what}, {size}", f"{case}.{key}")
            for case, what in _KERNELS.items()
            for key, size in _SIZES.items()
        ),
        "device-nvidia-h200.json", other="a plain copy of as many bytes",
    ),
    Chart(
        "transfer", "Copies of pages between host and GPU, 8B geometry, one H200", "GB/s",
        _rows(
            "{}.gqa8b",
            {
                "up.page64.contiguous": "to the GPU, 64 tokens, contiguous",
                "up.page64.random": "to the GPU, 64 tokens, random",
                "up.page16.random": "to the GPU, 16 tokens, random",
                "down.page64.contiguous": "to the host, 64 tokens, contiguous",
                "down.page16.random": "to the host, 16 tokens, random",
                "both.total": "both directions, 64 tokens",
            },
        ),
        "transfer-nvidia-h200.json", other="pinned copies",
    ),
    Chart(
        "overlap", "A forward pass while its 32 768 tokens load from the host, one H200",
        "time of the slower alone / time of both",
        _rows(
            "overlap.suffix{}",
            {key: f"{key} new tokens are computed" for key in ("64", "256", "1024", "2048", "4096", "8192")},
        ),
        "overlap-nvidia-h200.json", other="the slower of load and compute, alone",
    ),
    Chart(
        "packed", "Packed pages: raw bytes copied in a second, one H100", "GB/s",
        _rows(
            "packed.{}",
            {
                "load.contiguous": "to the GPU, contiguous pages", "load.random": "to the GPU, random pages",
                "load.3bit": "to the GPU, 3 bits for an exponent", "store": "to the host",
                "both": "both directions", "load.1": "to the GPU, one load of 4096 tokens",
            },
        ),
        "packed-nvidia-h100-80gb-hbm3.json", other="a plain pinned copy",
    ),
    Chart(
        "disk", "The disk tier on a virtual disk, with 16 CPU cores", "GB/s",
        _rows(
            "{}",
            {
                "cold.8mib": "reads, pages of 8 MiB", "cold.2mib": "reads, pages of 2 MiB",
                "cold.128kib": "reads, pages of 128 KiB", "compressed.8mib": "reads, compressed pages of 8 MiB",
                "write.alone": "writes, pages of 8 MiB", "write.beside_readers": "writes while 4 threads read",
            },
        ),
        "disk-nvidia-h100-80gb-hbm3.json", other="plain files with O_DIRECT",
    ),
    Chart(
        "remote", "Remote stores, their servers on the same machine", "GB/s",
        tuple(
            Row(f"{store}: {way} pages, {cores} cores", f"{key}.{way}", file)
            for key, store, cores, file in _REMOTES
            for way in ("put", "get")
        ),
        "", other="the client library alone",
    ),
    Chart(
        "tree", "The prefix tree, a prompt of 100 000 tokens, 2 slow CPU cores", "us",
        _rows(
            "{}.page{}",
            {
                ("match", 64): "find a prefix, pages of 64 tokens", ("match", 1): "find a prefix, pages of 1 token",
                ("insert", 64): "insert a prefix, pages of 64 tokens",
            },
        ),
        "tree-cpu-2core.json", other="memcmp of the same bytes", is_less_better=True,
    ),
    Chart(
        "steps", "Python calls of hicache for one prompt of 128k tokens", "calls",
        _rows("prompt.{}.calls", {
                "device": "prompt in GPU memory", "host": "prompt in CPU memory", "disk": "prompt on disk",
                "cold": "new prompt",
            }),
        "steps-cpu-2core.json", is_less_better=True,
    ),
    Chart(
        "serving", "hicache's server, a model of 8B geometry, one H200", "share of the ceiling",
        _rows(
            "serving.{}",
            {
                "ttft.host.prefix8192": "first token, 8k on the host",
                "ttft.host.prefix32768": "first token, 32k on the host",
                "ttft.host.prefix130048": "first token, 127k on the host",
                "decode.context8192.batch1.compiled": "decode, 1 request, compiled",
                "decode.context8192.batch8.compiled": "decode, 8 requests, compiled",
            },
        ),
        "serving-nvidia-h200.json", other="ceiling in the same run",
    ),
    Chart(
        "both", "First token of 98k tokens, computed and loaded at once, one H200", "s",
        _rows(
            "both.{}",
            {
                "equal.98k": "store as fast as computing", "fast3": "store three times as fast",
                "slow3": "store a third as fast", "fast10": "store ten times as fast",
                "slow10": "store a tenth as fast",
            },
        ),
        "both-rates-eight-nvidia-h200.json", own="both at once", other="the faster of computing and loading",
        is_less_better=True,
    ),
    Chart(
        "vllm", "Documents of 16 384 tokens under vLLM 0.32, time to answer, one H100", "ms",
        (
            Row("first token, after a restart", "servers.vllm.restart.over_fs", other="vLLM's fs tier"),
            Row("8 tokens, document in CPU memory", "servers.vllm.host.one", other="vLLM's CPU tier"),
            Row("first token, new prompts", "servers.vllm.first", other="vLLM without offloading"),
        ),
        "servers-vllm-nvidia-h100-80gb-hbm3.json", is_less_better=True,
    ),
    Chart(
        "sessions", "300 turns of coding agents under vLLM 0.32, GPU cache capped at 81 920 tokens, one H100", "s",
        (
            Row("8 clients at once", "servers.vllm.sessions.disk.over_fs"),
            Row("32 clients at once", "servers.vllm.sessions.disk.over_fs.c32"),
        ),
        "servers-vllm-sessions-disk-nvidia-h100-80gb-hbm3.json", own="hicache, with a disk", other="vLLM's fs tier",
        is_less_better=True,
    ),
    Chart(
        "stream", "Eight streams while a prompt of 131k tokens arrives, one H200", "s",
        (
            Row("longest gap of a stream", "serving.stream.gap", other="the configured bound"),
            Row("first token of the prompt", "serving.stream.prompt", other="with chunks of 8192 tokens"),
        ),
        "serving-nvidia-h200.json", is_less_better=True,
    ),
)  # fmt: skip

_MAKESPAN_FILES = ("servers-nvidia-h200.json", "servers-32gib-nvidia-h200.json", "servers-disk-96gib-nvidia-h200.json")
_MODES = {
    "none": "no CPU tier",
    "cpu": "vLLM's CPU tier",
    "lazy": "vLLM's lazy CPU tier",
    "lmcache": "LMCache",
    "hicache": "HiCacheConnector",
}


def charts(results: Path = RESULTS) -> dict[str, str]:
    """Return the SVG of each chart by the name of its file."""
    drawn = {f"measured-{chart.name}.svg": _bars(chart, results) for chart in CHARTS}
    drawn["makespan.svg"] = makespan_chart([read_report(results / name) for name in _MAKESPAN_FILES])
    return drawn | {"demo.svg": terminal("hicache demo", demo_output())}


def makespans(reports: Sequence[Report]) -> dict[tuple[float, str], list[float]]:
    """Return the seconds until all agents' requests were answered under vLLM with the default sizes, by GiB of CPU
    memory and mode. Runs of a size and mode come from the first report that has them, because reports may be of
    different states of the code."""
    found: dict[tuple[float, str], list[float]] = {}
    for report in reports:
        own = defaultdict(list)
        for run in map(Run.from_json, report.runs):
            at = run.setting
            if (at.server, at.workload, at.variant) == ("vllm", "agents", "") and at.mode in _MODES:
                own[at.cpu_gib, at.mode].append(run.makespan_s)
        found = {**own, **found}
    return dict(sorted(found.items(), key=lambda bar: (bar[0][0], list(_MODES).index(bar[0][1]))))


def makespan_chart(reports: Sequence[Report]) -> str:
    """Return a chart with a bar for each mode, in groups by the size of the CPU tier. A bar is the median of its runs,
    and the line at its end is their range."""
    found = makespans(reports)
    title, x, y, group = "320 turns of agents under vLLM, one H200", 170, 44, 0.0
    scale = (_WIDTH - _MARGIN - x - _NUMBER_WIDTH) / max(map(max, found.values()))
    parts = [_heading([title], "seconds until the last answer; shorter bars are better")]
    without = next((percentile(seconds, 50) for (_, mode), seconds in found.items() if mode == "none"), None)
    for (size, mode), seconds in found.items():
        y += 24
        if size > group:
            parts.append(f'<g font-weight="bold">{_text(_MARGIN, y + 24, f"{size:g} GiB of CPU memory", 14)}</g>')
            y, group = y + 38, size
        low, median, high = (scale * seconds for seconds in (min(seconds), percentile(seconds, 50), max(seconds)))
        is_own = mode == "hicache"
        parts.append(_text(_MARGIN, y + 13, _MODES[mode], 14))
        parts.append(_bar("own" if is_own else "other", x, y, median, 17))
        if low < high:
            path = f"M{x + low:.1f} {y + 4}v9m0 -4.5H{x + high:.1f}m0 -4.5v9"
            parts.append(f'<path class="range" fill="none" d="{path}"/>')
        weight = ' font-weight="bold"' if is_own else ""
        number = f"{percentile(seconds, 50):.1f} s"
        parts.append(f"<g{weight}>{_text(_WIDTH - _MARGIN, y + 13, number, 14, 'end')}</g>")
    if without is not None:
        path = f"M{x + scale * without:.1f} 66V{y + 20}"
        parts.append(f'<path class="range" fill="none" stroke-dasharray="1 4" d="{path}"/>')
    most = max(map(len, found.values()))
    note = f"median and range of {most} runs; bars without a range: one run"
    parts.append(_text(_MARGIN, y + 46, note, 13, colour="dim"))
    parts.append(_text(_MARGIN, y + 63, "each size: its own session and state of the code", 13, colour="dim"))
    if without is not None:
        parts.append(_text(_MARGIN, y + 80, "dotted line: no CPU tier", 13, colour="dim"))
    return _svg(y + 79 + 17 * (without is not None), title, parts)


def demo_output() -> list[str]:
    """Return the lines of the demo's output, from the first block of output in docs/start.md."""
    return (PICTURES.parent / "start.md").read_text().partition("```text\n")[2].partition("```")[0].splitlines()


def terminal(command: str, output: Sequence[str]) -> str:
    """Return a picture of a terminal, dark on every page, with a command and its output."""
    rows = [f"$ {command}", *output]
    width, height = 48 + round(7.83 * max(map(len, rows))), 64 + 19 * len(rows)
    colours = ("#ff5f58", "#ffbd2e", "#18c132")
    dots = [f'<circle cx="{24 + 20 * index}" cy="22" r="6" fill="{fill}"/>' for index, fill in enumerate(colours)]
    texts = [
        f'<text x="24" y="{60 + 19 * index}" fill="{"#7ee787" if row.startswith("identical") else "#c9d1d9"}">'
        f"{escape(row)}</text>"
        for index, row in enumerate(rows)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13">\n'
        f"<title>{escape(command)}</title>\n<style>text {{ white-space: pre }}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>\n' + "\n".join([*dots, *texts, "</svg>\n"])
    )


def _cases(rows: Sequence[Row], default: str, results: Path) -> Iterator[tuple[Row, Case]]:
    reports: dict[str, Report] = {}
    for row in rows:
        file = row.file or default
        if file not in reports:
            reports[file] = read_report(results / file)
        yield row, next(case for case in reports[file].cases if case.name == row.case)


def _bars(chart: Chart, results: Path) -> str:
    cases = [*_cases(chart.rows, chart.file, results)]
    has_others = any(case.ceiling is not None for _, case in cases)
    top = max(max(case.value, case.ceiling or 0) for _, case in cases)
    scale = (_WIDTH - 2 * _MARGIN - _NUMBER_WIDTH) / top
    titles = textwrap.wrap(chart.title, 52)
    better = "shorter" if chart.is_less_better else "longer"
    parts = [_heading(titles, f"{_UNITS.get(chart.unit, chart.unit)}; {better} bars are better")]
    y = 42 + 18 * len(titles)
    for row, case in cases:
        parts.append(_text(_MARGIN, y + 13, row.label, 14))
        parts.append(_text(_WIDTH - _MARGIN, y + 13, row.other, 13, "end", "dim"))
        y += 19
        for name, value in (("own", case.value), ("other", case.ceiling)):
            if value is not None:
                width = max(1.0, scale * value)
                parts.append(_bar(name, _MARGIN, y, width, _BAR))
                parts.append(_text(_MARGIN + 6 + width, y + 11, _number(value), 13, colour="dim" * (name == "other")))
                y += _BAR + 1
        y += 9
    if has_others:
        other = chart.other or "the one named in grey at the right"
        parts.append(_legend(y + 14, [("own", chart.own), ("other", other)]))
        y += 20
    return _svg(y + 10, chart.title, parts)


def _bar(name: str, x: float, y: float, width: float, height: int) -> str:
    return f'<rect class="{name}" x="{x}" y="{y}" width="{width:.1f}" height="{height}" rx="2"/>'


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text class="{colour}" {place}>{escape(text)}</text>' if text else ""


def _heading(titles: Sequence[str], note: str) -> str:
    lines = "".join(_text(_MARGIN, 28 + 18 * index, title, 14) for index, title in enumerate(titles))
    return f'<g font-weight="bold">{lines}</g>{_text(_MARGIN, 29 + 18 * len(titles), note, 13, colour="dim")}'


def _legend(y: int, names: Sequence[tuple[str, str]]) -> str:
    parts, x = [], _MARGIN
    for colour, name in names:
        parts.append(_bar(colour, x, y - 10, 11, 11))
        parts.append(_text(x + 17, y, name, 13, colour="dim"))
        x += 36 + round(6.3 * len(name))
    return "".join(parts)


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(filter(None, parts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_SHOWN}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="14">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="10"/>\n{body}\n</svg>\n'
    )


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:#.3g}".removesuffix(".")
