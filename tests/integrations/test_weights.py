"""The identity of the weights of a server's model: which files it includes, and when their digests are computed
again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.integrations.sglang.model import model_identity
from hicache.integrations.weights import RECORD, weights_digest
from waiting import eventually

NEVER, LATER = 0, (1 << 40) + time.time_ns()  # clock values for which no file, or every file, was written long ago


def digest(model: Path | str, at_ns: int = NEVER, **where: str) -> str:
    return weights_digest(str(model), clock=lambda: at_ns, **where)


def kept(record: Path) -> dict[str, list[int | str]]:
    read: dict[str, list[int | str]] = json.loads(record.read_text())
    return read


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two shards with their index, a file of code, and files that are not part of the identity."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a-1.safetensors", "a-2.safetensors", "config.json", "model.safetensors.index.json", "modeling_a.py"):
        (folder / name).write_bytes(name.encode() * 1000)
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "training.log"):
        (folder / name).write_text(name)
    return folder


def test_every_byte_that_determines_pages_counts(model: Path) -> None:
    """A changed byte of a shard, configuration, index or code changes the digest, and so does a new or renamed file.
    Files that only describe the model do not change it."""
    found = [digest(model)]
    for file in sorted(model.iterdir()):
        counts = file.suffix in (".safetensors", ".py") or file.name in ("config.json", "model.safetensors.index.json")
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"#")
        assert (digest(model) == found[-1]) is not counts, file
        found += [digest(model)] if counts else []
    (model / "model.gguf").write_bytes(b"x")
    found.append(digest(model))
    (model / "model.gguf").rename(model / "pytorch_model.bin")
    found.append(digest(model))
    adapter = model / "loras" / "sql"
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").write_bytes(b"y")
    assert digest(model) == found[-1]  # a file of a LoRA adapter, but not yet a complete one
    (adapter / "adapter_config.json").write_text("{}")
    found.append(digest(model))
    assert len({*found}) == len(found) == 9 and all(len(one) == 32 for one in found)
    assert digest(model / "a-1.safetensors") not in found  # a model given as one file


def test_digests_are_computed_once(model: Path) -> None:
    """A recorded digest is used while size, times and inode of its file stay the same. A file that is rewritten with
    the same size and its old modification time is read again."""
    first = digest(model, LATER)
    values = kept(model / RECORD)
    values["a-1.safetensors"][-1] = "0" * 32
    (model / RECORD).write_text(json.dumps(values))
    trusted = digest(model, LATER)
    assert trusted != first and digest(model, LATER) == trusted
    file = model / "a-1.safetensors"
    before = file.stat()

    def rewritten() -> bool:
        """Rewrite the file; whether the file system's clock has advanced since its last write."""
        file.write_bytes(b"#" * before.st_size)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return file.stat().st_ctime_ns != before.st_ctime_ns

    assert eventually(rewritten) and file.stat().st_mtime_ns == before.st_mtime_ns
    assert digest(model, LATER) == digest(model) not in (first, trusted)


def test_the_digest_of_a_file_written_just_now_is_not_kept(model: Path) -> None:
    """The digest of a file that was just written is not recorded, because the next write may leave its times
    unchanged."""
    first = digest(model, time.time_ns())
    assert not (model / RECORD).read_text() and digest(model, LATER) == first
    assert len(kept(model / RECORD)) == 5


@pytest.mark.parametrize("damage", ["{", "[1]", '{"config.json": 3}', '{"config.json": [1, 2]}', "\xff", "[" * 100_000])
def test_a_damaged_record_is_written_anew(model: Path, damage: str) -> None:
    first = digest(model, LATER)
    before = (model / RECORD).read_text()
    (model / RECORD).write_bytes(damage.encode("latin-1"))
    assert digest(model, LATER) == first and (model / RECORD).read_text() == before


def test_a_folder_that_takes_no_file_has_its_digests_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a folder cannot be written, its digests are recorded in the user's cache folder, separately for each folder.
    If that cannot be written either, they are computed each time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = digest(model, LATER)
    (model / RECORD).unlink()
    (model / RECORD).mkdir()  # root could write to a read-only folder
    assert digest(model, LATER) == first
    [record] = (tmp_path / "cache" / "hicache" / "digests").iterdir()
    values = kept(record)
    values["a-2.safetensors"][-1] = "0" * 32
    record.write_text(json.dumps(values))
    assert digest(model, LATER) != first
    record.unlink()
    record.parent.rmdir()
    record.parent.write_text("no folder")
    assert digest(model, LATER) == first


def test_a_snapshot_of_the_hub_is_a_folder(tmp_path: Path) -> None:
    """A model name stands for the files to which the links of its snapshot lead, on the branch main or the given
    revision. A link without a target is no file."""
    repo = tmp_path / "models--org--name"
    for commit in ("1" * 40, "2" * 40):
        (repo / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            blob = repo / "blobs" / f"{commit[0]}{name}"
            blob.parent.mkdir(exist_ok=True)
            blob.write_text(f"{name} {commit}")
            (repo / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob.name}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("1" * 40)
    first, second = (digest("org/name", revision=commit, download_dir=str(tmp_path)) for commit in ("1" * 40, "2" * 40))
    assert digest("org/name", download_dir=str(tmp_path)) == first != second
    (repo / "refs" / "main").write_text("2" * 40)
    assert digest("org/name", download_dir=str(tmp_path)) == second
    (repo / "blobs" / "2model.safetensors").write_text("another")
    third = digest("org/name", download_dir=str(tmp_path))
    (repo / "blobs" / "2model.safetensors").unlink()
    assert len({first, second, third, digest("org/name", download_dir=str(tmp_path))}) == 4


def test_sglang_tells_its_model_by_weights_and_what_loads_them(model: Path) -> None:
    """Changed weights, another version and another quantisation each change the identity. A revision changes it only if
    its weights cannot be read."""
    settings = {"revision": None, "download_dir": None, "weight_version": "default", "quantization": None}
    args = SimpleNamespace(model_path=str(model), **settings)
    found = [model_identity(args)]
    for name in ("weight_version", "quantization"):
        found.append(model_identity(SimpleNamespace(**{**vars(args), name: "other"})))
    (model / "a-1.safetensors").write_bytes(b"other")
    found.append(model_identity(args))
    assert model_identity(SimpleNamespace(**{**vars(args), "revision": "other"})) == found[-1]
    for revision in (None, "other"):
        found.append(model_identity(SimpleNamespace(**{**vars(args), "model_path": "no/model", "revision": revision})))
    assert all(one not in found[:i] for i, one in enumerate(found))


@pytest.mark.parametrize("name", ["org/name", "s3://bucket/model", "/no/such/folder", "a b", ""])
def test_weights_that_are_not_here_are_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not on this machine have no digest. The log names the setting that distinguishes such models."""
    monkeypatch.chdir(tmp_path)
    assert digest(name, download_dir=str(tmp_path)) == "" and "salt" in caplog.text


def test_a_file_that_cannot_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file of the weights cannot be read, the error names it and the server does not start."""
    plain = Path.open

    def opened(path: Path, *args: Any, **given: Any) -> Any:
        if path.name == "a-2.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **given)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ConfigError, match=r"a-2\.safetensors"):
        digest(model)


def test_of_those_that_start_at_once_one_reads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes that start together one reads the weights. All get the same digest, and the record is
    complete."""
    found, plain, reads = list[str](), Path.open, Counter[str]()

    def opened(path: Path, *args: Any, **given: Any) -> Any:
        reads[path.name] += 1
        return plain(path, *args, **given)

    monkeypatch.setattr(Path, "open", opened)
    threads = [threading.Thread(target=lambda: found.append(digest(model, LATER))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [digest(model, LATER)] * 8 and len(kept(model / RECORD)) == 5
    assert reads["a-1.safetensors"] == 1 and reads[RECORD] >= 9
