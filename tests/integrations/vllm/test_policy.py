"""hicache's eviction policies in vLLM's CPU tier, driven by vLLM's own manager."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from vllm_tier_case import key

NUM_CHUNKS = 16


def manager_of(policy: str) -> CPUOffloadingManager:
    module = "hicache.integrations.vllm" if policy.endswith("Policy") else None
    return CPUOffloadingManager(NUM_CHUNKS, cache_policy=policy, cache_policy_module_path=module)


class Requests:
    """A stand-in for the scheduler: it makes the calls for each request. `check` compares the expected chunks with
    those of the policy."""

    def __init__(self, manager: CPUOffloadingManager) -> None:
        self.manager, self._num = manager, 0
        self.held: set[OffloadKey] = set()

    def context(self, keys: Sequence[OffloadKey]) -> ReqContext:
        self._num += 1
        context = ReqContext(req_id=str(self._num))
        self.manager.on_new_request(context)
        for position, chunk in enumerate(keys):
            context.set_offload_key_position(chunk, 32 * (position + 1))
        return context

    def run(self, keys: Sequence[OffloadKey], fails: bool = False) -> set[OffloadKey] | None:
        """Run a request for a prompt of these chunks. Returns the chunks that were evicted for it, or None if it found
        no capacity."""
        manager, context = self.manager, self.context(keys)
        present = [chunk for chunk in keys if chunk in self.held]
        manager.prepare_load(present, context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            self.held -= set(output.evicted_keys)
            manager.complete_store(output.keys_to_store, context, success=not fails)
            self.held |= set() if fails else set(output.keys_to_store)
        manager.complete_load(present, context)
        manager.on_request_finished(context)
        self.check(keys)
        return None if output is None else set(output.evicted_keys)

    def check(self, keys: Sequence[OffloadKey]) -> None:
        assert len(self.held) <= NUM_CHUNKS
        for chunk in {*self.held, *keys}:
            assert (self.manager.lookup(chunk, self.context([])).name == "HIT") == (chunk in self.held)


def prompt(first: int, length: int) -> list[OffloadKey]:
    return [key(100 * first + i) for i in range(length)]


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(2))
def test_lru_evicts_what_theirs_does(seed: int) -> None:
    """hicache's LRU evicts the same chunks as vLLM's, over random prompts of shared and own chunks, failed stores and
    resets."""
    rng = random.Random(seed)
    ours, theirs = Requests(manager_of("LRUPolicy")), Requests(manager_of("lru"))
    for _ in range(400):
        chunks = [*prompt(rng.randrange(3), rng.randrange(5)), *prompt(rng.randrange(3, 9), rng.randrange(1, 6))]
        fails = rng.random() < 0.1
        assert ours.run(chunks, fails) == theirs.run(chunks, fails)
        if rng.random() < 0.02:
            for requests in (ours, theirs):
                requests.manager.reset_cache()
                requests.held.clear()


@pytest.mark.parametrize("policy", ["LRUPolicy", "LFUPolicy", "SLRUPolicy"])
def test_a_suffix_goes_before_its_prefix(policy: str) -> None:
    """The last chunk of a prompt is evicted first, because a suffix without its prefix is useless."""
    requests = Requests(manager_of(policy))
    chunks = prompt(1, NUM_CHUNKS)
    requests.run(chunks)
    for n in range(1, 5):
        assert requests.run([key(1000 + n)]) == {chunks[-n]}


@pytest.mark.parametrize(("policy", "survives"), [("LRUPolicy", False), ("LFUPolicy", True), ("SLRUPolicy", True)])
def test_what_is_shared_survives_prompts_that_come_once(policy: str, survives: bool) -> None:
    """Two requests use a system prompt; then many prompts are requested once. LRU evicts the system prompt, other
    policies keep it."""
    requests = Requests(manager_of(policy))
    shared = prompt(1, 4)
    for _ in range(2):
        requests.run(shared)
    for n in range(2, 10):
        requests.run(prompt(n, 6))
    assert (set(shared) <= requests.held) is survives


def test_a_pinned_or_protected_chunk_is_never_evicted() -> None:
    """Pinned and protected chunks are not evicted. If too few other chunks are left, nothing is evicted."""
    requests = Requests(manager_of("SLRUPolicy"))
    requests.run(prompt(1, 10))
    context = requests.context(prompt(1, 10))
    requests.manager.prepare_load(prompt(1, 10), context)
    assert requests.run(prompt(2, 7)) is None
    assert requests.run(prompt(2, 6)) == set()
    assert requests.run([*prompt(2, 6), key(5)]) is None
    requests.manager.complete_load(prompt(1, 10), context)
    assert requests.run([*prompt(2, 6), key(5)]) == {prompt(1, 10)[-1]}


@pytest.mark.smoke
@pytest.mark.parametrize("policy", ["LRUPolicy", "SLRUPolicy", "ARCPolicy"])
def test_what_the_gpu_also_has_is_evicted_first(policy: str) -> None:
    """Chunks that the GPU also has are evicted first, the most recently flagged first, and no more than needed. A flag
    that the GPU contradicts is ignored. If the GPU evicts a chunk, the chunk loses its flag and is as recent as a new
    one."""
    requests = Requests(manager_of(policy))
    copies, chunks = requests.manager._policy.copies, prompt(1, NUM_CHUNKS)
    requests.run(chunks)
    on_gpu = set(chunks[:6])
    copies.is_on_gpu = on_gpu.__contains__
    requests.manager._policy.flag_on_gpu([*chunks[:5], chunks[9], key(5)])
    assert requests.run(prompt(2, 2)) == {chunks[3], chunks[4]}
    requests.manager._policy.evicted_from_gpu([chunks[0], chunks[1]])
    context = requests.context([chunks[2]])
    requests.manager.prepare_load([chunks[2]], context)
    in_order = requests.run([key(7)])
    assert in_order and in_order.isdisjoint({*chunks[:3]})
    requests.manager.complete_load([chunks[2]], context)
    assert requests.run([key(8)]) == {chunks[2]}
    assert not len(copies)
    if policy == "LRUPolicy":
        evicted = requests.run(prompt(3, 10))
        assert evicted and evicted.isdisjoint(chunks[:2])
