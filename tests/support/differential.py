"""Whether two checkouts of hicache serve the same: drives both with the same random requests, and compares what is
reused of each prompt, by tier, and every byte of it with the truth.

    git worktree add /tmp/old COMMIT
    python tests/support/differential.py /tmp/old [/tmp/new] --requests 100000 [--kind hybrid] [--seed 1] [--show 10]

Without a second one it is this checkout. Each runs in its own process, with its own package and its own helpers of the
tests, and answers each line with one line. All work of a call has ended before the next call, and no clock decides, so
the requests determine each answer. The only exception are evictions of a store that is too small, because its reader
and its writer note uses concurrently. Requests share prefixes and continue the outputs of other requests, in
several namespaces; a few are inside at a time, some wait for a prefetch first, some are
cancelled. Each history draws a model, sizes of all tiers that are too small for it, with a store or without, and
policies.

Status 1: an answer was wrong, or a call failed that may not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("full", "window", "hybrid")
TIERS = ("device", "host", "disk", "remote")
PAGE = 8
REQUESTS_A_HISTORY = 250
_MAX_LIVE, _LONGEST = 3, 240
Json = dict[str, Any]


# A checkout, in a process of its own


class _Server:
    """One engine after the other, each for one history."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._live: dict[str, list[Any]] = {}  # lease, tokens, how many of them are computed

    def answer(self, verb: str, line: Json) -> Json:
        from hicache.errors import ResourceExhausted

        try:
            answer = getattr(self, f"do_{verb}")(**line) or {}
            if self._engine is not None:
                self._engine.flush()
            return answer
        except ResourceExhausted as error:
            return {"refused": type(error).__name__}

    def do_open(self, kind: str, settings: Json, store_bytes: int) -> None:
        from component_case import MODELS, config
        from hicache import build_engine
        from memory_store import MemoryPageStore
        from stepped_transfer import SteppedTransfers

        store = MemoryPageStore(store_bytes) if store_bytes else None
        self._model, self._live = MODELS[kind], {}
        self._engine = build_engine(config(**settings), self._model, store=store)
        SteppedTransfers(self._engine)  # a copy is made where it is waited for
        self._engine.start()

    def do_close(self) -> None:
        for name in list(self._live):
            self.do_end(name, False)
        self._engine.flush()
        self._engine.check()
        self._engine.close()
        self._engine = None

    def do_arrive(self, name: str, tokens: list[int], namespace: str) -> None:
        """It expects its prefix to stay, and has what a store has of it read."""
        self._engine.expect(name, tokens, namespace)
        self._engine.prefetch(name, tokens, namespace, "best_effort")

    def do_admit(self, name: str, tokens: list[int], namespace: str, reserve: int) -> Json:
        from hicache import CacheRequest

        packed = np.asarray(tokens)
        try:
            lease = self._engine.acquire(CacheRequest(name, packed, namespace, reserve))
        except Exception:
            self._engine.cancel(name)
            raise
        self._engine.flush()
        self._live[name] = [lease, packed, lease.cached_len]
        self._verify(name)
        return {"hit": [getattr(lease.hit, tier) for tier in TIERS]}

    def do_grow(self, name: str, tokens: list[int], end: int) -> None:
        """Tokens follow, and those up to `end` are computed and committed."""
        from component_case import compute

        if name in self._live:
            live = self._live[name]
            lease, live[1] = live[0], np.append(live[1], np.asarray(tokens, np.int64))
            while live[2] < end:
                stop = self._engine.next_stop(lease, live[2], end)
                if stop > lease.length:
                    self._engine.extend(lease, stop - lease.length)
                compute(self._engine, lease, live[1], live[2], stop, self._model)
                live[2] = stop
                self._engine.commit(lease, live[1][:stop])
                self._engine.flush()

    def do_end(self, name: str, cancel: bool) -> None:
        if name not in self._live:
            self._engine.cancel(name)
        elif cancel:
            del self._live[name]
            self._engine.cancel(name)
        else:
            self._engine.release(self._live.pop(name)[0])

    def _verify(self, name: str) -> None:
        from component_case import verify

        lease, tokens, done = self._live[name]
        verify(self._engine, lease, tokens, done, self._model)


def serve(lines: IO[str], answers: IO[str]) -> None:
    """Answer each line of the first with one of the second."""
    server = _Server()
    for text in lines:
        line = json.loads(text)
        try:
            answer = server.answer(line.pop("verb"), line)
        except Exception as error:  # noqa: BLE001 - the driver counts it
            answer = {"wrong": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Checkout:
    """The other end: a process that serves, by its two pipes."""

    def __init__(self, lines: IO[str], answers: IO[str]) -> None:
        self._lines, self._answers = lines, answers

    def tell(self, verb: str, line: Json) -> None:
        self._lines.write(json.dumps({"verb": verb, **line}) + "\n")
        self._lines.flush()

    def answer(self) -> Json:
        text = self._answers.readline()
        if not text:
            raise RuntimeError("a checkout's process has ended")
        found: Json = json.loads(text)
        return found


@contextlib.contextmanager
def checkout(root: Path) -> Iterator[Checkout]:
    """A process with the package of `root`, as it installs, and its helpers."""
    with tempfile.TemporaryDirectory(prefix="hicache-differential-") as folder:
        package = Path(folder, "hicache")
        package.mkdir()
        for path in [*(root / "hicache").iterdir(), *(root / name for name in ("kernels", "storage", "bench"))]:
            (package / path.name).symlink_to(path)
        paths = os.pathsep.join([folder, str(root / "tests" / "support")])
        environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, __file__, "--serve"], env=environment, **pipes) as process:
            assert process.stdin is not None and process.stdout is not None
            yield Checkout(process.stdin, process.stdout)
            process.stdin.close()


# The requests


@dataclass
class _Request:
    name: str
    tokens: list[int]
    namespace: str
    has_arrived: bool
    is_admitted: bool = False
    done: int = 0


class History:
    """The lines of one history, which follow from its number; answers change none of them."""

    def __init__(self, kind: str, number: int) -> None:
        self._rng = rng = np.random.default_rng([number, KINDS.index(kind)])
        self.kind = kind
        stems = [self._draw(96) for _ in range(4)]
        self._stems = stems + [stem[:40] + self._draw(56) for stem in stems[:2]]
        self._ended: list[tuple[str, list[int]]] = []
        self.store_bytes = int(rng.choice([0, 1 << 18, 1 << 26]))
        self.settings: Json = {
            "device_tokens": 256,
            "max_context_len": 320,
            "prefetch_host_share": 1.0,
            "write_policy": str(rng.choice(["write_through", "write_back", "exclusive"])),
            "eviction_policy": str(rng.choice(["auto", "lru", "lfu", "fifo", "slru", "priority"])),
            "page_size": int(rng.choice([1, 2, 4, 8])),
            "host_bytes": int(rng.choice([30, 60, 120])) * PAGE * 256,
            "host_states": int(rng.choice([4, 12, 30])),
            "mamba_size": int(rng.choice([10, 20])),
            "window_tokens": int(rng.choice([160, 240])),
        }

    def lines(self, num_requests: int) -> Iterator[tuple[str, Json]]:
        yield "open", {"kind": self.kind, "settings": self.settings, "store_bytes": self.store_bytes}
        live, num_begun = dict[str, _Request](), 0
        while live or num_begun < num_requests:
            if num_begun < num_requests and ((len(live) < _MAX_LIVE and self._rng.random() < 0.5) or not live):
                request = self._request(f"r{num_begun}")
                live[request.name], num_begun = request, num_begun + 1
                if request.has_arrived:
                    yield "arrive", {key: getattr(request, key) for key in ("name", "tokens", "namespace")}
                continue
            request = live[list(live)[self._rng.integers(len(live))]]
            yield self._next(request, live)
        yield "close", {}

    def _next(self, request: _Request, live: dict[str, _Request]) -> tuple[str, Json]:
        """Draw the next call for one request."""
        rng = self._rng
        if rng.random() < 0.04:
            del live[request.name]
            return "end", {"name": request.name, "cancel": True}
        if not request.is_admitted:
            request.is_admitted = True
            line = {key: getattr(request, key) for key in ("name", "tokens", "namespace")}
            return "admit", {**line, "reserve": int(rng.choice([16, 48]))}
        if request.done < len(request.tokens):  # a chunk of the prompt, or all of it
            request.done = min(len(request.tokens), request.done + int(rng.choice([24, 80, 300])))
            return "grow", {"name": request.name, "tokens": [], "end": request.done}
        if rng.random() < 0.4 and len(request.tokens) < _LONGEST:  # tokens that were generated
            added = self._draw(int(rng.integers(1, 20)))
            request.tokens, request.done = request.tokens + added, request.done + len(added)
            return "grow", {"name": request.name, "tokens": added, "end": request.done}
        del live[request.name]
        self._ended = [*self._ended[-11:], (request.namespace, request.tokens)]
        return "end", {"name": request.name, "cancel": False}

    def _request(self, name: str) -> _Request:
        rng = self._rng
        if self._ended and rng.random() < 0.5:
            namespace, before = self._ended[rng.integers(len(self._ended))]
        else:
            namespace = str(rng.choice(["", "", "", "tenant"]))
            before = self._stems[rng.integers(len(self._stems))][: int(rng.integers(1, 97))]
        tokens = before[: _LONGEST - 20] + self._draw(int(rng.integers(1, 40)))
        return _Request(name, tokens[:_LONGEST], namespace, bool(rng.random() < 0.4))

    def _draw(self, num_tokens: int) -> list[int]:
        found: list[int] = self._rng.integers(0, 50, num_tokens).tolist()
        return found


# The comparison


@dataclass
class Outcome:
    """By group of histories: tokens hit on either side, by tier; how requests compare; what is wrong, by side."""

    tokens: dict[tuple[str, ...], tuple[Counter[str], Counter[str]]] = field(default_factory=dict)
    requests: dict[tuple[str, ...], Counter[str]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def enter(self, group: tuple[str, ...], verb: str, where: str, answers: Sequence[Json]) -> None:
        """Two answers to one line."""
        both = self.tokens.setdefault(group, (Counter(), Counter()))
        for side, counts, answer in zip(("old", "new"), both, answers, strict=True):
            if "wrong" in answer:
                self.wrong.append(f"{side}: {where}: {answer['wrong']}")
            counts["refused"] += "refused" in answer
            counts.update(dict(zip(TIERS, answer.get("hit", ()), strict=False)))
        if verb == "admit":
            old, new = (sum(answer["hit"]) if "hit" in answer else None for answer in answers)
            if old is None or new is None:
                verdict = "equal" if old == new else "refused"
            else:
                verdict = (
                    "better"
                    if new > old
                    else "worse"
                    if new < old
                    else "equal"
                    if answers[0] == answers[1]
                    else "moved"
                )
            self.requests.setdefault(group, Counter())[verdict] += 1
            if verdict != "equal":
                self.differing.append(f"{verdict}: {where}: {answers[0]} | {answers[1]}")

    def table(self, keys: Sequence[int]) -> Iterator[str]:
        """Totals, by those parts of the groups' names."""
        names = list(dict.fromkeys(tuple(group[key] for key in keys) for group in self.tokens))
        for name in sorted(names):
            groups = [group for group in self.tokens if tuple(group[key] for key in keys) == name]
            old, new = (sum((self.tokens[group][side] for group in groups), Counter[str]()) for side in (0, 1))
            verdict = sum((self.requests[group] for group in groups), Counter[str]())
            totals = [sum(side[tier] for tier in TIERS) for side in (old, new)]
            tiers = ", ".join(
                f"{tier} {old[tier]} -> {new[tier]}" for tier in (*TIERS, "refused") if old[tier] + new[tier]
            )
            change = f"{100 * (totals[1] / totals[0] - 1):+.2f} %" if totals[0] else ""
            verdicts = dict(sorted(verdict.items()))
            yield f"{' '.join(name):34} {totals[0]:9} -> {totals[1]:9} {change:9} {verdicts}; {tiers}"


def drive(sides: Sequence[Checkout], kinds: Sequence[str], num_requests: int, seed: int, outcome: Outcome) -> None:
    """The same histories through both."""
    per_kind, number = -(-num_requests // len(kinds)), seed
    while per_kind > 0:
        for kind in kinds:
            history = History(kind, number)
            settings = history.settings
            store = {0: "no store", 1 << 18: "small store"}.get(history.store_bytes, "store")
            group = (kind, settings["eviction_policy"], settings["write_policy"], store)
            for at, (verb, line) in enumerate(history.lines(min(per_kind, REQUESTS_A_HISTORY))):
                for side in sides:
                    side.tell(verb, line)
                where = f"{' '.join(group)}, history {number}, line {at}, {verb} {line.get('name', '')}"
                outcome.enter(group, verb, where, [side.answer() for side in sides])
        per_kind, number = per_kind - REQUESTS_A_HISTORY, number + 1
        if not (number - seed) % 10:
            print(f"{number - seed} histories a model", *outcome.table([0]), sep="\n", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drive two checkouts with the same requests.")
    parser.add_argument("old", nargs="?", type=Path)
    parser.add_argument("new", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="differing requests to show")
    parser.add_argument("--serve", action="store_true", help="be one of the two; the other arguments do not count")
    given = parser.parse_args(arguments)
    if given.serve:
        with contextlib.suppress(ValueError):  # use the helpers of the checkout, not those next to this file
            sys.path.remove(str(Path(__file__).parent))
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what else prints does not stand between answers
        serve(sys.stdin, answers)
        return 0
    if given.old is None:
        parser.error("name the checkout to compare with")
    outcome = Outcome()
    with checkout(given.old.resolve()) as old, checkout(given.new.resolve()) as new:
        drive((old, new), given.kind or KINDS, given.requests, given.seed, outcome)
    for keys in ([0], [0, 1], [0, 2], [0, 3]):
        print(*outcome.table(keys), "", sep="\n")
    print(f"{len(outcome.differing)} requests differ", *outcome.differing[: given.show], "", sep="\n")
    print(f"{len(outcome.wrong)} wrong answers", *outcome.wrong[: given.show], sep="\n")
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    sys.exit(main())
