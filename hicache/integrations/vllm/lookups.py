"""Which chunks the store holds, as far as it was asked: vLLM asks for one at a time and may not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from hicache.storage.process.client_queue import ClientQueue
from hicache.storage.process.jobs import FindDone, FindJob, ReadDone, ReadJob

_LOOKUPS_A_POLL = 16


@dataclass(slots=True)
class _Verdict:
    """`held`: None until the store has answered. `requests`: that asked and have not finished."""

    held: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Owned by the tier, called under vLLM's lock. The chunks that are looked up in one step of the scheduler become
    one job for the disk, at the end of the step. The first one of a request is asked for at once: most new prompts end
    there, and vLLM, which looks up all chunks of a prompt in every step until it knows, need not go on.

    A verdict lasts as long as a request that asked for it, unless `mark` corrects it: otherwise a chunk whose load
    fails would be found, and loaded in vain, again and again.
    """

    def __init__(
        self,
        reads: ClientQueue[FindJob | ReadJob, FindDone | ReadDone],
        keys_of: Callable[[Sequence[bytes]], list[bytes]],
        poll: Callable[[], None],
    ) -> None:
        """`poll`: hand what the store has answered to `answered`."""
        self._reads = reads
        self._keys_of = keys_of
        self._poll = poll
        self._first: dict[str, _Verdict] = {}  # of the requests that came in this step
        self._verdicts: dict[bytes, _Verdict] = {}
        self._asked_by: dict[str, dict[bytes, _Verdict]] = {}  # in the order of asking
        self._batch: list[bytes] = []
        self._in_flight: dict[int, list[bytes]] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        """Chunks that a request which has not finished asked for."""
        return len(self._verdicts)

    def lookup(self, chunk: bytes, request: str) -> bool | None:
        """Whether the store holds it; None: ask again in the next step. False behind a first chunk that is missing,
        for this step: vLLM has been told None of that one, and asks for all again where it wants no prefix."""
        asked, first = self._asked_by.get(request), self._first.get(request)
        if first is not None and first.held is None and not len(self._asked_by[request]) % _LOOKUPS_A_POLL:
            self._poll()
        if first is not None and first.held is False:
            return False
        verdict = self._verdicts.get(chunk)
        if verdict is None:
            verdict = self._verdicts[chunk] = _Verdict()
            if self._reads.refuses():
                verdict.held = False
            elif asked is None:
                self._first[request] = verdict
                self._ask([chunk])
            else:
                self._batch.append(chunk)
        if asked is None:
            asked = self._asked_by[request] = {}
        asked[chunk] = verdict
        verdict.requests.add(request)
        return verdict.held

    def held(self, request: str) -> list[bytes] | None:
        """Of what the request asked for, the chunks that the store holds without a gap, from the first of them on.
        None: the store has not answered for all yet."""
        asked = self._asked_by.get(request, {})
        if any(verdict.held is None for verdict in asked.values()):
            return None
        found = dropwhile(lambda chunk: not asked[chunk].held, asked)
        return list(takewhile(lambda chunk: asked[chunk].held, found))

    def flush(self) -> None:
        """Ask the store for what was looked up since the last call."""
        batch, self._batch = [chunk for chunk in dict.fromkeys(self._batch) if chunk in self._verdicts], []
        self._first.clear()
        if batch:
            self._ask(batch)

    def _ask(self, batch: list[bytes]) -> None:
        self._num_jobs += 1
        if self._reads.submit(FindJob(self._num_jobs, (), others=tuple(self._keys_of(batch)))):
            self._in_flight[self._num_jobs] = batch
        else:
            self._settle(batch, [False] * len(batch))

    def answered(self, done: FindDone) -> None:
        """Of a job that was announced as stalled before, nothing is left to settle."""
        batch = self._in_flight.pop(done.ticket, [])
        held = done.others if done.answered and done.others else (False,) * len(batch)
        self._settle(batch, held[: len(batch)])

    def stalled(self, ticket: int) -> None:
        """The store does not answer: nothing that it was asked for is held."""
        self.answered(FindDone(ticket, 0, answered=False))

    def mark(self, chunks: Iterable[bytes], held: bool) -> None:
        """A load or a store has shown what the store holds."""
        for chunk in chunks:
            verdict = self._verdicts.get(chunk)
            if verdict is not None:
                verdict.held = held

    def forget(self, request: str) -> None:
        """It has finished."""
        for chunk in self._asked_by.pop(request, ()):
            verdict = self._verdicts[chunk]
            verdict.requests.discard(request)
            if not verdict.requests:
                del self._verdicts[chunk]

    def _settle(self, batch: Sequence[bytes], held: Sequence[bool]) -> None:
        for chunk, is_held in zip(batch, held, strict=True):
            verdict = self._verdicts.get(chunk)
            if verdict is not None and verdict.held is None:
                verdict.held = is_held
