"""Distinguishes models of the same name by a digest of every byte that affects the results of the model.

Reading a model of 100 GB takes a minute, so the digests of its files are recorded. The record is in the model's folder
or, if this folder is not writable, in the user's cache folder:

    .hicache-digests.json    {"model.safetensors": [bytes, mtime ns, ctime ns, inode, XXH3_128 as hex digits], ...}

A file that was replaced or changed has another inode or another ctime, and users cannot reset a ctime. A process locks
the record while it uses the record. So if several processes start at the same time, only one of them reads the weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import huggingface_hub
import xxhash

from hicache.config.environment import digests_folder
from hicache.errors import ConfigError

log = logging.getLogger(__name__)

RECORD = ".hicache-digests.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".npy", ".msgpack"}
_CODE = ".py"
_CONFIGS = ("config.json", "params.json", ".index.json")  # suffixes of the names of configuration files
_NO_CONFIGS = {"generation_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"}
_ADAPTER = "adapter_config.json"
_READERS, _PIECE_BYTES = 4, 8 << 20
# If a file is written twice within one tick of the file system's clock, the second write does not change the file's
# times. The file system with the longest tick, 2 s, is FAT.
_TICK_NS = 2_000_000_000

Clock = Callable[[], int]
Digests = dict[str, tuple[int, int, int, int, str]]  # by file name: the result of `_version`, and the digest


def weights_digest(
    model: str, revision: str | None = None, download_dir: str | None = None, clock: Clock = time.time_ns
) -> str:
    """Return a digest of 32 hex digits over the names and bytes of a model's weights, configurations and code, and of
    adapters in its subfolders. If no file of the model is on this machine, log a warning and return "".

    `model`: a folder, a file, or a model name of the Hugging Face hub. For a model name, the snapshot of `revision` in
    the local cache is used; `download_dir`: the folder of the cache, if it is not the default. `clock`: returns
    nanoseconds since the epoch. Raises ConfigError for a file that cannot be read.
    """
    folder, files = _files_of(model, revision, download_dir)
    if not files:
        log.warning("the weights of %s cannot be read here: set another salt whenever they change", model)
        return ""
    try:
        digests = _digests(folder, files, clock)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}; make it readable or remove it; otherwise "
            f"pages of other weights could be served"
        ) from error
    total = hashlib.sha256()
    for name, (num_bytes, *_, digest) in sorted(digests.items()):
        total.update(os.fsencode(name) + f"\0{num_bytes} {digest}\n".encode())
    return total.hexdigest()[:32]


def _files_of(model: str, revision: str | None, download_dir: str | None) -> tuple[Path, list[Path]]:
    """Return the folder of a model, and the files that the digest includes. Returns no files if the model is not on
    this machine."""
    path = Path(model)
    if path.is_file():
        return path.parent, [path]
    folder = path if path.is_dir() else _snapshot(model, revision, download_dir)
    if folder is None:
        return path, []
    folders = {folder, *(file.parent for file in folder.rglob(_ADAPTER))}
    return folder, [file for of in folders for file in of.iterdir() if _counts(file)]


def _snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a hub model's snapshot in the local cache of the hub; None if the cache does not have the
    snapshot."""
    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json", cache_dir=download_dir, revision=revision)
    except ValueError:  # the text is not a valid name of a hub model
        return None
    return Path(found).parent if isinstance(found, str) else None


def _counts(file: Path) -> bool:
    is_config = file.name.endswith(_CONFIGS) and file.name not in _NO_CONFIGS
    # `is_file` excludes broken links
    return (is_config or file.suffix in {*_WEIGHTS, _CODE}) and file.is_file()


def _digests(folder: Path, files: Sequence[Path], clock: Clock) -> Digests:
    """Return the digests of `files`. The recorded digest of an unchanged file is reused; for other files a digest is
    computed and recorded."""
    named = {file.relative_to(folder).as_posix(): file for file in files}
    with _record(folder) as record:
        known = {} if record is None else _read(record)
        versions = {name: _version(file) for name, file in named.items()}
        digests = {name: kept for name, kept in known.items() if versions.get(name) == kept[:-1]}
        new, start_ns = [name for name in named if name not in digests], clock()
        if new:
            num_bytes = sum(versions[name][0] for name in new)
            log.info("reading %.1f GB in %s to compute a digest of the weights", num_bytes / 1e9, folder)
        with ThreadPoolExecutor(_READERS) as readers:
            hashed = readers.map(lambda name: _hashed(named[name]), new)
            digests |= {name: (*versions[name], digest) for name, digest in zip(new, hashed, strict=True)}
        lasting = {name: kept for name, kept in known.items() if name not in named and (folder / name).exists()}
        lasting |= {
            name: digest
            for name, digest in digests.items()
            if name not in new or (_version(named[name]) == versions[name] and versions[name][2] < start_ns - _TICK_NS)
        }
        if record is not None and lasting != known:
            _write(record, lasting)
    return digests


@contextmanager
def _record(folder: Path) -> Iterator[BinaryIO | None]:
    """Yield the record of the digests of a folder's files, as a locked file; None if no record can be written."""
    own = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    with ExitStack() as stack:
        yield _locked(stack, lambda: folder / RECORD) or _locked(stack, lambda: digests_folder() / f"{own}.json")


def _locked(stack: ExitStack, place: Callable[[], Path]) -> BinaryIO | None:
    try:
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = stack.enter_context(path.open("a+b"))
        fcntl.flock(opened, fcntl.LOCK_EX)
    except (OSError, ConfigError) as error:
        log.info("digests of weights are not kept: %s", error)
        return None
    return opened


def _read(record: BinaryIO) -> Digests:
    """Return the digests in a record. Returns no digests if the record is damaged; the caller then writes a new
    record."""
    record.seek(0)
    try:
        kept = json.loads(record.read() or b"{}")
        return {name: (int(a), int(b), int(c), int(d), str(digest)) for name, (a, b, c, d, digest) in kept.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s is damaged, so its digests are computed again: %s", record.name, error)
        return {}


def _write(record: BinaryIO, digests: Mapping[str, object]) -> None:
    """Overwrite the record with new digests. A process that is killed during this call leaves a damaged record."""
    try:
        record.truncate(0)
        record.write(json.dumps(digests, indent=1, sort_keys=True).encode() + b"\n")
        record.flush()
    except OSError as error:
        log.info("digests of weights are not kept in %s: %s", record.name, error)


def _version(file: Path) -> tuple[int, int, int, int]:
    """Return size, times and inode of a file. At least one of these numbers changes when the bytes of the file change.
    Links are followed."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _hashed(file: Path) -> str:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    with file.open("rb", buffering=0) as opened:
        while num_bytes := opened.readinto(piece):
            digest.update(piece[:num_bytes])
    return digest.hexdigest()
