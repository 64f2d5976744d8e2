"""The examples run as they stand, and the small scheduler gives the answers of no cache."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from serving_case import plain_greedy, prompt, shared, tiny_engine, tiny_llama, tiny_runner

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example ends without an error and says what it did."""
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_small_scheduler_serves_what_a_model_generates() -> None:
    """Its answers are those of whole passes without a cache, also on a device that cannot hold all prompts at once."""
    serve = runpy.run_path(str(EXAMPLES / "tiny_scheduler.py"))["serve"]
    model = shared(tiny_llama)
    document = prompt(100, seed=1)
    prompts = {f"q{i}": np.concatenate([document, prompt(7 + i, seed=2 + i)]) for i in range(5)}
    with tiny_engine(model, device_tokens=320) as engine:
        for _ in range(2):
            answers = serve(engine, tiny_runner(model, engine), prompts)
            assert {name: tuple(tokens) for name, tokens in answers.items()} == {
                name: plain_greedy(model, tokens, 16, answers[name]) for name, tokens in prompts.items()
            }
        assert engine.stats()["admit.device_hit_tokens"] > 0
        engine.check()
