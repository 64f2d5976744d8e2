"""Looks up chunks in the store and records the results, because vLLM asks for one chunk at a time and must not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from hicache.storage.process.jobs import FindDone, FindJob
from hicache.stores.disk_and_remote import Stores

_LOOKUPS_A_POLL = 16


@dataclass(slots=True)
class _Verdict:
    """The result of a look-up. `held`: whether the store has the chunk; None until the store has answered. `requests`:
    unfinished requests that looked up the chunk."""

    held: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Look-ups of chunks in the store. The tier owns this object; all calls hold vLLM's lock.

    The chunks that a request looks up in one scheduler step become one job at the end of the step. Only the first chunk
    of a request is looked up immediately. Most new prompts miss their first chunk, and vLLM then does not look up all
    chunks of the prompt in every step.

    A result stays valid until all requests that looked up the chunk have finished, unless `mark` corrects it. Otherwise
    a chunk whose load fails would be found and loaded again and again.
    """

    def __init__(
        self,
        stores: Stores,
        keys_of: Callable[[Sequence[bytes]], list[bytes]],
        poll: Callable[[], None],
        answer_s: Callable[[str, bytes], float],
    ) -> None:
        """`poll`: must pass answers of the store to `answered`. `answer_s`: returns the seconds that a request waits
        for the remote store, given the request and the first chunk of its look-up."""
        self._stores = stores
        self._keys_of = keys_of
        self._poll = poll
        self._answer_s = answer_s
        self._first: dict[str, _Verdict] = {}  # result of the first look-up, for requests that arrived in this step
        self._verdicts: dict[bytes, _Verdict] = {}
        self._verdicts_by_request: dict[str, dict[bytes, _Verdict]] = {}  # in the order of look-up
        self._until_s: dict[str, float] = {}  # deadline of the remote store by request
        self._batches: dict[str, list[bytes]] = {}  # chunks of the next job by request
        self._in_flight: dict[int, list[bytes]] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        """Return the number of chunks that unfinished requests have looked up."""
        return len(self._verdicts)

    def lookup(self, chunk: bytes, request: str) -> bool | None:
        """Return whether the store has the chunk; None means that vLLM should retry in the next step. If the answer for
        the first chunk of the request arrives during this step and is a miss, return False for the following chunks of
        the step. vLLM got None for the first chunk, so it looks up all chunks again in the next step if it does not
        need a prefix."""
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
        """Return the first run of consecutive chunks of a request that the store has. Returns None if the store has not
        answered for all chunks yet."""
        looked_up = self._verdicts_by_request.get(request, {})
        if any(verdict.held is None for verdict in looked_up.values()):
            return None
        found = dropwhile(lambda chunk: not looked_up[chunk].held, looked_up)
        return list(takewhile(lambda chunk: looked_up[chunk].held, found))

    def may_be_held(self, chunk: bytes) -> bool:
        """Return False if no unfinished request has looked up the chunk, or if the store does not have it. Otherwise
        return True, also if the store has not answered yet."""
        verdict = self._verdicts.get(chunk)
        return verdict is not None and verdict.held is not False

    def flush(self) -> None:
        """Send all look-ups since the last call of `flush` to the store."""
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
        """Record the answer to a job."""
        batch = self._in_flight.pop(done.ticket, [])
        held = done.others if done.answered and done.others else (False,) * len(batch)
        self._settle(batch, held[: len(batch)])

    def mark(self, chunks: Iterable[bytes], held: bool) -> None:
        """Correct the results for these chunks, because a load or a store has shown whether the store has them."""
        for chunk in chunks:
            verdict = self._verdicts.get(chunk)
            if verdict is not None:
                verdict.held = held

    def forget(self, request: str) -> None:
        """Remove the results that only this finished request needed."""
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
