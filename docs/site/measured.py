"""README's table of measurements, from the files in bench/results/.

A row quotes one case: its value, its ceiling, which is the value of the other side, and before both their ratio in
words. Both have enough digits that a reader who divides them gets this ratio. The words of further figures come from
the names of their cases, so that no two sides can be exchanged. A row has alternatives: the first one whose file has
all of its cases is shown. So figures of a release replace older ones when their files are there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.bench.common import Case, read_report
from hicache.bench.machine import RESULTS

# Words for the other side of a case, by its name, or by the last word of its name before a size.
_SIDES = {
    "over_lazy": "with vLLM's lazy CPU tier",
    "over_cpu": "with vLLM's CPU tier",
    "over_none": "without a tier",
    "over_lmcache": "with LMCache",
    "over_fs": "with vLLM's `fs` tier",
    "over_files": "with SGLang's files",
    "gate": "if hicache always loads",
    "servers.sglang.sessions.disk.c8": "with SGLang's own files",
}


@dataclass(frozen=True)
class Row:
    """A row. `measured` and `compared` are formats of the case's `value` and `ceiling`, and of numbers in its note by
    the word before them; if `compared` is "", its words come from the case's name. `others`: cases whose ceilings
    follow. `{runs}` in `what` becomes the fewest runs of a side of these cases, by their notes. `conclusion`: words
    after the ratio, if "" those of a time or of an amount."""

    what: str
    case: str
    file: str
    measured: str
    compared: str = ""
    others: tuple[str, ...] = ()
    conclusion: str = ""

    def cells(self, cases: dict[str, Case], folder: str) -> list[str]:
        """The ratio, both sides, and the workload with a link to the file in `folder`. The name of the case may break
        after a dot."""
        case = cases[self.case]
        assert case.ceiling is not None
        notes = {word: float(number) for word, number in re.findall(r"([a-z]+) (\d+\.?\d*)", case.note)}
        form = re.sub("value", "ceiling", self.measured.partition("}")[0]) + "}"
        compared = self.compared or f"{self.measured.replace('value', 'ceiling')} {_side(self.case)}"
        compared = compared.format(ceiling=case.ceiling, **notes)
        compared += "".join(f", {form.format(ceiling=cases[name].ceiling)} {_side(name)}" for name in self.others)
        runs = _runs([cases[name].note for name in (self.case, *self.others)]) if "{runs}" in self.what else ""
        measured = self.measured.format(value=case.value, **notes)
        link = f"[<code>{self.case.replace('.', '.<wbr>')}</code>]({folder}/{self.file})"
        ratio = f"**{conclusion(case, self.conclusion)}**"
        return [ratio, _grouped(measured), _grouped(compared), f"{self.what.replace('{runs}', runs)}<br>{link}"]


def conclusion(case: Case, words: str = "") -> str:
    """Return the ratio of a case's value to its ceiling in words. `words` follow a percentage by which the value is
    higher."""
    assert case.ceiling is not None
    if words:
        return f"{case.value / case.ceiling - 1:.0%} {words}".replace("%", " %")
    if case.better == "higher":
        return f"{case.value / case.ceiling - 1:.0%} more".replace("%", " %")
    if case.value < case.ceiling:
        return f"{case.ceiling / case.value:.1f} times as fast"
    return f"{case.value / case.ceiling - 1:.0%} slower".replace("%", " %")


def _runs(notes: Sequence[str]) -> str:
    fewest = min(int(number) for note in notes for number in re.findall(r"in (\d+) runs", note))
    return "one run" if fewest == 1 else f"medians of {fewest} runs"


def _side(case: str) -> str:
    return next(_SIDES[word] for word in (case, *reversed(case.split("."))) if word in _SIDES)


def _grouped(cell: str) -> str:
    """Numbers of more than three digits in groups of three."""
    return re.sub(r"(?<![\w.])\d{4,}", lambda found: f"{int(found[0]):,}".replace(",", " "), cell)


_AGENTS = (
    "40 sessions of agents, 320 turns, 16 clients, vLLM 0.32 with `HiCacheConnector` of 64 GiB, packed, no disk, one "
    "H200, its full GPU cache, {runs} of each"
)
_ON_DISK = "12 sessions of agents, 16 clients, vLLM 0.32 with `HiCacheConnector` of 16 GiB and a disk, one H200"
_PACKED = "packed pages of 64 tokens, host to device, one"
_COPY = "{ceiling:.1f} with a plain pinned copy, {packing:.1f} without packing"
_CAPPED = "GPU cache capped at 81 920 tokens, one run"
ROWS: tuple[tuple[Row, ...], ...] = (
    tuple(
        Row(
            _AGENTS,
            "servers.vllm.agents.over_lazy.64",
            "servers-nvidia-h200.json",
            "{value:.1f} s",
            others=tuple(f"servers.vllm.agents.over_{mode}.64" for mode in others),
        )
        for others in (("cpu", "none", "lmcache"), ("cpu", "none"))
    ),
    (
        Row(
            "first token of 98k tokens after a restart, from the disk of the machine, one H200",
            "both.restart",
            "both-nvidia-h200.json",
            "{value:.2f} s",
            "{ceiling:.2f} s computed",
        ),
        Row(
            "documents of 32k tokens after a restart, files on a tmpfs, vLLM 0.32 with `HiCacheOffloadingSpec` and a "
            "disk, one H200",
            "servers.vllm.tokens32768.restart.over_fs",
            "servers-vllm-tokens32768-fs-hicache-nvidia-h200.json",
            "{value:.0f} ms",
        ),
    ),
    tuple(
        Row(
            "first token of 98k tokens, computed and loaded at once, from a store slowed to the speed of computing, "
            "one H200",
            "both.equal.98k",
            file,
            "{value:.3f} s",
            "{ceiling:.3f} s if all is computed, {load:.2f} if all is loaded",
        )
        for file in ("both-nvidia-h200.json", "both-rates-eight-nvidia-h200.json")
    ),
    (
        Row(
            "first token of a prompt with a prefix of 32k tokens in CPU memory, packed pages, own server, 8B model of "
            "random weights, one H200",
            "serving.ttft.host.prefix32768",
            "serving-nvidia-h200.json",
            "{token:.1f} ms",
            "{load:.1f} ms to copy the unpacked KV alone",
            conclusion="faster than the copy of unpacked KV",
        ),
    ),
    (
        Row(
            f"{_ON_DISK}, GPU cache capped at 180 000 tokens, one run, first version of the load gate",
            "servers.vllm.agents.disk.over_fs",
            "servers-disk-96gib-nvidia-h200.json",
            "{value:.1f} s",
            others=("servers.vllm.agents.disk.gate",),
        ),
        Row(
            "300 turns of coding agents, 8 clients, vLLM 0.32 with `HiCacheOffloadingSpec` of 8 GiB and a disk, one "
            "H100, " + _CAPPED,
            "servers.vllm.sessions.disk.c8",
            "servers-vllm-sessions-gate-nvidia-h100-80gb-hbm3.json",
            "{value:.2f} s",
            "{ceiling:.2f} if every prefix is loaded and none is recomputed",
        ),
    ),
    tuple(
        Row(f"{_PACKED} {gpu}", "packed.load.contiguous", file, "{value:.1f} GB/s of raw bytes", _COPY)
        for gpu, file in (("H200", "packed-nvidia-h200.json"), ("H100", "packed-nvidia-h100-80gb-hbm3.json"))
    ),
    tuple(
        Row(f"tokens in a GiB, {gpu}", "packed.capacity.host", file, "{value:.0f} tokens", "{ceiling:.0f} unpacked")
        for gpu, file in (
            ("one H200", "packed-nvidia-h200.json"),
            ("keys and values of SmolLM2-135M", "packed-nvidia-h100-80gb-hbm3.json"),
        )
    ),
    (
        Row(
            "**the worst result against a server without hicache**: 40 turns of coding agents that fit GPU memory, 8 "
            "clients, SGLang 0.5.23 with its own CPU tier (named HiCache too) and `HiCacheDisk` below it, one H100, "
            "one run",
            "servers.sglang.sessions.disk.over_none",
            "servers-sglang-sessions-one-nvidia-h100-80gb-hbm3.json",
            "{value:.1f} s",
            "{ceiling:.1f} without SGLang's CPU tier and `HiCacheDisk`",
            others=("servers.sglang.sessions.disk.c8",),
        ),
    ),
)


def measured_table(results: Path = RESULTS, folder: str = "bench/results") -> list[str]:
    """The rows of the table, without its header, with links to files in `folder`. Raises LookupError if a row has no
    file with its cases."""
    return [f"| {' | '.join(_cells(row, results, folder))} |" for row in ROWS]


def _cells(alternatives: Sequence[Row], results: Path, folder: str) -> list[str]:
    for row in alternatives:
        if (results / row.file).exists():
            cases = {case.name: case for case in read_report(results / row.file).cases}
            if {row.case, *row.others} <= cases.keys():
                return row.cells(cases, folder)
    raise LookupError(f"no file in {results} has {alternatives[-1].case}")
