"""Models for serving: their identity, and the files of a directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hicache.errors import ConfigError
from hicache.serving import SamplingParams
from hicache.serving.end_tokens import end_tokens
from hicache.serving.models import load_local, model_identity, random_model
from serving_case import tiny_llama

ANSWER = "{{ messages[1]['content'] }}"


def test_the_random_model_is_always_the_same() -> None:
    """The identity and output of the random model do not depend on the global random generator, and leave it
    unchanged."""
    state = torch.random.get_rng_state()
    first = random_model(torch.float32, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        again = random_model(torch.float32, torch.device("cpu"))
    ids = torch.arange(8)[None]
    assert torch.equal(first.model(ids).logits, again.model(ids).logits)
    assert first.model_id == again.model_id
    assert 2e6 < first.num_weights < 9e6


def test_identity_sees_weights_and_configuration() -> None:
    """The identity changes with any byte of a parameter or buffer, and with the dtype or a value of the
    configuration."""
    base = model_identity(tiny_llama())
    assert base == model_identity(tiny_llama())
    identities = {base, model_identity(tiny_llama().bfloat16())}
    changed = tiny_llama()
    tensors = [*changed.parameters(), *changed.buffers()]
    with torch.no_grad():
        for tensor in tensors:  # change the last bit of the middle value of each tensor
            tensor.view(-1).view(torch.int32)[tensor.numel() // 2] ^= 1
            identities.add(model_identity(changed))
    configured = tiny_llama()
    configured.config.rms_norm_eps = 1e-3
    identities.add(model_identity(configured))
    assert len(identities) == len(tensors) + 3


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({}, {}, {}, set()),
        ({}, {"eos_token_id": None}, {"eos_token": "<end>"}, {8}),
        ({"temperature": 0.5}, {"eos_token_id": 3}, {"eos_token": "<end>"}, {3, 8}),
        ({"eos_token_id": [4, 5]}, {"text_config": {"eos_token_id": [6]}, "vision_config": {"eos_token_id": 7}}, {},
         {4, 5, 6}),
        ({"eos_token_id": 4}, {"eos_token_id": -1}, {"extra_special_tokens": {"eot_token": "<turn>"}}, {4, 9}),
        ({"eos_token_id": 10**6}, {}, {"extra_special_tokens": ["<turn>"], "chat_template": ANSWER + " <turn>\n"}, {9}),
        ({}, {"eos_token_id": 3}, {"extra_special_tokens": ["<turn>"], "chat_template": ANSWER + " b <turn>"}, {3}),
        ({}, {"eos_token_id": 3}, {"extra_special_tokens": ["<turn>"], "chat_template": ANSWER + " unknown"}, {3}),
        ({}, {}, {"extra_special_tokens": ["<turn>"], "chat_template": ANSWER[:-3] + "[0]['text'] }} <turn>"}, {9}),
        ({}, {"eos_token_id": 3}, {"chat_template": "{{ raise_exception('no') }}"}, {3}),
    ],
)  # fmt: skip
def test_an_answer_ends_with_each_token_that_a_file_names(
    generation: dict[str, Any], config: dict[str, Any], tokenizer: dict[str, Any], ends: set[int], tmp_path: Path
) -> None:
    """The end tokens are all that the two configurations with their text parts, the tokenizer, and its template name.
    Ids outside of the vocabulary are left out."""
    names = {**{chr(97 + i): i for i in range(8)}, "<end>": 8, "<turn>": 9}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", **tokenizer).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    read = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert end_tokens(tmp_path, hf.LlamaConfig(vocab_size=len(names)), read) == ends


def save_checkpoint(path: Path, max_shard_size: str = "1GB") -> None:
    tiny_llama().save_pretrained(path, max_shard_size=max_shard_size)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    hf.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: {name: x for name, x in tensors.items() if "layers.1.mlp" not in name},
         r"lacks tensors of the model: model\.layers\.1\.mlp\.down_proj\.weight, .*1\.mlp\.up_proj\.weight; give"),
        (lambda tensors: {f"language_{name}": x for name, x in tensors.items()},
         r"lacks .*lm_head\.weight, .* more; it has tensors that the model lacks: language_lm_head\.weight, .* more;"),
        (lambda tensors: {**tensors, "model.norm.weight": torch.zeros(7)}, r"another shape .*: model\.norm\.weight;"),
    ],
)  # fmt: skip
def test_a_checkpoint_without_all_weights_is_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], named: str, tmp_path: Path
) -> None:
    """If a tensor is missing, or has another name or shape, the error names it. No tensor is filled with random
    values."""
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ConfigError, match=named):
        load_local(str(tmp_path), torch.float32, torch.device("cpu"))


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    load_local(str(tmp_path), torch.float32, torch.device("cpu"))
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_local(str(tmp_path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_directory_never_runs(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the class of a model or tokenizer is Python code of the directory, it is refused without asking the user. The
    error names the file and its entry."""
    save_checkpoint(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    values = json.loads((tmp_path / file).read_text())
    auto_map = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    own = {"auto_map": auto_map, "model_type": "own_kind", "tokenizer_class": "OwnTokenizer"}
    (tmp_path / file).write_text(json.dumps({**values, **own}))
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ConfigError, match=rf"auto_map in {file}"):
        load_local(str(tmp_path), torch.float32, torch.device("cpu"))
    assert not ran.exists()


def test_a_checkpoint_suggests_its_sampling(tmp_path: Path) -> None:
    """The sampling parameters are those of generation_config.json, even if a value equals transformers' default. The
    error about an invalid value names the parameter."""
    save_checkpoint(tmp_path)
    file = tmp_path / "generation_config.json"
    for says, expected in (
        ({"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": None, "eos_token_id": 3}, (0.6, 50, 1.0)),
        ({}, (1.0, 0, 1.0)),
    ):
        file.write_text(json.dumps(says))
        loaded = load_local(str(tmp_path), torch.float32, torch.device("cpu"))
        assert loaded.sampling == SamplingParams(*expected) and loaded.eos_ids == {3} & {*says.values()}
    file.write_text(json.dumps({"eos_token_id": "3"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id='3'"):
        load_local(str(tmp_path), torch.float32, torch.device("cpu"))
    file.write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=1\.5"):
        load_local(str(tmp_path), torch.float32, torch.device("cpu"))
