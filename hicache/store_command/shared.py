"""The subcommands of `hicache store` for stores that several machines share: dir:// and s3://."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hicache.console import columns, printable, sized
from hicache.errors import ConfigError
from hicache.storage.shared_pages import SharedPage, SharedPages, shared_pages
from hicache.store_command.commands import Outcome, Task


def run(task: Task) -> Outcome:
    """Run the subcommand of a task whose path is a URL. Raises ConfigError if the subcommand does not support shared
    stores."""
    verb = task.flags.verb
    if verb not in COMMANDS:
        raise ConfigError(f"`hicache store {verb}` is for stores on a disk; a shared store has prune --budget SIZE")
    return COMMANDS[verb](task, shared_pages(task.flags.path))


def _stat(task: Task, shared: SharedPages) -> Outcome:
    """Return the number and bytes of pages of each namespace, and the identity of the namespace if the store records
    it."""
    found: dict[str, list[SharedPage]] = {}
    for page in shared.pages():
        found.setdefault(page.namespace, []).append(page)
    stores: list[dict[str, Any]] = [
        {
            "namespace": namespace,
            "identity": shared.identity(namespace),
            "entries": len(pages),
            "bytes": sum(page.num_bytes for page in pages),
            "last_use_s": max(page.used_s for page in pages),
        }
        for namespace, pages in sorted(found.items())
    ]
    parts = [
        columns(
            [
                ("namespace", one["namespace"]),
                *((f"identity.{name}", value) for name, value in (one["identity"] or {}).items()),
                ("entries", one["entries"]),
                ("size", sized(one["bytes"])),
                ("last use", _time(one["last_use_s"])),
            ]
        )
        for one in stores
    ]
    sums: dict[str, Any] = {name: sum(one[name] for one in stores) for name in ("entries", "bytes")}
    parts.append(columns([("url", task.flags.path), ("entries", sums["entries"]), ("size", sized(sums["bytes"]))]))
    return Outcome({"path": task.flags.path, **sums, "stores": stores}, "\n\n".join(parts))


def _ls(task: Task, shared: SharedPages) -> Outcome:
    newest = task.flags.newest
    listed = sorted(shared.pages(), key=lambda page: page.used_s, reverse=newest)[: task.flags.limit]
    entries = [
        {
            "namespace": page.namespace,
            "key": page.key.hex() if page.key else None,
            "name": page.name,
            "bytes": page.num_bytes,
            "last_use_s": page.used_s,
        }
        for page in listed
    ]
    lines = (
        printable(
            f"{page.namespace} {page.key.hex() if page.key else page.name} {page.num_bytes:>10} {_time(page.used_s)}"
        )
        for page in listed
    )
    stats = {"path": task.flags.path, "order": "newest" if newest else "oldest", "entries": entries}
    return Outcome(stats, "\n".join(lines))


def _verify(task: Task, shared: SharedPages) -> Outcome:
    """Verify every page, and delete damaged pages with --repair. The status is 1 if a damaged page is left."""
    pages = list(shared.pages())
    faults: list[tuple[SharedPage, str]] = []
    with task.progress.during("verifying") as step:
        for number, page in enumerate(pages, start=1):
            if reason := shared.fault(page):
                faults.append((page, reason))
            step(number, len(pages))
    removed = shared.remove([page for page, _ in faults]) if task.flags.repair and faults else 0
    left = len(faults) - removed
    stats = {
        "path": task.flags.path,
        "pages": len(pages),
        "bytes": sum(page.num_bytes for page in pages),
        "repair": task.flags.repair,
        "faults": [{"name": page.name, "reason": reason} for page, reason in faults],
        "left": left,
    }
    lines = [printable(f"{page.name}: {reason}") for page, reason in faults]
    remedy = f"; {removed} deleted" if task.flags.repair else "; --repair deletes bad pages" if faults else ""
    lines.append(f"{len(pages)} pages, {sized(int(str(stats['bytes'])))}: {len(faults) or 'no'} faults{remedy}")
    return Outcome(stats, "\n".join(lines), status=int(left > 0))


def _prune(task: Task, shared: SharedPages) -> Outcome:
    if task.flags.budget is None or task.flags.model is not None:
        raise ConfigError("--unused-days and --model are for stores on a disk; give a shared store --budget SIZE only")
    with task.progress.during("pruning"):
        report = shared.prune(task.flags.budget)
    rows = [
        ("removed", f"{report.removed} pages, {sized(report.removed_bytes)}"),
        ("left", f"{report.left} pages, {sized(report.left_bytes)}"),
    ]
    return Outcome({"path": task.flags.path, "budget_bytes": task.flags.budget, **vars(report)}, columns(rows))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


COMMANDS: dict[str, Callable[[Task, SharedPages], Outcome]] = {
    "stat": _stat,
    "ls": _ls,
    "verify": _verify,
    "prune": _prune,
}
