"""The runs of servers, as a result file stores them, and the order in which missing runs are made."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache.bench.common import percentile

GATE = "gate."  # prefix of the decisions of hicache's load gate in a server's counters
MISSED = "missed."  # prefix of the prompt tokens that no tier had, by reason, in a server's counters


@dataclass(frozen=True)
class Setting:
    """The mode, workload and sizes of a run. Runs of equal settings are samples of the same cases.

    `cpu_gib`: 0 without a CPU tier. `gpu_tokens`: capacity of the GPU's cache; 0: all free GPU memory. `files`: type of
    the file system of a disk mode, or "". `variant`: the sizes that differ from the defaults, as text for names of
    cases; "" if none differs.
    """

    server: str
    mode: str
    workload: str
    sizes: str
    clients: int
    cpu_gib: float
    gpu_tokens: int
    files: str
    variant: str


@dataclass(frozen=True)
class Run:
    """The outcome of one process of a server.

    `first_ms`, `between_ms`: milliseconds to the first token of a prompt, and between two tokens of an answer: mean,
    p50, p90, p99; older files have no `between_ms`. `cached`: share of the prompts' tokens that each tier had; `all` is
    the total share. `moved_gb`: GB moved, by the server's metrics; empty if the server does not count bytes. `gate`:
    number of loads from hicache's disk tier, by decision of the load gate. `answers`: a digest of four digits for each
    answer, in order of the prompts. `num_gpus`: number of GPUs that served at the same time. `missed`: share of the
    prompts' tokens that no tier of hicache had, by reason.
    """

    setting: Setting
    prompts: str
    version: str
    date: str
    num_gpus: int
    start_s: float
    makespan_s: float
    first_ms: dict[str, float]
    cached: dict[str, float]
    moved_gb: dict[str, float]
    gate: dict[str, float]
    answers: str
    missed: dict[str, float] = field(default_factory=dict)
    between_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Run:
        return cls(**{**values, "setting": Setting(**values["setting"])})

    @classmethod
    def of(cls, setting: Setting, served: Mapping[str, Any], **about: Any) -> Run:
        """Build a run from an outcome of `serve` in which all prompts were answered. `about`: the fields that are not
        in the outcome."""
        answers = sorted(served["answers"], key=lambda answer: int(answer["number"]))
        counters = dict(served["counters"])
        external = counters.pop("external_tokens", None)
        gate, missed = (
            {name.removeprefix(prefix): counters.pop(name) for name in list(counters) if name.startswith(prefix)}
            for prefix in (GATE, MISSED)
        )
        moved = {name: number / 1e9 for name, number in counters.items() if number}
        between_s = [seconds for answer in answers for seconds in answer["between_s"]]
        total = sum(answer["prompt_tokens"] for answer in answers)
        cached = sum(answer["cached"] for answer in answers)
        tiers = {} if external is None else _by_tier(cached, external, moved)
        return cls(
            setting,
            version=served["version"],
            start_s=served["start_s"],
            makespan_s=served["makespan_s"],
            first_ms=_summary_ms([answer["first_s"] for answer in answers]),
            between_ms=_summary_ms(between_s) if between_s else {},
            cached={name: tokens / total for name, tokens in {"all": cached, **tiers}.items()},
            moved_gb=moved,
            gate=gate,
            answers=" ".join(_digest(answer["tokens"]) for answer in answers),
            missed={reason: tokens / total for reason, tokens in missed.items() if tokens},
            **about,
        )

    @property
    def cached_text(self) -> str:
        return ", ".join(f"{name} {share:.3f}" for name, share in self.cached.items())

    @property
    def first_text(self) -> str:
        return _text_ms(self.first_ms)

    @property
    def between_text(self) -> str:
        return _text_ms(self.between_ms)

    def differing_share(self, other: Run) -> float:
        """Return the share of prompts to which both runs gave different answers."""
        pairs = list(zip(self.answers.split(), other.answers.split(), strict=True))
        return sum(mine != theirs for mine, theirs in pairs) / len(pairs)


def _summary_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of times, in milliseconds."""
    ms = [1e3 * one for one in seconds]
    return {"mean": sum(ms) / len(ms), **{f"p{p}": percentile(ms, p) for p in (50, 90, 99)}}


def _text_ms(summary_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.0f}" for name, ms in summary_ms.items()) + " ms"


def _by_tier(cached: float, external: float, moved: Mapping[str, float]) -> dict[str, float]:
    """Return the cached tokens by tier. The tokens of the disk are estimated from the bytes that it read, because the
    bytes that vLLM loaded to the GPU belong to `external` tokens."""
    loaded, read = moved.get("load", 0.0), moved.get("tiering_read", 0.0)
    disk = min(1.0, read / loaded) * external if loaded else 0.0
    return {"gpu": cached - external, "cpu": external - disk, "disk": disk}


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:4]


def plan(settings: Sequence[Setting], samples: int, order: str) -> list[Setting]:
    """Return the settings of all runs in order. `order`: "balanced" means A B B A A B, so that a drift of the machine
    affects all modes equally; "rounds" means A B A B A B."""
    rounds = (settings[::-1] if order == "balanced" and number % 2 else settings for number in range(samples))
    return [setting for one in rounds for setting in one]


def missing_runs(planned: Sequence[Setting], runs: Sequence[Run]) -> list[Setting]:
    """Return the settings of planned runs that were not made yet."""
    made = Counter(run.setting for run in runs)
    missing = []
    for setting in planned:
        made[setting] -= 1
        if made[setting] < 0:
            missing.append(setting)
    return missing
