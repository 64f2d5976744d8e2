"""Check whether the tests notice wrong lines: change one line at a time in a copy of the tree, and run the default
tests on it.

    python tests/mutations.py             all of them; status 1 where more than two go unnoticed
    python tests/mutations.py 3 17        some, by their number

Tests of the mutated package run first, and a run ends at its first failure, so a mutation that is noticed costs
seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_UNNOTICED = 2
PACKAGES = ("kernels", "storage", "bench")


class Mutation(NamedTuple):
    """`right` occurs once in `file` and becomes `wrong`. `tests` run first."""

    file: str
    right: str
    wrong: str
    tests: str


TREE, MATCHES = "tests/tree", "tests/prefix_cache/test_cache_machines.py"
HINTS = "tests/flow/test_session_hints.py"
PAGES, TRANSFER, STORE = "tests/pages", "tests/transfer", "tests/storage"
WRITES = "tests/pages/test_writes.py"
MUTATIONS = (
    # Tree
    Mutation("hicache/pages/tree.py", "if length < node.num_tokens:", "if length > node.num_tokens:", MATCHES),
    Mutation("hicache/pages/tree.py", "raw, pos) // page * page, limit - pos)", "raw, pos), limit - pos)",
             "tests/flow/test_engine_in_flight.py"),
    Mutation("hicache/pages/tree.py", "            if self._is_loading(child):\n                break\n", "", TREE),
    Mutation("hicache/flow/copies.py", "            if error is None:\n                arrived.append",
             "            if True:\n                arrived.append",
             "tests/flow"),
    Mutation("hicache/pages/writes.py", "pages.mark_stored(rows[raw], self._bit)", "pass",
             "tests/flow/test_packed_pages.py"),
    Mutation("hicache/pages/writes.py", " & ~source.pages.has(rows, ABOVE)]", "]", WRITES),
    Mutation("hicache/pages/writes.py", "            self._queue_all()\n            self.mode = WriteMode.EARLY",
             "            self.mode = WriteMode.EARLY", WRITES),
    Mutation("hicache/pages/writes.py", "if self.mode is not WriteMode.DRAIN:", "if True:", WRITES),
    Mutation("hicache/flow/writes.py", "if done.ticket not in self._stalled:", "if True:",
             "tests/flow/test_disk_engine.py"),
    Mutation("hicache/engine.py", "            writes.resume()\n", "            pass\n",
             "tests/flow/test_cost_of_calls.py"),
    Mutation("hicache/flow/writes.py", "self.tier.used(self._prefix_keys)", "pass", "tests/flow/test_disk_engine.py"),
    Mutation("hicache/flow/stop.py", "is_raw, strict=True) if not raw]", "is_raw, strict=True)]",
             "tests/flow/test_packed_pages.py"),
    Mutation("hicache/flow/copies.py", "min(absent, new + first_gap(has[new:])) if num_new else absent",
             "absent", "tests/flow/test_remote_engine.py"),
    Mutation("hicache/transfer/segments.py", "PageSegment(rest.numpy(), pool_page",
             "PageSegment(pages.numpy(), pool_page", TRANSFER),
    Mutation("hicache/pages/states.py", "self.num_in_flight -= len(came) + len(raw)", "self.num_in_flight -= len(came)",
             PAGES),
    Mutation("hicache/pages/states.py", "num_free = self.ensure_free(len(rows))",
             "num_free = self.pool.available()", PAGES),
    Mutation("hicache/pages/states.py", "self.state[before] & (HELD | ABOVE) == HELD]",
             "self.state[before] & HELD == HELD]", PAGES),
    Mutation("hicache/pages/states.py", "                self.order.lock(before)\n",
             "                before = NO_ROWS\n", PAGES),
    Mutation("hicache/pages/states.py", "            self.abandon(rows[~ok])\n", "            pass\n", PAGES),
    Mutation("hicache/pages/states.py", "self.writing[rows] |= store_bit\n        self.lock(rows)",
             "self.writing[rows] |= store_bit", "tests/flow/test_engine_in_flight.py"),
    Mutation("hicache/pages/states.py", "(self.order.locks[rows] == 0) & (self.order.expected[rows] == 0)",
             "self.order.locks[rows] == 0", PAGES),
    Mutation("hicache/pages/states.py", "new = rows[~self.has(rows, ABOVE)]", "new = rows", PAGES),
    Mutation("hicache/pages/states.py",
             "self.state[rows] &= ABOVE\n        self.pool_page[rows] = self.second_pool_page[rows] = 0",
             "self.state[rows] = 0\n        self.pool_page[rows] = self.second_pool_page[rows] = 0", PAGES),
    Mutation("hicache/pages/table.py", "cut = cut[is_start]", "pass", TREE),
    Mutation("hicache/pages/table.py", "seen.age[first : row + 1] = self.age[first : row + 1]\n",
             "seen.age[first : row + 1] = row\n", PAGES),
    Mutation("hicache/pages/tree.py", "lower.namespace, lower.rows[:num_pages])",
             "lower.namespace, lower.rows[: num_pages + 1])", TREE),
    Mutation("hicache/pages/device.py", "self.table.hold(rows)", "pass", TREE),
    Mutation("hicache/pages/device.py", "is_linked=full is None", "is_linked=False", TREE),
    Mutation("hicache/prefix_cache/swa_radix_cache.py", "start = starts.pop()",
             "start = self.required_from(node, ahead)", MATCHES),
    Mutation("hicache/pages/tree.py", "if end_values and pos == len(tokens):", "if end_values:", TREE),
    Mutation("hicache/pages/tree.py", "None if not len(lacking) else", "None if len(lacking) < 2 else", MATCHES),
    Mutation("hicache/pages/components.py", "max(0, end - self.window)",
             "max(0, end - 1)", MATCHES),
    Mutation("hicache/pages/tree.py", "component.first_required(length) // self.page_size : end",
             "component.first_required(end) // self.page_size : end", "tests/flow/test_engine_in_flight.py"),
    Mutation("hicache/pages/tree.py", "return min(most, num_unlocked)", "return most", TREE),
    # Eviction
    Mutation("hicache/pages/tree.py", "node.rows = TokenRun(node.run.tokens[:num_tokens]), node.rows[:start]",
             "node.rows = TokenRun(node.run.tokens[:num_tokens]), node.rows[num_pages:]", TREE),
    Mutation("hicache/flow/copies.py", "            held = held[~resident.order.has_ended[held]]\n", "",
             HINTS),
    Mutation("hicache/flow/commit.py", "        self._context.tree.expire(now_s)\n", "", HINTS),
    Mutation("hicache/flow/commit.py", "            steps.callback(tree.touch, lease.node)\n",
             "            pass\n", "tests/flow"),
    Mutation("hicache/pages/order.py", "self._first_out_ticks += len(rows)", "self._first_out_ticks = len(rows)",
             PAGES),
    Mutation("hicache/pages/order.py", "rows = rows[self._is_in_batch(rows)]", "pass", PAGES),
    Mutation("hicache/pages/order.py", "return ~is_blocked", "return is_evictable", PAGES),
    Mutation("hicache/pages/order.py", "is_linked = (classes != _FIRST_OUT) & self._is_linked",
             "is_linked = np.full(len(rows), self._is_linked)", PAGES),
    Mutation("hicache/pages/order.py", "rows[is_free & ~self.is_held[at]], 1)", "NO_ROWS, 1)", PAGES),
    Mutation("hicache/pages/order.py", "self.key[rows] = np.arange(len(rows)) - self._first_out_ticks",
             "self.key[rows] = self._first_out_ticks - np.arange(len(rows))", "tests/flow/test_staged_load.py"),
    Mutation("hicache/pages/table.py", "last - first != num_rows - 1", "last < first", PAGES),
    Mutation("hicache/pages/order.py", "self.key[rows] = self._ranks.rank[rows]", "pass", PAGES),
    Mutation("hicache/pages/order.py", "classes[self.expected[rows] > 0] = _EXPECTED", "pass", PAGES),
    Mutation("hicache/pages/order.py", "while self.num_kept + len(rows) > limit:", "while self.num_kept > limit:",
             PAGES),
    Mutation("hicache/pages/frequency.py", "at.uses[rows] = 1.0 + at.uses[rows]", "at.uses[rows] = at.uses[rows]",
             "tests/pages/test_frequency.py"),
    Mutation("hicache/pages/frequency.py", "self._evicted.put(at.table.name[rows], at.uses[rows], at.used_at[rows])",
             "pass", "tests/pages/test_frequency.py"),
    Mutation("hicache/flow/staged_load.py", " or not (request.load is None or request.load.completed):", ":",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/staged_load.py", "elif self._has_grown(request):", "elif False:",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/staged_load.py", "self._context.by_name[name].pages.unlock(rows)", "pass",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/copies.py", "came_above(load.pages[FULL].rows)", "came_above(load.pages[FULL].rows[:0])",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/context.py",
             "self.exclusive.left_above(rows)", "pass",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/pages/tree.py", "if self._has_lower_tier or len(self.components) == 1:",
             "if len(self.components) == 1:", "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/prompt.py", "rows_lost = rows[~pages.has(rows, ABOVE)]", "rows_lost = rows",
             "tests/flow/test_staged_load.py"),
    Mutation("hicache/flow/reads.py", "num_delayed if request.num_delayed is None else request.num_delayed",
             "num_delayed", "tests/flow/test_prefetch_together.py"),
    Mutation("hicache/flow/cost.py", "if token_s < 0:", "if False:", "tests/flow/test_cost.py"),
    Mutation("hicache/flow/cost.py", "elif pair_s > 0:", "else:", "tests/flow/test_cost.py"),
    Mutation("hicache/flow/reads.py", "max(read_s, (self._clock() - request.begun_s) * num_left / (num_pages * page))",
             "read_s", "tests/flow/test_join.py"),
    Mutation("hicache/flow/reads.py", "if others and not estimate", "if False and not estimate",
             "tests/flow/test_join.py"),
    Mutation("hicache/flow/reads.py", "return self.is_urgent or not request.is_urgent", "return True",
             "tests/flow/test_prefetch_together.py"),
    Mutation("hicache/flow/reads.py", "self._jobs.stop_waiting(request, lambda _, pages: pages > page)", "pass",
             "tests/flow/test_prefetch_together.py"),
    Mutation("hicache/flow/reads.py", "self._leave_jobs(request) if not job.requests]", "self._leave_jobs(request)]",
             "tests/flow/test_prefetch_together.py"),
    Mutation("hicache/flow/reads.py", "gone = self.located.lose(component, pages, store)", "gone = [*pages]",
             "tests/flow/test_disk_and_remote.py"),
    Mutation("hicache/flow/reads.py", "request.num_queried_stores += 1",
             "request.num_queried_stores = len(self._stores)",
             "tests/flow/test_disk_and_remote.py"),
    Mutation("hicache/flow/cost.py", " - len(self.expected.keys() & self.waiting)", "",
             "tests/flow/test_prefetch_together.py"),
    Mutation("hicache/flow/copies.py", "self.backup_evicted(unsaved, evicting)", "pass",
             "tests/flow"),
    Mutation("hicache/flow/components/window.py", "self._allocator.unmap(value)", "self.device_ids(value)",
             "tests/flow/test_engine_in_flight.py"),
    Mutation("hicache/flow/copies.py", "None if name == FULL else name  #", "None  #",
             "tests/flow/test_engine_in_flight.py"),
    # Transfer
    Mutation("hicache/transfer/plan.py", "skip = max(0, start - position)", "skip = 0", TRANSFER),
    Mutation("hicache/transfer/plan.py", "breaks |= later % rows_per_chunk == 0",
             "breaks |= later % rows_per_chunk == 1", TRANSFER),
    Mutation("hicache/transfer/counter.py", "if load_id >= 0 and self._owner[slot] == load_id:",
             "if load_id >= 0:", TRANSFER),
    Mutation("hicache/transfer/cpu.py", "self._counter.fail(load_id, TransferError(str(error)))", "pass", TRANSFER),
    Mutation("hicache/transfer/load_queue.py", "and first.num_queued >= num_layers:",
             "and first.num_queued:", TRANSFER),
    # Store
    Mutation("storage/slot_file.py", "_CHECKSUM.unpack_from(raw, end)[0] != xxhash", "0 and xxhash", STORE),
    Mutation("storage/lmdb_writer.py", "            self._sync_group()\n            with", "            with", STORE),
    Mutation("storage/index.py",
             "            self._txn.delete(_SLOT.pack(*entry.length, entry.slot), db=self._slots)\n", "", STORE),
    Mutation("storage/index.py", "if ticks[last.slot] == last.tick:", "if True:", STORE),
    Mutation("storage/store_files.py", "if one.key not in newest or newest[one.key] < one:",
             "if one.key not in newest:", STORE),
    # Codec
    Mutation("storage/header.py", "(_KEY_LENGTH.pack(len(key)), key, fields)", "(fields,)", STORE),
    Mutation("storage/header.py", "(self.namespace == namespace, ", "(True, ", STORE),
    Mutation("storage/codec.py", "if frame.content_size != self._page_bytes:", "if not frame.content_size:", STORE),
    Mutation("storage/codec.py", "        if not fields.encrypted:\n", "        if not fields:\n", STORE),
)  # fmt: skip


def copy_tree(target: Path) -> None:
    """Copy the files of the repository, with the package as it is installed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    package = target / "build" / "package" / "hicache"
    package.mkdir(parents=True)
    for path in [*(target / "hicache").iterdir(), *(target / folder for folder in PACKAGES)]:
        (package / path.name).symlink_to(path)


def is_noticed(tree: Path, mutation: Mutation) -> bool:
    """Whether a default test fails."""
    package = tree / "build" / "package"
    pytest = [sys.executable, "-m", "pytest", "-x", "--workers", "2", "-m", "not long and not remote", "--durations=0"]
    pytest += ["--timeout=60", "-p", "no:cacheprovider", "-o", f"pythonpath={package} . tests/support"]
    for tests in (mutation.tests, "tests"):
        environment = {**os.environ, "PYTHONPATH": str(package), "HICACHE_TEST_PROFILE": "unshrunk"}
        done = subprocess.run([*pytest, tests], cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            printed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            print("   ", (printed or done.stdout.splitlines()[-1:] or [done.stderr[-200:]])[0][:200])
            return True
    return False


def main(numbers: list[int]) -> int:
    unnoticed = []
    with tempfile.TemporaryDirectory(prefix="hicache-mutations-") as folder:
        copy_tree(Path(folder))
        for number in numbers or range(1, len(MUTATIONS) + 1):
            mutation, begin_s = MUTATIONS[number - 1], time.monotonic()
            file = Path(folder, mutation.file)
            text = file.read_text()
            assert text.count(mutation.right) == 1, f"{number}: {mutation.file} no longer says {mutation.right!r} once"
            file.write_text(text.replace(mutation.right, mutation.wrong))
            noticed = is_noticed(Path(folder), mutation)
            file.write_text(text)
            verdict = f"{'noticed' if noticed else 'NOT NOTICED'} in {time.monotonic() - begin_s:.0f} s"
            print(f"{number:3} {verdict}: {mutation.file}: {mutation.right.strip()}", flush=True)
            if not noticed:
                unnoticed.append(number)
    print(f"{len(numbers or MUTATIONS) - len(unnoticed)} noticed, not {unnoticed}")
    return int(len(unnoticed) > MAX_UNNOTICED)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
