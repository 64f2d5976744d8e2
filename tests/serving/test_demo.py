"""`hicache demo` with models of every kind, compared with transformers' generate."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import hicache.storage.process.stores
from disk_case import TroubledStore
from family_case import save_model, tiny_config
from hicache.cli import main
from hicache.serving import drive
from hicache.storage import open_store

SMALL = ["--documents", "3", "--turns", "2", "--document-tokens", "400", "--chunk", "128", "--max-new-tokens", "4"]


def _demo(model: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON report of a small demo with the model in a directory."""
    out = model.parent / "out.json"
    status = main(["demo", *SMALL, "--model", str(model), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def _saved(tmp_path: Path, row: str, **changes: Any) -> Path:
    """The directory of a tiny model of a family, with a tokenizer of bytes."""
    save_model(tmp_path / "model", tiny_config(row, vocab_size=260, max_position_embeddings=2048, **changes))
    return tmp_path / "model"


BY_DEFAULT, LONG = "llama gemma3n_text lfm2 llama4_text", "gpt_oss qwen3_next bamba kimi_linear falcon_h1 mimo_v2_flash"


@pytest.mark.parametrize(
    "row", [*BY_DEFAULT.split(), *(pytest.param(row, marks=pytest.mark.long) for row in LONG.split())]
)
def test_every_kind_of_model_hits_on_disk(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models with full attention, windows, chunks, states and latent rows hit on the device and on the disk, move bytes
    between all tiers, and yield the tokens of generate."""
    baseline = ["--baseline" if row == "llama" else "--no-baseline"]
    status, report = _demo(_saved(tmp_path, row), "--check-against", "transformers", *baseline)
    assert status == 0 and report["identical"] is True and report["compared_with_transformers"] is True
    assert report["hit_tokens"]["device"] > 0 and report["hit_tokens"]["disk"] > 0
    assert min(report["bytes_moved"].values()) > 0
    assert report["pages"]["compared"] > 0 == report["pages"]["mismatched"]
    references = f"{'a run without a cache and ' * (row == 'llama')}transformers' generate"
    assert f"every generated token equals that of {references}" in capsys.readouterr().out


def test_a_slow_disk_changes_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn leaves is on the disk before the next begins, however long that takes."""
    model = _saved(tmp_path, "llama")
    _, before = _demo(model, "--no-baseline")

    def slow(url: str, **settings: Any) -> TroubledStore:
        store = TroubledStore(open_store(url, **settings))
        store.trouble = lambda verb: time.sleep(0.3) if verb == "put" else None
        return store

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", slow)
    _, after = _demo(model, "--no-baseline")
    assert after["hit_tokens"] == before["hit_tokens"] and before["hit_tokens"]["disk"] > 0


def test_a_difference_from_generate_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If generate yields other tokens than the runner with and without a cache, the demo reports it and fails."""
    generate = drive.generate

    def other(*args: Any) -> tuple[int, ...]:
        *first, last = generate(*args)
        return (*first, last ^ 1)

    monkeypatch.setattr(drive, "generate", other)
    status, report = _demo(_saved(tmp_path, "llama"), "--check-against", "transformers")
    assert status == 1 and report["identical"] is False
    assert "identical: NO" in capsys.readouterr().out
