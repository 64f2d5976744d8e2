"""Results of look-ups in the store: vLLM asks for one chunk at a time and must not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from hicache.storage.process.jobs import FindDone, FindJob
from hicache.stores.side_by_side import Stores

_LOOKUPS_A_POLL = 16


@dataclass(slots=True)
class _Verdict:
    """The result of a look-up. `held`: None until the store has answered. `requests`: unfinished requests that
    asked."""

    held: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Owned by the tier, called under vLLM's lock.

    The chunks that a request looks up in one scheduler step become one job at the end of the step. Only the first
    chunk of a request is looked up at once: most new prompts miss there, and vLLM then need not look up all chunks of
    the prompt in every step.

    A result is kept until all requests that asked for it have finished, unless `mark` corrects it. Otherwise a chunk
    whose load fails would be found and loaded again and again.
    """

    def __init__(
        self,
        stores: Stores,
        keys_of: Callable[[Sequence[bytes]], list[bytes]],
        poll: Callable[[], None],
        answer_s: Callable[[str, bytes], float],
    ) -> None:
        """`poll`: must pass the answers to `answered`. `answer_s`: for a request and its first chunk in doubt, how long
        it waits for the remote store."""
        self._stores = stores
        self._keys_of = keys_of
        self._poll = poll
        self._answer_s = answer_s
        self._first: dict[str, _Verdict] = {}  # first look-ups of the requests that arrived in this step
        self._verdicts: dict[bytes, _Verdict] = {}
        self._verdicts_by_request: dict[str, dict[bytes, _Verdict]] = {}  # each in the order of look-up
        self._until_s: dict[str, float] = {}  # the deadline of the remote store, by request
        self._batches: dict[str, list[bytes]] = {}  # by request
        self._in_flight: dict[int, list[bytes]] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        """Number of chunks that unfinished requests have looked up."""
        return len(self._verdicts)

    def lookup(self, chunk: bytes, request: str) -> bool | None:
        """Return whether the store holds the chunk; None: retry in the next step. If the first chunk of the request
        turns out to be missing, return False for the following chunks of this step. vLLM got None for the first chunk,
        so it retries all of them if it does not need a prefix."""
        looked_up, first = self._verdicts_by_request.get(request), self._first.get(request)
        if first is not None and first.held is None and not len(self._verdicts_by_request[request]) % _LOOKUPS_A_POLL:
            self._poll()
        if first is not None and first.held is False:
            return False
        verdict = self._verdicts.get(chunk)
        if verdict is None:
            verdict = self._verdicts[chunk] = _Verdict()
            if self._stores.refuses():
                verdict.held = False
            elif looked_up is None:
                self._first[request] = verdict
                self._ask(request, [chunk])
            else:
                self._batches.setdefault(request, []).append(chunk)
        if looked_up is None:
            looked_up = self._verdicts_by_request[request] = {}
        looked_up[chunk] = verdict
        verdict.requests.add(request)
        return verdict.held

    def held(self, request: str) -> list[bytes] | None:
        """The chunks of a request that the store holds, without a gap from the first held one on. None: the store has
        not answered for all chunks yet."""
        looked_up = self._verdicts_by_request.get(request, {})
        if any(verdict.held is None for verdict in looked_up.values()):
            return None
        found = dropwhile(lambda chunk: not looked_up[chunk].held, looked_up)
        return list(takewhile(lambda chunk: looked_up[chunk].held, found))

    def may_be_held(self, chunk: bytes) -> bool:
        """Return whether the store holds a chunk that an unfinished request has looked up, or has not answered yet."""
        verdict = self._verdicts.get(chunk)
        return verdict is not None and verdict.held is not False

    def flush(self) -> None:
        """Submit the look-ups since the last call to the store."""
        batches, self._batches = self._batches, {}
        self._first.clear()
        for request, chunks in batches.items():
            batch = [chunk for chunk in dict.fromkeys(chunks) if chunk in self._verdicts]
            if batch:
                self._ask(request, batch)

    def _ask(self, request: str, batch: list[bytes]) -> None:
        self._num_jobs += 1
        job = FindJob(self._num_jobs, (), others=tuple(self._keys_of(batch)))
        now_s = self._stores.clock()
        if request not in self._until_s:
            self._until_s[request] = now_s + self._answer_s(request, batch[0])
        if self._stores.find(job, max(0.0, self._until_s[request] - now_s)):
            self._in_flight[self._num_jobs] = batch
        else:
            self._settle(batch, [False] * len(batch))

    def answered(self, done: FindDone) -> None:
        """Note the answer to a job."""
        batch = self._in_flight.pop(done.ticket, [])
        held = done.others if done.answered and done.others else (False,) * len(batch)
        self._settle(batch, held[: len(batch)])

    def mark(self, chunks: Iterable[bytes], held: bool) -> None:
        """Correct results: a load or a store has shown whether the store holds these chunks."""
        for chunk in chunks:
            verdict = self._verdicts.get(chunk)
            if verdict is not None:
                verdict.held = held

    def forget(self, request: str) -> None:
        """Drop the results that only this finished request needed."""
        self._until_s.pop(request, None)
        for chunk in self._verdicts_by_request.pop(request, ()):
            verdict = self._verdicts[chunk]
            verdict.requests.discard(request)
            if not verdict.requests:
                del self._verdicts[chunk]

    def _settle(self, batch: Sequence[bytes], held: Sequence[bool]) -> None:
        for chunk, is_held in zip(batch, held, strict=True):
            verdict = self._verdicts.get(chunk)
            if verdict is not None and verdict.held is None:
                verdict.held = is_held
