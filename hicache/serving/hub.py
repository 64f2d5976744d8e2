"""Finds models by their names in Hugging Face's hub, like Qwen/Qwen3-8B, in the cache directory that all tools of the
hub share.

If a model is completely in the cache, it is used without asking the hub for a newer revision. A newer revision would be
another model, for which the stores have no pages. Only safetensors weights are downloaded, because they contain no
code. Functions of this module import huggingface_hub, which takes a quarter of a second. So a command can report a
wrong name before it imports slower packages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.console import scaled
from hicache.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
_SINGLE_FILE = "model.safetensors"
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
_FILES: dict[str, Any] = {"allow_patterns": [_WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja"]}


def is_hub_name(text: str) -> bool:
    """Return whether `text` can be the name of a model in the hub. Returns False if a local directory has this name."""
    return _NAME.fullmatch(text) is not None and not Path(text).is_dir()


def require_available(name: str) -> None:
    """Raise ConfigError unless the model is in the cache or in the hub. Asks the hub at most once."""
    if _cached(name) is None:
        _listed(name)


def downloaded(name: str, say: Callable[[str], object]) -> str:
    """Return the folder of the model, after downloading the model if it is not cached. `say`: called with a message
    before a download. Raises ConfigError if the download fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    folder = _cached(name)
    if folder is not None:
        return folder
    say(f"downloading {name} from the hub: {scaled(_listed(name), 'B')}")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return str(snapshot_download(name, **_FILES))
    except OSError as error:
        raise ConfigError(f"model {name}: the download failed: {_reason(error)}; downloaded files are kept") from error


def _cached(name: str) -> str | None:
    """Return the folder of a model if the cache has all its files, else None. The cache has only some files if another
    program downloaded only these."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, **_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return str(folder) if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Return whether the folder contains a configuration, a tokenizer, and all files of weights that its index
    names."""
    shards = {_SINGLE_FILE}
    if (index := folder / f"{_SINGLE_FILE}.index.json").is_file():
        try:
            shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
    needed = ("config.json", "tokenizer_config.json", *shards)
    return all((folder / file).is_file() for file in needed) and any(any(folder.glob(name)) for name in _VOCABULARIES)


def _listed(name: str) -> int:
    """Return the bytes of the model's files in the hub. Raises ConfigError if the hub does not have the model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, RepositoryNotFoundError

    try:
        files: list[Any] = snapshot_download(name, **_FILES, dry_run=True)
    except DryRunError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError):
            raise ConfigError(
                f"model {name}: no such directory, and the hub shows no such model; correct the name, or give a token "
                "that may read it in HF_TOKEN"
            ) from error
        raise ConfigError(
            f"model {name}: no such directory, and the hub cannot be reached: {_reason(error.__cause__ or error)}; "
            f"on a machine that reaches it, run 'hf download {name} --local-dir FOLDER', and give FOLDER here"
        ) from error
    if not any(Path(file.filename).match(_WEIGHTS) for file in files):
        raise ConfigError(f"model {name}: the hub has no weights of it in safetensors; give another")
    return sum(file.file_size or 0 for file in files)


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]
