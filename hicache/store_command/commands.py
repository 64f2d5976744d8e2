"""The subcommands of `hicache store`: each is one function that takes a `Task` and returns an `Outcome`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hicache.config import DiskConfig
from hicache.config.secret import cipher_of, key_at
from hicache.console import columns, printable, sized
from hicache.errors import ConfigError
from hicache.storage import (
    Fault,
    LmdbPageStore,
    PageCipher,
    PageFilter,
    StoreDescription,
    StoreError,
    VerifyReport,
    copy_store,
    describe,
    evict,
    list_pages,
    open_existing,
    rekey_store,
    store_at,
    store_folders,
    verify,
)
from hicache.storage.records import NAME_FIELD
from hicache.storage.store_files import read_record
from hicache.storage.store_folder import last_use_s, remove_store
from hicache.store_command.reporting import LogCapture, Steps

_DAY_S = 86400
_SUMMARY_FIELDS = (
    NAME_FIELD,
    "server",
    "release",
    "model",
    "dtype",
    "layout",
)  # identity fields that the summary shows


@dataclass(frozen=True)
class Task:
    """One run of a subcommand: its flags, its progress display, and the store's log messages so far."""

    flags: argparse.Namespace
    progress: Steps
    log: LogCapture

    @property
    def folder(self) -> Path:
        """The given directory, which has one store or several stores."""
        path = Path(self.flags.path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is no directory; give the directory of the store")
        return path

    @property
    def path(self) -> Path:
        """The directory of the store. If the given directory contains exactly one store, this is the directory of that
        store."""
        folders = store_folders(self.folder)
        if len(folders) > 1:
            raise ConfigError(f"{self.folder} holds {len(folders)} stores; name one of them, like {folders[0]}")
        return store_at(self.folder)

    def cipher(self) -> PageCipher | None:
        return cipher_of(DiskConfig(path=self.flags.path, key_file=self.flags.key_file))


@dataclass(frozen=True)
class Outcome:
    """The result of a subcommand. `stats`: the result as JSON values. `text`: the same result as text. `status`: the
    exit status."""

    stats: dict[str, Any]
    text: str
    status: int = 0


def stat(task: Task) -> Outcome:
    """Describe a store, or summarize the stores in a directory."""
    folders = store_folders(task.folder)
    if len(folders) > 1:
        return _stat_all(task.folder, folders)
    found = _stat_one(describe(task.folder))
    return replace(found, stats={**found.stats, "stores": [found.stats]}) if folders else found


def _stat_all(path: Path, folders: Sequence[Path]) -> Outcome:
    """Return one block of rows for each store, and the sums over all stores. The status is 1 if a store cannot be
    read."""
    stats: list[dict[str, Any]] = []
    parts: list[str] = []
    for folder in folders:
        try:
            found = describe(folder)
        except StoreError as error:
            stats.append({"path": str(folder), "error": str(error)})
            parts.append(columns([("path", folder), ("error", error)]))
            continue
        stats.append(_stats_of(found))
        named: list[tuple[str, object]] = [
            (name, found.identity[name]) for name in _SUMMARY_FIELDS if name in found.identity
        ]
        rows = [
            ("entries", _known(found.entries)),
            ("file", sized(found.file_bytes)),
            ("budget", sized(found.budget_bytes)),
            ("last use", _last_use(found)),
        ]
        parts.append(columns([("path", folder), *named, *rows, ("written by", _writer(found))]))
    failed = any("error" in one for one in stats)
    sums = {name: sum(one.get(name) or 0 for one in stats) for name in ("entries", "file_bytes")}
    return Outcome({"path": str(path), **sums, "stores": stats}, "\n\n".join(parts), status=int(failed))


def _stat_one(found: StoreDescription) -> Outcome:
    stats = _stats_of(found)
    ratio = stats["ratio"]
    rows: list[tuple[str, object]] = [
        ("path", found.path),
        *((f"identity.{name}", value) for name, value in found.identity.items()),
        ("format", found.format),
        *(("page", f"{sized(format.page_bytes)}, filter {_filter_text(format.filter)}") for format in found.formats),
        ("level", found.level),
        ("durability", found.durability),
        ("encrypted", f"with the key {found.key_id}" if found.encrypted else "no"),
        ("entries", _known(found.entries)),
        ("live", _live(found)),
        ("file", sized(found.file_bytes)),
        ("budget", sized(found.budget_bytes)),
        ("ratio", "-" if ratio is None else f"{ratio:.3f} bytes of pages a byte stored"),
        ("last use", _last_use(found)),
        ("written by", _writer(found)),
    ]
    return Outcome(stats, columns(rows))


def _stats_of(found: StoreDescription) -> dict[str, Any]:
    ratio = found.raw_bytes / found.live_bytes if found.raw_bytes and found.live_bytes else None
    changed = {"path": str(found.path), "identity": dict(found.identity), "encrypted": found.encrypted, "ratio": ratio}
    return {**dataclasses.asdict(found), **changed}


def prune_stores(task: Task) -> Outcome:
    """Remove the stores of a directory that were not used for `--unused-days`, or that have pages of `--model`; with
    both flags, a store must fit both. Stores that a process has open are not removed."""
    days, model = task.flags.unused_days, task.flags.model
    if task.flags.budget is not None:
        raise ConfigError("--budget is for shared stores; give dir:///PATH or s3://bucket, or --unused-days for a disk")
    if days is None and model is None:
        raise ConfigError("give --unused-days N, --model NAME, or both: prune removes the stores that fit both")
    if not task.folder.is_dir():
        raise ConfigError(f"{task.folder} is no directory; give the directory of the stores")
    removed, left = list[Path](), list[Path]()
    for folder in store_folders(task.folder):
        fits = time.time() - last_use_s(folder) >= (days or 0) * _DAY_S and (model is None or model in _names(folder))
        (removed if fits and remove_store(folder) else left).append(folder)
    stats = {"path": str(task.folder), "removed": [str(one) for one in removed], "left": [str(one) for one in left]}
    rows = [("removed", len(removed)), *(("", folder) for folder in removed), ("left", len(left))]
    return Outcome(stats, columns(rows))


def _names(folder: Path) -> set[object]:
    """Return two names of a store's model: the name that clients use, and the name in the store's identity. The set
    is empty if the record of the store cannot be read."""
    try:
        identity = read_record(folder).identity
    except StoreError:
        return set()
    return {identity.get(NAME_FIELD), identity.get("model")}


def copy(task: Task) -> Outcome:
    """Copy the store, or the stores, of a directory."""
    copies: list[dict[str, Any]] = []
    for folder in store_folders(task.folder) or [task.path]:
        num_warnings = len(task.log.messages)
        with task.progress.during(f"copying {folder.name}") as step:
            report = copy_store(folder, task.flags.target, step)
        del task.log.messages[num_warnings:]  # removes the warning that the index of the copy was rebuilt
        copies.append({"path": str(folder), "pages": report.pages - len(report.faults), "dropped": len(report.faults)})
    stats = {"path": str(task.folder), "target": str(task.flags.target), "stores": copies}
    rows = [("copied", "pages", "changed meanwhile"), *((one["path"], one["pages"], one["dropped"]) for one in copies)]
    return Outcome(stats, columns(rows))


def rekey(task: Task) -> Outcome:
    """Encrypt the store with another key."""
    new = PageCipher(key_at(Path(task.flags.new_key_file)))
    with task.progress.during("encrypting") as step:
        path, num_pages, num_lost = rekey_store(task.path, task.cipher(), new, step)
    stats = {"path": str(path), "key_id": new.key_id, "pages": num_pages, "lost": num_lost}
    return Outcome(stats, columns([("path", path), ("key", new.key_id), ("pages", num_pages), ("lost", num_lost)]))


def _last_use(found: StoreDescription) -> str:
    """Return the time of the last use in UTC, to the minute; `-` if unknown."""
    if found.last_use_s == 0:
        return "-"
    return datetime.fromtimestamp(found.last_use_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _known(number: int | None) -> object:
    return "-" if number is None else number


def _live(found: StoreDescription) -> str:
    if found.live_bytes is None or found.raw_bytes is None:
        return "-"
    return f"{sized(found.live_bytes)}, of pages of {sized(found.raw_bytes)}"


def _writer(found: StoreDescription) -> str:
    unnamed = {None: "no process", 0: "a process that cannot be named"}
    return unnamed.get(found.writer_pid, f"process {found.writer_pid}")


def _filter_text(filter: PageFilter) -> str:
    width = f", {filter.element_bytes} bytes an element" if filter.kind != "none" else ""
    return f"{filter.kind}{width}"


def ls(task: Task) -> Outcome:
    limit, newest = task.flags.limit, task.flags.newest
    with _opened(task, task.cipher(), keeps_index=True) as store:
        listed = list(list_pages(store, newest=newest, limit=limit))
    stats = {
        "path": str(task.path),
        "order": "newest" if newest else "oldest",
        "entries": [{**dataclasses.asdict(entry), "key": entry.key.hex()} for entry in listed],
    }
    lines = (f"{e.key.hex()} {e.page_bytes:>10} {e.stored_bytes:>10} {e.codec}" for e in listed)
    return Outcome(stats, "\n".join(lines))


def verify_pages(task: Task) -> Outcome:
    repair, cipher = task.flags.repair, task.cipher()
    report, left, rebuilt = _verify_once(task, cipher)
    encrypted = bool(read_record(task.path).key_id)
    stats = {
        "path": str(task.path),
        "pages": report.pages,
        "bytes": report.bytes,
        "encrypted": encrypted,
        "decrypted": encrypted and cipher is not None,
        "repair": repair,
        "rebuilt": rebuilt,
        "faults": [_fault_stats(fault) for fault in report.faults],
        "left": len(left),
    }
    return Outcome(stats, _verify_text(stats), status=1 if left else 0)


def _verify_once(task: Task, cipher: PageCipher | None) -> tuple[VerifyReport, tuple[Fault, ...], int | None]:
    """Verify the store, and repair it if requested. Returns the first report, the remaining faults, and the number of
    pages in the index if opening the store rebuilt it."""
    repair = task.flags.repair
    with _opened(task, cipher, keeps_index=True) as store:
        with task.progress.during("verifying") as step:
            report = verify(store, step, repair=repair)
        if not repair or not report.faults:
            return report, report.faults, store.rebuilt_pages
        with task.progress.during("verifying again") as step:
            return report, verify(store, step).faults, store.rebuilt_pages


def compact(task: Task) -> Outcome:
    with _opened(task, task.cipher()) as store:
        with task.progress.during("compacting"):
            before_bytes = store.stats().file_bytes
            saved_bytes = store.compact()
        _require_written(store, task)
        after_bytes = store.stats().file_bytes
    stats = {
        "path": str(task.path),
        "before_bytes": before_bytes,
        "after_bytes": after_bytes,
        "saved_bytes": saved_bytes,
    }
    return Outcome(stats, columns([("file before", sized(before_bytes)), ("file now", sized(after_bytes))]))


def evict_pages(task: Task) -> Outcome:
    to_bytes = task.flags.to
    with _opened(task, task.cipher()) as store:
        with task.progress.during("evicting"):
            num_evicted = evict(store, to_bytes)
        _require_written(store, task)
        left = store.stats()
    stats = {
        "path": str(task.path),
        "to_bytes": to_bytes,
        "evicted": num_evicted,
        "entries": left.entries,
        "live_bytes": left.live_bytes,
        "file_bytes": left.file_bytes,
    }
    rows: list[tuple[str, object]] = [("evicted", num_evicted), ("entries left", left.entries)]
    return Outcome(stats, columns([*rows, ("file now", sized(left.file_bytes))]))


def _verify_text(stats: dict[str, Any]) -> str:
    """Return one line for each fault, and a summary."""
    faults, left, repaired = stats["faults"], stats["left"], stats["repair"]
    lines = []
    for fault in faults:
        where = f"page {fault['key']}: " if fault["key"] else ""
        lines.append(printable(f"{fault['action'] or 'left as it is':<14}  {where}{fault['reason']}"))
    remedy = ""
    if faults and repaired:
        remedy = f"; {left} left that cannot be repaired, remove the directory" if left else "; the store is repaired"
    elif faults:
        remedy = "; --repair deletes bad pages and rebuilds the index"
    verdict = f"{len(faults)} fault(s)" if faults else "no faults"
    decrypted = ", decrypted too" if stats["decrypted"] else ", not decrypted because no key was given"
    if not stats["encrypted"]:
        decrypted = ""
    lines.append(f"{stats['pages']} pages, {sized(stats['bytes'])}{decrypted}: {verdict}{remedy}")
    return "\n".join(lines)


def _fault_stats(fault: Fault) -> dict[str, str | None]:
    return {"key": fault.key.hex() if fault.key else None, "reason": fault.reason, "action": fault.action}


@contextlib.contextmanager
def _opened(task: Task, cipher: PageCipher | None, *, keeps_index: bool = False) -> Iterator[LmdbPageStore]:
    with task.progress.during("rebuilding the index") as step:
        store = open_existing(task.path, cipher=cipher, progress=step, keeps_index=keeps_index)
    try:
        yield store
    finally:
        store.close()


def _require_written(store: LmdbPageStore, task: Task) -> None:
    stats = store.stats()
    if stats.write_errors or stats.read_only:
        raise StoreError(task.log.last(f"cannot write the store {task.path}; free disk space"))
