"""`hicache demo`: models of every kind, stores that remain after it, sizes given by flags, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hicache.serving.demo
import hicache.storage.process.stores
from demo_case import SMALL, demo
from family_case import save_model, tiny_config
from hicache.cli import main
from hicache.serving.demo import TIERS, Outcome
from hicache.serving.runner import Chunk, ModelRunner

MOVED = ("backup.bytes", "restore.bytes", "persist.bytes", "prefetch.bytes")
BY_DEFAULT, LONG = "gemma3n_text lfm2", "llama llama4_text gpt_oss qwen3_next bamba kimi_linear falcon_h1 mimo_v2_flash"


def saved(tmp_path: Path, row: str) -> str:
    """Save a tiny model of a family, with a tokenizer of bytes and a chat template. Returns the directory of the
    model."""
    folder = tmp_path / "model"
    save_model(folder, tiny_config(row, vocab_size=260, max_position_embeddings=4096))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return str(folder)


def from_disk_at_first(outcome: Outcome) -> list[int]:
    """Tokens of each first turn that came from the disk."""
    return [turn.cached.hit.disk for turn in outcome.turns if not turn.number]


@pytest.mark.parametrize(
    "row", [*BY_DEFAULT.split(), *(pytest.param(row, marks=pytest.mark.long) for row in LONG.split())]
)
def test_every_kind_of_model_hits_on_disk(row: str, tmp_path: Path) -> None:
    """Models with full attention, windows, chunks, states and latent rows hit on the device and on the disk, move bytes
    between all tiers, and yield the tokens of a run without a cache."""
    outcome = demo("--model", saved(tmp_path, row))
    assert outcome.identical
    assert outcome.hit_tokens["device"] > 0 and outcome.hit_tokens["disk"] > 0
    assert all(outcome.stats[counter] > 0 for counter in MOVED)


def test_a_difference_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If the run without a cache yields other tokens, the demo reports it, and its status is 1."""

    class Other(ModelRunner):
        def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
            return -super().forward(chunks)

    runners = [Other, ModelRunner]

    def made(*given: Any) -> ModelRunner:
        return runners.pop()(*given)

    monkeypatch.setattr(hicache.serving.demo, "ModelRunner", made)
    assert main(["demo", *SMALL, "--model", "random"]) == 1
    assert "identical: NO   tokens differ in 1.1 Logbook" in capsys.readouterr().out


def test_a_second_demo_finds_the_pages_of_the_first(tmp_path: Path) -> None:
    """A demo yields the tokens of a run without a cache, hits every tier, accounts for every prompt token and prints a
    line for each turn. With --disk-path, a second run finds all first turns on disk."""
    flags = ("--model", "random", "--disk-path", str(tmp_path / "store"))
    first = demo(*flags)
    assert first.identical and len(first.turns) == 8
    assert all(first.hit_tokens[tier] > 0 for tier in ("device", "host", "disk")), first.hit_tokens
    computed = sum(turn.cached.computed_tokens for turn in first.turns)
    assert sum(first.hit_tokens.values()) + computed == first.prompt_tokens
    assert all(len(turn.cached.tokens) == 4 for turn in first.turns)
    # Neither of the upper two tiers holds the working set.
    assert 2 * first.sizes["device"] < first.sizes["working_set"] > first.sizes["host"]
    assert from_disk_at_first(first) == [0] * 4
    assert all(f"{tier} {tokens} (" in first.summary() for tier, tokens in first.hit_tokens.items())
    assert "identical: yes" in first.summary()
    printed: list[str] = []
    second = demo(*flags, say=printed.append)
    assert min(from_disk_at_first(second)) > 0
    assert [f"{number}/8  {turn.line()}" for number, turn in enumerate(second.turns, 1)] == printed[-8:]
    assert any(line.endswith(" in all") for line in printed) and second.summary().endswith("times shorter")
    assert [turn.cached.tokens for turn in second.turns] == [turn.cached.tokens for turn in first.turns]


def test_flags_go_before_the_sizes_that_the_demo_chooses() -> None:
    """Flags replace sizes that the demo chooses: --host-bytes replaces its host_bytes, and settings of the disk apply
    to its own store. Without a host tier the demo has no store."""
    outcome = demo("--model", "random", "--host-bytes", "auto", "--disk-level", "0", "--dtype", "auto")
    assert outcome.sizes["device"] < outcome.sizes["host"] <= 2 * outcome.sizes["device"] + 64
    assert outcome.stats["persist.bytes"] > 0
    outcome = demo("--model", "random", "--host-bytes", "0")
    assert outcome.sizes["host"] == 0 and "persist.bytes" not in outcome.stats


@pytest.mark.long
@pytest.mark.timeout(1800)  # the demo waits for nothing but the processor, which other processes may use
def test_the_default_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo of the random model yields the tokens of a run without a cache, and hits all tiers."""
    assert main(["demo", "--model", "random"]) == 0
    printed = capsys.readouterr().out
    assert "identical: yes" in printed and not any(f"{tier} 0 " in printed for tier in TIERS[:-1])


@pytest.mark.gpu
def test_the_demo_on_a_gpu(tmp_path: Path) -> None:
    """On CUDA the demo yields the tokens of a run without a cache and hits all tiers. A second run uses the store that
    it filled."""
    flags = ("--model", "random", "--device", "cuda", "--disk-path", str(tmp_path / "store"))
    first, second = demo(*flags), demo(*flags)
    for outcome in (first, second):
        assert outcome.identical and outcome.device == torch.cuda.get_device_name()
    assert all(first.hit_tokens[tier] for tier in TIERS[:-1])
    assert min(from_disk_at_first(second)) > 0
