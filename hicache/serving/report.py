"""The outcome of a demo: every turn with the cache and without, and the figures that follow from them.

May import numpy and its own package.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.serving.audit import AuditCounts
from hicache.serving.request import Result
from hicache.serving.view import Row

# The engine's counters of bytes that went from one tier to another.
_MOVES = {
    "device_to_host": "backup.bytes",
    "host_to_device": "restore.bytes",
    "host_to_disk": "persist.bytes",
    "disk_to_host": "prefetch.bytes",
}


@dataclass
class Turn:
    """One turn of one conversation: its prompt, how the cache served it, and how it went without a cache.

    `generated`: what transformers' `generate` answered, where that was asked for.
    """

    name: str
    talk: int
    number: int
    prompt: npt.NDArray[np.int64]
    cached: Result
    recomputed: Result | None = None
    generated: tuple[int, ...] | None = None

    @property
    def same(self) -> bool:
        """Whether every generated token equals that of the run without a cache, and of transformers, where made."""
        truths = [self.cached.tokens if self.recomputed is None else self.recomputed.tokens]
        truths.append(self.cached.tokens if self.generated is None else self.generated)
        return all(tokens == self.cached.tokens for tokens in truths)

    def row(self) -> Row:
        result, hit = self.cached, self.cached.hit
        again_ms = None if self.recomputed is None else self.recomputed.ttft_s * 1e3
        computed = result.computed_tokens
        return Row(
            self.name, result.prompt_tokens, hit.device, hit.host, hit.disk, computed, result.ttft_s * 1e3, again_ms
        )

    def as_dict(self) -> dict[str, Any]:
        row = self.row()
        return {
            "request": row.name,
            "turn": self.number + 1,
            "prompt_tokens": row.prompt,
            "hit_tokens": {"device": row.device, "host": row.host, "disk": row.disk},
            "computed_tokens": row.computed,
            "ttft_ms": {"cached": row.ttft_ms, "recompute": row.recompute_ms},
            "tokens": list(self.cached.tokens),
            "identical": self.same,
        }


@dataclass(frozen=True)
class Report:
    """Everything that a demo found out. `compared`: whether the run without a cache was made; `compared_generate`:
    whether transformers was asked."""

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
        """Every generated token, where compared, and every page that came back."""
        return self.audit.mismatched == 0 and all(turn.same for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The figures of `--json`. `ttft_ms` are medians over turns after the first, null where there are none."""
        later = [turn for turn in self.turns if turn.number]
        first = [turn for turn in self.turns if not turn.number]
        ttft = _ttft_ms(later)
        cached_ms, again_ms = ttft["cached"], ttft["recompute"]
        return {
            "identical": self.identical,
            "compared_with_recompute": self.compared,
            "compared_with_transformers": self.compared_generate,
            "requests": len(self.turns),
            "prompt_tokens": sum(len(turn.prompt) for turn in self.turns),
            "generated_tokens": sum(len(turn.cached.tokens) for turn in self.turns),
            "hit_tokens": _hit_tokens(self.turns),
            "computed_tokens": sum(turn.cached.computed_tokens for turn in self.turns),
            "ttft_ms": ttft,
            "speedup": again_ms / cached_ms if cached_ms and again_ms else None,
            "first_turns": {"hit_tokens": _hit_tokens(first), "ttft_ms": _ttft_ms(first)},
            "bytes_moved": {move: int(self.stats.get(name, 0)) for move, name in _MOVES.items()},
            "pages": self.audit.as_dict(),
            "sizes": dict(self.sizes),
            "model": self.model,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "turns": [turn.as_dict() for turn in self.turns],
            "stats": dict(self.stats),
        }

    def summary(self) -> str:
        """The figures for a reader, a few lines."""
        figures = self.to_json()
        hits, ttft, pages = figures["hit_tokens"], figures["ttft_ms"], self.audit
        prompt_tokens = max(1, figures["prompt_tokens"])
        shares = ", ".join(f"{tier} {tokens} ({tokens / prompt_tokens:.0%})" for tier, tokens in hits.items())
        moved = ", ".join(f"{way.replace('_', ' ')} {size / 1e6:.0f}" for way, size in figures["bytes_moved"].items())
        lines = [
            f"identical: {'yes' if self.identical else 'NO'}   {self._checked()}",
            f"KV pages that came back: {pages.compared} compared, {pages.mismatched} differ, "
            f"{pages.unrecorded} of an earlier run without a record",
            f"prompt tokens {figures['prompt_tokens']}: {shares}, computed {figures['computed_tokens']}",
            f"moved, MB: {moved}",
        ]
        if ttft["cached"] is not None:
            line = f"median time to first token after the first turn: {ttft['cached']:.0f} ms"
            if figures["speedup"] is not None:
                line += f", recomputed {ttft['recompute']:.0f} ms: {figures['speedup']:.1f} times shorter"
            lines.append(line)
        lines.append(f"{figures['requests']} requests on {self.device} in {self.seconds:.1f} s")
        return "\n".join(lines)

    def _checked(self) -> str:
        if not self.compared and not self.compared_generate:
            return "(tokens not compared: --no-baseline)"
        different = [turn.name for turn in self.turns if not turn.same]
        if different:
            return f"tokens differ in {', '.join(different)}"
        truths = ["a run without a cache"] * self.compared + ["transformers' generate"] * self.compared_generate
        return f"every generated token equals that of {' and '.join(truths)}, every page what was computed"


def _ttft_ms(turns: Sequence[Turn]) -> dict[str, float | None]:
    cached = [turn.cached.ttft_s * 1e3 for turn in turns]
    again = [turn.recomputed.ttft_s * 1e3 for turn in turns if turn.recomputed is not None]
    return {
        "cached": statistics.median(cached) if cached else None,
        "recompute": statistics.median(again) if again else None,
    }


def _hit_tokens(turns: Sequence[Turn]) -> dict[str, int]:
    hits = [turn.cached.hit for turn in turns]
    return {
        "device": sum(hit.device for hit in hits),
        "host": sum(hit.host for hit in hits),
        "disk": sum(hit.disk for hit in hits),
    }
