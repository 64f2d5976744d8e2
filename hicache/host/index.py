"""Which pages are on the host, by page key, and which of them leaves first.

    reserve    others leave for pages to write to     in flight, and nobody's to read
    publish    their bytes are confirmed              found by `get`, and in the eviction order while not locked
    abandon    or did not come                        gone

Pages are kept in runs: pages that follow each other in a prompt and came together. A run is what is locked and what has
a place in the eviction order; of a victim the last pages leave first. A run that others follow stays until they have
left, and is locked while one of them is: of a prompt the end leaves first, whatever the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from hicache.errors import InvariantError
from hicache.eviction.orders import clock
from hicache.eviction.policy import make_order
from hicache.host.audit import Counts, index_violations
from hicache.host.hints import PageHints
from hicache.host.run import RUN_PAGES, HostRun, NewPages, Pages, RunPart, held_by, path_of, runs_for, spans


class PageIndex(PageHints):
    """The pages of one host pool: free, in flight or published. Owned by the scheduler thread.

    `policy`: the eviction order. `on_come`: told of what was published, `on_leave`: of the last keys of a run that are
    evicted. `run_pages`: most pages of a run.
    """

    def __init__(
        self,
        pool: Pages,
        policy: str,
        on_come: Callable[[HostRun], None] | None = None,
        on_leave: Callable[[HostRun, Sequence[bytes]], None] | None = None,
        run_pages: int = RUN_PAGES,
    ) -> None:
        self.pool, self._run_pages, self._on_come, self._on_leave = pool, run_pages, on_come, on_leave
        super().__init__(make_order(policy, lambda run: not run.after or run.is_duplicate))
        # Pages of the pool: of reserved runs, and of those that are not locked. `num_raw`: published keys with two.
        self.num_in_flight = self.num_evictable = self.num_raw = 0
        self._num_published = 0

    def __len__(self) -> int:
        """Published pages."""
        return self._num_published

    def __iter__(self) -> Iterator[bytes]:
        """The keys of published pages."""
        return (key for key, run in self._runs.items() if run.is_published)

    def __contains__(self, key: bytes) -> bool:
        """Whether the bytes of `key` are there."""
        run = self._runs.get(key)
        return run is not None and run.is_published

    def get(self, key: bytes) -> HostRun | None:
        """The run that holds the bytes of `key`."""
        run = self._runs.get(key)
        return run if run is not None and run.is_published else None

    def find(self, key: bytes) -> HostRun | None:
        """The run that has the bytes of `key`, or is to have them."""
        return self._runs.get(key)

    def holders(self, keys: Sequence[bytes]) -> list[HostRun | None]:
        """`find` of each key."""
        return [*map(self._runs.get, keys)]

    def is_coming(self, key: bytes) -> bool:
        """Whether the bytes of `key` are there or on their way from the device. A read may bring nothing."""
        run = self._runs.get(key)
        return run is not None and run.is_coming

    def is_whole(self, keys: Sequence[bytes]) -> bool:
        """Whether all of `keys`, which follow each other in a prompt, are `is_coming`, whoever brings or brought them.
        By run: a key names all tokens up to its page, so a run that has it has the pages before it."""
        end = len(keys)
        while end > 0:
            run = self._runs.get(keys[end - 1])
            if run is None or not run.is_coming:
                return False
            end -= run.keys.index(keys[end - 1]) + 1
        return True

    def parts(self, keys: Sequence[bytes]) -> list[RunPart]:
        """Where the published ones of `keys`, which follow each other in a prompt, are: without what is not."""
        if self._runs.keys().isdisjoint(keys):
            return []
        # [at, last): of one run, its pages from the `skipped`-th on
        found, at, end, get = list[RunPart](), 0, len(keys), self._runs.get
        while at < end:
            run = get(keys[at])
            if run is None or not run.is_published:
                at += 1
                continue
            skipped = 0 if run.key == keys[at] else run.keys.index(keys[at])
            last = at + len(run.keys) - skipped
            if last > end or run.keys[-1] != keys[last - 1]:
                last = run.common_end(keys, at, end)
            found.append(RunPart(run, skipped, at, last))
            at = last
        return found

    def lacking(self, keys: Sequence[bytes], start: int) -> list[int]:
        """Which of `keys` from `start` on are not `is_coming`."""
        runs = map(self._runs.get, keys[start:])
        return [at for at, run in enumerate(runs, start) if run is None or not run.is_coming]

    def runs_of(self, keys: Sequence[bytes]) -> list[HostRun]:
        """The runs of those of `keys`, which follow each other in a prompt, that are published, each once."""
        return [part.run for part in self.parts(keys)]

    def absent(self, pages: NewPages) -> list[NewPages]:
        """Those of `pages` that are not `is_coming`, in pieces without a gap."""
        if self._runs.keys().isdisjoint(pages.keys):
            return [pages] if pages.keys else []
        return [pages.part(start, end) for start, end in spans(self.lacking(pages.keys, 0))]

    @property
    def capacity(self) -> int:
        """Pages that are free or evictable."""
        return self.pool.available() + self.num_evictable

    def leaving(self) -> Iterator[HostRun]:
        """The runs that nobody has locked, in the order in which they would leave if nothing changed from now on."""
        num_gone = Counter[HostRun]()

        def freed(run: HostRun) -> HostRun | None:
            if (parent := run.parent_run) is not None:
                num_gone[parent] += 1
            return parent if parent is not None and num_gone[parent] == len(parent.after) else None

        return self._order.leaving(freed)

    def fitting(self, new: Sequence[NewPages]) -> list[NewPages]:
        """Of `new`, from its first page on, what there is room for beside what it follows."""
        fits, parents, taken = list[NewPages](), list[HostRun](), 0
        try:
            for pages in new:
                parents += (needed := self._needed_by(pages))
                self.lock(needed)
                num_pages = min(len(pages.keys), max(0, self.capacity - taken))
                if num_pages:
                    fits.append(pages.part(0, num_pages))
                if num_pages < len(pages.keys):
                    break
                taken += num_pages
        finally:
            self.unlock(parents)
        return fits

    def reserve(self, new: Sequence[NewPages]) -> list[HostRun] | None:
        """Pages to write to, for which others leave; None, and none leaves, where too many are locked. What others of
        `new` follow comes before them. Of keys that somebody has already, `publish` keeps what comes first."""
        num_pages = sum(len(pages.keys) for pages in new)
        parents = [run for pages in new for run in self._needed_by(pages)]
        self.lock(parents)  # what pages follow must not leave for them
        try:
            if num_pages > self.capacity:
                return None
            free, runs = iter(self._take(num_pages)), list[HostRun]()
            for pages in new:
                parent = self._runs.get(pages.previous_key) if pages.previous_key else None
                for run in runs_for(pages, free, self._run_pages):
                    self._follow(run, parent)
                    is_new = self._runs.keys().isdisjoint(run.keys)
                    keys = run.keys if is_new else [key for key in run.keys if key not in self]
                    self._runs.update(dict.fromkeys(keys, run))
                    runs.append(run)
                    parent = run
        finally:
            self.unlock(parents)
        return runs

    def reserve_second_pages(self, run: HostRun, keys: Sequence[bytes]) -> bool:
        """Second pages for `keys` of a reserved run; False, and none leaves, where too many are locked."""
        if len(keys) > self.capacity:
            return False
        run.second_pages.update(zip(keys, self._take(len(keys)), strict=True))
        return True

    def publish(self, run: HostRun, ok: Sequence[bool] | None = None) -> list[HostRun]:
        """The bytes of a reserved run are there, of its pages those that are `ok`. Returns the runs of those that
        nobody brought before: `run`, or what is left of it, divided where some did not come."""
        if (ok is None or all(ok)) and {*map(self._runs.get, run.keys)} == {run}:  # nobody else brings any
            self._publish(run)
            return [run]
        came = [key not in self and (ok is None or ok[i]) for i, key in enumerate(run.keys)]
        # of the run, in turn: intervals that came first here, and those that did not, or that others brought
        lengths = [(has_come, len(list(group))) for has_come, group in groupby(came)]
        divided = [(self._divide(run, num_pages), has_come) for has_come, num_pages in lengths[:-1]]
        published = []
        for piece, has_come in [*divided, (run, lengths[-1][0])]:
            if has_come:
                self._take_over(piece)
                self._publish(piece)
                published.append(piece)
            else:
                self.abandon(piece)
        return published

    def abandon(self, run: HostRun) -> None:
        """Give a reserved run back."""
        self._order.end_keep(run)
        self.num_in_flight -= run.num_held
        self.pool.free(held_by([run]))
        for key in run.keys:
            if self._runs.get(key) is run:
                del self._runs[key]
        holder = self._runs.get(run.keys[-1])  # who brings or brought the same
        for child in run.after:
            child.parent_run = None
            self._follow(child, holder)
        run.after.clear()
        if (parent := run.parent_run) is not None:
            if (needed := run.needs) is not None:
                self.unlock([needed])
            self._leave(run, parent)

    def link(self, keys: Sequence[bytes]) -> None:
        """Have published runs of these pages, which follow each other in a prompt, follow the runs before them, also
        those in flight, where that was not known."""
        for part in self.parts(keys):
            if part.start and part.run.parent_run is None:
                self._follow(part.run, self._runs.get(keys[part.start - 1]))

    def count_use(self, parts: list[RunPart]) -> list[RunPart]:
        """One more request uses these pages of its prompt, from wherever: it counts when it ends, see `touch`. A run
        that it uses the beginning of is divided there, for the rest was used less often; returns where they are now."""
        if parts:
            run, skipped, start, end = parts[-1]
            num_used = skipped + end - start
            if num_used < len(run.keys) and not (run.locks or run.expected):
                parts = [*parts[:-1], RunPart(self._divide(run, num_used), skipped, start, end)]
        for part in parts:
            part.run.hit_count += 1
        return parts

    def touch(self, runs: Sequence[HostRun]) -> None:
        """A request that used these has ended; they are in the order of its prompt. What it brought is used once."""
        for run in reversed(runs):  # the first is the most recent
            run.last_access_time = next(clock)
            self._order.hit(run)

    def lock(self, runs: Iterable[HostRun]) -> None:
        """Someone needs these to stay, and so what they follow."""
        first = list[HostRun]()  # those that nobody had locked
        for locked in runs:
            run: HostRun | None = locked
            while run is not None:
                run.locks += 1
                if run.locks > 1:
                    break
                first.append(run)
                run = run.needs
        self.num_evictable -= sum([run.num_held for run in first])
        self._order.lock(*first)

    def unlock(self, runs: Iterable[HostRun]) -> None:
        """Undo one `lock`, which is no use."""
        last = list[HostRun]()  # those that nobody has locked any more
        for unlocked in runs:
            run: HostRun | None = unlocked
            while run is not None:
                run.locks -= 1
                assert run.locks >= 0, "unlocked more often than locked"
                if run.locks:
                    break
                last.append(run)
                run = run.needs
        self.num_evictable += sum([run.num_held for run in last])
        self._order.unlock(*last)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Evict these pages, which are of no use any more: of a run the last ones, where nobody needs it."""
        for run, skipped, start, end in self.parts(keys):
            if not (run.locks or run.expected or run.after) and skipped + end - start == len(run.keys):
                self.pool.free(self._shrink(run, end - start))

    def clear(self) -> None:
        """Evict what nobody has locked."""
        while (run := self._order.victim()) is not None:
            self.pool.free(self._shrink(run, len(run.keys)))

    def check(self, locks: Counter[HostRun]) -> None:
        """Raise `InvariantError` unless every page of the pool is free or has one owner, and what is in flight and what
        is locked is somebody's: `locks` by run, one of each holder."""
        runs = {run for run in self._runs.values() if run.is_published}
        counted = len(self), self.num_raw, self.num_in_flight, self.num_evictable
        counts = Counts(*counted, self.pool.available(), self.pool.num_pages)
        found = index_violations(runs, {*self._order}, counts, locks) + self._kept_violations(locks)
        if found:
            raise InvariantError("host index", found)
        self.pool.check()

    def _needed_by(self, pages: NewPages) -> list[HostRun]:
        parent = self._runs.get(pages.previous_key) if pages.previous_key else None
        return [] if parent is None or parent.is_duplicate else [parent]

    def _follow(self, run: HostRun, parent: HostRun | None) -> None:
        """Nothing where `parent`, which came again, follows `run` itself."""
        if parent is not None and run not in (path_of(parent) if run.after else [parent]):
            run.parent_run = parent
            parent.after.add(run)
            if run.locks and (needed := run.needs) is not None:
                self.lock([needed])

    def _take(self, num_pages: int) -> list[int]:
        """`num_pages` pages of the pool, for which others leave."""
        if (short := num_pages - self.pool.available()) > 0:
            self.pool.free(self._evict(short))
        ids = self.pool.alloc(num_pages)
        assert ids is not None
        self.num_in_flight += num_pages
        return ids

    def _evict(self, num_pages: int) -> list[int]:
        """Others leave until so many pages of the pool are free, or nobody is left who may; returns these."""
        freed = list[int]()
        while len(freed) < num_pages and (run := self._order.victim()) is not None:
            freed += self._shrink(run, min(num_pages - len(freed), len(run.keys)))
        return freed

    def _shrink(self, run: HostRun, num_pages: int) -> list[int]:
        """The last pages of an unlocked run leave. Returns their places in the pool, for the caller to free."""
        assert not run.locks, "somebody needs it"
        start, parent = len(run.keys) - num_pages, run.parent_run
        gone, ids = run.keys[start:], run.ids[start:]
        second_ids = [run.second_pages[key] for key in gone if key in run.second_pages] if run.second_pages else []
        self.num_evictable -= num_pages + len(second_ids)
        self.num_raw -= len(second_ids)
        self._num_published -= num_pages
        if start:
            del run.keys[start:], run.ids[start:]
            self._order.shrink(run, num_pages)
            left = HostRun(gone, ids, None, 0)  # what comes back was used as this
            left.follow(run)
            self._order.policy.forget(left)
        else:
            self._order.evict(run)
            run.is_published = False
            if parent is not None:
                self._leave(run, parent)
        for key in gone:
            del self._runs[key]
        if self._on_leave is not None:
            self._on_leave(run, gone)
        if second_ids:
            for key in gone:
                run.second_pages.pop(key, None)
            ids += second_ids
        return ids

    def _take_over(self, run: HostRun) -> None:
        """It came before others that bring the same. What was said of these holds."""
        said = [self._runs[key].expected_uses for key in run.keys if key in self._runs]
        run.expected_uses = next((uses for uses in said if uses != 1.0), run.expected_uses)
        self._runs.update(dict.fromkeys(run.keys, run))

    def _publish(self, run: HostRun) -> None:
        """All of a reserved run is there, and was not before."""
        assert run.locks > 0, "its writer has let go of it"
        self.num_in_flight -= run.num_held
        self.num_raw += len(run.second_pages)
        run.is_published, run.last_access_time, run.job, run.wanted = True, next(clock), None, None
        self._num_published += len(run.keys)
        run.locks -= 1
        if not run.locks:
            self.num_evictable += run.num_held
            self._order.insert(run)
            if (needed := run.needs) is not None:
                self.unlock([needed])
        self._tell_uses(run)
        if self._on_come is not None:
            self._on_come(run)

    def _divide(self, run: HostRun, num_pages: int) -> HostRun:
        """The first pages of a run become a run of their own, before it: of one that nobody has locked, or of one that
        one alone has, who brings it or has both locked from now on."""
        first, parent = run.take_first(num_pages), run.parent_run
        if parent is not None:
            parent.after.remove(run)
            parent.after.add(first)
        first.parent_run, run.parent_run = parent, first
        first.after.add(run)
        first.locks = 1 + (run.needs is first) if run.locks else 0
        self._runs.update((key, first) for key in first.keys if self._runs.get(key) is run)
        self._order.split(first, run, num_pages)
        return first

    def _leave(self, run: HostRun, parent: HostRun) -> None:
        run.parent_run = None
        parent.after.remove(run)
        if not parent.after and parent.is_published:
            self._order.update(parent)
