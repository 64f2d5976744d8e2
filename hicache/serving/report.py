"""The demo's output: a line per turn while it runs, the summary, and the results for `--json`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.console import printable
from hicache.serving.audit import AuditCounts
from hicache.serving.request import RequestOutput

_SHOWN_OF_A_TIER = 2  # turns, with question and answer
_WIDTHS = (28, 7, 7, 7, 7, 7, 9, 9, 13)
# The engine's counters of bytes that moved between two tiers.
_BYTES_MOVED = {
    "device_to_host": "backup.bytes",
    "host_to_device": "restore.bytes",
    "host_to_disk": "persist.bytes",
    "disk_to_host": "prefetch.bytes",
    "host_to_remote": "remote_persist.bytes",
    "remote_to_host": "remote_prefetch.bytes",
}


@dataclass
class Turn:
    """One turn of one conversation: its output with the cache and, if that was run, without a cache.

    `generated`: the tokens of transformers' `generate`; None if it was not run. `question`, `answer`: as texts, where
    the question is known.
    """

    name: str
    conversation: int
    number: int
    cached: RequestOutput
    recomputed: RequestOutput | None = None
    generated: tuple[int, ...] | None = None
    question: str = ""
    answer: str = ""

    @property
    def identical(self) -> bool:
        """Whether the generated tokens equal those of every other run that was made."""
        return (self.recomputed is None or self.recomputed.tokens == self.cached.tokens) and (
            self.generated is None or self.generated == self.cached.tokens
        )

    @property
    def ttft_ms(self) -> dict[str, float | None]:
        """With the cache, and recomputed: None until the turn ran without a cache."""
        recompute = None if self.recomputed is None else self.recomputed.ttft_s * 1e3
        return {"cached": self.cached.ttft_s * 1e3, "recompute": recompute}

    def line(self) -> str:
        """A row under `HEADER`: tokens, and milliseconds to the first one."""
        output, hit = self.cached, self.cached.hit
        times = ("" if ms is None else f"{ms:.0f}" for ms in self.ttft_ms.values())
        name = self.name if len(self.name) < _WIDTHS[0] else f"{self.name[: _WIDTHS[0] - 2]}…"
        tiers = (hit.device, hit.host, hit.disk, hit.remote)
        return _line(name, output.prompt_tokens, *tiers, output.computed_tokens, *times)

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.name,
            "turn": self.number + 1,
            "prompt_tokens": self.cached.prompt_tokens,
            "hit_tokens": dataclasses.asdict(self.cached.hit),
            "computed_tokens": self.cached.computed_tokens,
            "ttft_ms": self.ttft_ms,
            "tokens": list(self.cached.tokens),
            "identical": self.identical,
            **({"question": self.question, "answer": self.answer} if self.question else {}),
        }

    def text(self, tier: str) -> str:
        """Question and answer, a line each, with what `tier` had of the prompt."""
        end = " ..." if self.cached.finish_reason == "length" else ""
        tokens = getattr(self.cached.hit, tier)
        return (
            f"Q: {self.question}   ({tokens} of {self.cached.prompt_tokens} tokens from {tier})\n"
            f"A: {printable(' '.join(self.answer.split()))}{end}"
        )


def _line(name: str, *columns: object) -> str:
    cells = "".join(f"{cell:>{width}}" for cell, width in zip(columns, _WIDTHS[1:], strict=True))
    return f"{name:<{_WIDTHS[0]}}{cells}".rstrip()


HEADER = _line("request", "prompt", "device", "host", "disk", "remote", "computed", "ttft ms", "recompute ms")


@dataclass(frozen=True)
class Report:
    """The outcome of a demo. `compared`: whether the run without a cache was made; `compared_generate`: whether
    transformers' `generate` was run."""

    turns: Sequence[Turn]
    audit: AuditCounts
    stats: Mapping[str, float]
    sizes: Mapping[str, int]
    model: str
    device: str
    seconds: float
    compared: bool
    compared_generate: bool = False

    @property
    def identical(self) -> bool:
        """Whether all compared tokens are equal and no page that came back differs from what was computed."""
        return self.audit.mismatched == 0 and all(turn.identical for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The results for `--json`. `ttft_ms`: medians over turns after the first, null if there are none."""
        later = [turn for turn in self.turns if turn.number]
        first = [turn for turn in self.turns if not turn.number]
        ttft = _ttft_ms(later)
        cached_ms, recompute_ms = ttft["cached"], ttft["recompute"]
        return {
            "identical": self.identical,
            "compared_with_recompute": self.compared,
            "compared_with_transformers": self.compared_generate,
            "requests": len(self.turns),
            "prompt_tokens": sum(turn.cached.prompt_tokens for turn in self.turns),
            "generated_tokens": sum(len(turn.cached.tokens) for turn in self.turns),
            "hit_tokens": self._hit_tokens(self.turns),
            "computed_tokens": sum(turn.cached.computed_tokens for turn in self.turns),
            "ttft_ms": ttft,
            "speedup": recompute_ms / cached_ms if cached_ms and recompute_ms else None,
            "first_turns": {"hit_tokens": self._hit_tokens(first), "ttft_ms": _ttft_ms(first)},
            "bytes_moved": {
                move: int(self.stats.get(name, 0))
                for move, name in _BYTES_MOVED.items()
                if self._has_remote or "remote" not in move
            },
            "pages": dataclasses.asdict(self.audit),
            "sizes": dict(self.sizes),
            "model": self.model,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "turns": [turn.as_dict() for turn in self.turns],
            "stats": dict(self.stats),
        }

    def summary(self) -> str:
        """The most important results, in a few lines of text."""
        results = self.to_json()
        hits, ttft, pages = results["hit_tokens"], results["ttft_ms"], self.audit
        prompt_tokens = max(1, results["prompt_tokens"])
        shares = ", ".join(f"{tier} {tokens} ({tokens / prompt_tokens:.0%})" for tier, tokens in hits.items())
        moved = ", ".join(f"{link.replace('_', ' ')} {size / 1e6:.0f}" for link, size in results["bytes_moved"].items())
        lines = [
            f"identical: {'yes' if self.identical else 'NO'}   {self._checked()}",
            f"KV pages that came back: {pages.compared} compared, {pages.mismatched} differ, "
            f"{pages.unrecorded} of an earlier run without a record",
            f"prompt tokens {results['prompt_tokens']}: {shares}, computed {results['computed_tokens']}",
            f"moved, MB: {moved}",
        ]
        if ttft["cached"] is not None:
            line = f"median time to first token after the first turn: {ttft['cached']:.0f} ms"
            if results["speedup"] is not None:
                line += f", recomputed {ttft['recompute']:.0f} ms: {results['speedup']:.1f} times shorter"
            lines.append(line)
        lines.append(f"{results['requests']} requests on {self.device} in {self.seconds:.1f} s")
        return "\n".join(lines)

    def answers(self) -> str:
        """A few questions and answers: turns that had most of their prompt from the device, from the host, and so on.
        Empty where no question is known."""
        shown = [turn.text(tier) for tier in self._tiers for turn in self._asked(tier)[:_SHOWN_OF_A_TIER]]
        same = ", the same with and without the cache" if self.compared and self.identical else ""
        return "\n".join([f"a few answers{same}:", *shown]) if shown else ""

    def _asked(self, tier: str) -> list[Turn]:
        asked = [turn for turn in self.turns if turn.question]
        return [turn for turn in asked if 2 * getattr(turn.cached.hit, tier) > turn.cached.prompt_tokens]

    @property
    def _tiers(self) -> tuple[str, ...]:
        return ("device", "host", "disk", "remote") if self._has_remote else ("device", "host", "disk")

    @property
    def _has_remote(self) -> bool:
        return any(name.startswith("remote.") for name in self.stats)

    def _hit_tokens(self, turns: Sequence[Turn]) -> dict[str, int]:
        return {tier: sum(getattr(turn.cached.hit, tier) for turn in turns) for tier in self._tiers}

    def _checked(self) -> str:
        if not self.compared and not self.compared_generate:
            return "(tokens not compared: --no-baseline)"
        different = [turn.name for turn in self.turns if not turn.identical]
        if different:
            return f"tokens differ in {', '.join(different)}"
        references = ["a run without a cache"] * self.compared + ["transformers' generate"] * self.compared_generate
        return f"every generated token equals that of {' and '.join(references)}, every page what was computed"


def _ttft_ms(turns: Sequence[Turn]) -> dict[str, float | None]:
    cached = [turn.cached.ttft_s * 1e3 for turn in turns]
    recomputed = [turn.recomputed.ttft_s * 1e3 for turn in turns if turn.recomputed is not None]
    return {
        "cached": statistics.median(cached) if cached else None,
        "recompute": statistics.median(recomputed) if recomputed else None,
    }
