"""`hicache demo` over models of every kind, compared with the library's own generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from family_case import save_model, tiny_config
from hicache.cli import main
from hicache.serving import drive

SMALL = ["--documents", "3", "--turns", "2", "--document-tokens", "400", "--chunk", "128", "--max-new-tokens", "4"]


def _demo(model: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Status and figures of a small demo of the model in a directory."""
    out = model.parent / "out.json"
    status = main(["demo", *SMALL, "--model", str(model), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def _saved(tmp_path: Path, row: str, **changes: Any) -> Path:
    """A tiny model of a family, over bytes."""
    save_model(tmp_path / "model", tiny_config(row, vocab_size=260, max_position_embeddings=2048, **changes))
    return tmp_path / "model"


@pytest.mark.parametrize("row", ["llama", "mistral", "gpt_oss", "gemma2", "qwen3_next", "bamba"])
def test_every_kind_of_model_is_shown(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full attention, windows and recurrent layers, in the attention implementation that the model needs: hits, and
    the tokens of generate. What the disk does not keep runs without it, which is said in one line."""
    model = _saved(tmp_path, row)
    disk = tmp_path / "pages"
    status, figures = _demo(model, "--check-against", "transformers", "--disk", str(disk))
    assert status == 0 and figures["identical"] is True and figures["compared_with_transformers"] is True
    assert figures["hit_tokens"]["device"] + figures["hit_tokens"]["host"] > 0
    assert figures["bytes_moved"]["host_to_device"] > 0
    assert figures["pages"]["compared"] > 0 == figures["pages"]["mismatched"]
    out = capsys.readouterr().out
    assert "equals that of a run without a cache and transformers' generate" in out
    said = [line for line in out.splitlines() if "keeps pages of full attention alone" in line]
    assert (len(said), disk.exists()) == ((0, True) if row == "llama" else (1, False))


def test_a_window_model_needs_no_host_tier(tmp_path: Path) -> None:
    """Without a disk there is nothing that a host tier would have to stand in front of."""
    status, figures = _demo(_saved(tmp_path, "mistral"), "--host-bytes", "0")
    assert status == 0 and figures["identical"] is True
    assert figures["sizes"]["host_tokens"] == 0 < figures["hit_tokens"]["device"]


@pytest.mark.parametrize("window", [200, 1000])
def test_long_windows_find_room(window: int, tmp_path: Path) -> None:
    """A window as long as the prompts or longer is served with the sizes that the demo chooses, several at a time and
    a whole prompt in one chunk."""
    model = _saved(tmp_path, "mistral", sliding_window=window)
    status, figures = _demo(model, "--check-against", "transformers", "--concurrency", "3", "--chunk", "8192")
    assert status == 0 and figures["identical"] is True


def test_an_answer_that_generate_does_not_give_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the library answers otherwise than our own runner with and without a cache, the demo says so and fails."""
    right = drive.generate

    def other(*args: Any) -> tuple[int, ...]:
        *first, last = right(*args)
        return (*first, last ^ 1)

    monkeypatch.setattr(drive, "generate", other)
    status, figures = _demo(_saved(tmp_path, "llama"), "--check-against", "transformers")
    assert status == 1 and figures["identical"] is False
    assert "identical: NO" in capsys.readouterr().out


def test_sampled_answers_are_not_compared_with_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampling together with generate is refused in one line: the two draw otherwise."""
    assert main(["demo", *SMALL, "--check-against", "transformers", "--sample"]) == 2
    assert "--check-against transformers compares greedy answers" in capsys.readouterr().err
