"""`HiCacheConnector` under vLLM's own scheduler: stores of evicted chunks, and the eviction of duplicates."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from hicache.errors import ConfigError
from hicache.integrations.vllm.computed_tokens import NUM_OFFLOADABLE_TOKENS, PREEMPT_REQUEST
from hicache.integrations.vllm.offloading_spec import ConnectorSpec, HiCacheOffloadingSpec
from hicache.storage import describe
from vllm_offload_case import Cache, offloading_config
from vllm_scheduler_case import BLOCK_TOKENS, CHUNK_BYTES, VOCABULARY, Engine, answer_to

EAGER = {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": "hicache.integrations.vllm"}
NUM_BLOCKS = 64
ANSWER_TOKENS = 8


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore vLLM's own methods before a test."""
    monkeypatch.setattr(Scheduler, "_preempt_request", PREEMPT_REQUEST)
    monkeypatch.setattr(OffloadingConnectorScheduler, "_calc_num_offloadable_tokens", NUM_OFFLOADABLE_TOKENS)
    monkeypatch.chdir(tmp_path)  # vLLM starts programs with `-m`, which would find kernels/ of a checkout


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=num)


def conversations(num: int = 12, num_turns: int = 6, growth: int = 96) -> Iterator[list[int]]:
    """The prompts of conversations with a common beginning. Each turn adds tokens, and the conversations take turns in
    random order. The prompts have 161 distinct blocks."""
    rng = random.Random(3)
    texts, turns_left = (
        [rng.choices(range(3, VOCABULARY), k=2 * BLOCK_TOKENS) for _ in range(1)] * num,
        [num_turns] * num,
    )
    while any(turns_left):
        at = rng.choice([i for i in range(num) if turns_left[i]])
        turns_left[at] -= 1
        added = max(BLOCK_TOKENS, min(4 * growth, int(rng.expovariate(1 / growth))))
        texts[at] = [*texts[at], *rng.choices(range(3, VOCABULARY), k=added)][:600]
        yield texts[at]


class Run:
    """An engine whose answers are compared with those without a cache."""

    def __init__(self, folder: Path, connector: str, num_chunks: int, *, chunk_blocks: int = 1, **given: Any) -> None:
        extra = {
            **(EAGER if connector == "OffloadingConnector" else {}),
            "cpu_bytes_to_use": num_chunks * chunk_blocks * CHUNK_BYTES,
            "blocks_per_chunk": chunk_blocks,
            **given.pop("extra", {}),
        }
        settings = {
            "is_async": False,
            "num_blocks": NUM_BLOCKS,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            **given,
        }
        self.engine = Engine(folder, extra, connector=connector, **settings)
        self._of_answers = {"window": given["window"]} if "window" in given else {}
        self._names = itertools.count()
        self.prompts = dict[str, list[int]]()

    def ask(self, prompt: list[int], priority: int = 0, params: dict[str, Any] | None = None) -> str:
        name = f"request-{next(self._names)}"
        self.prompts[name] = prompt
        self.engine.ask(name, prompt, ANSWER_TOKENS, priority, params)
        return name

    def abort(self, name: str) -> None:
        del self.prompts[name]
        self.engine.abort(name)

    def finish(self) -> float:
        """Run to the end. Checks that all answers are right, and that no job, request or fence is left. Returns the
        share of the prompts' tokens that were cached."""
        self.engine.finish()
        for name, prompt in self.prompts.items():
            assert self.engine.answers[name] == answer_to(prompt, ANSWER_TOKENS, **self._of_answers)
        connector = self.engine.connector
        assert not connector._jobs
        assert not connector._req_status
        assert not connector.manager._req_state
        assert not connector._block_id_to_pending_jobs
        return self.engine.num_cached / sum(map(len, self.prompts.values()))

    def num_on_both(self) -> int:
        """Chunks that both the CPU tier and the GPU have."""
        connector = self.engine.connector
        policy, pool = connector.manager.primary_tier._policy, self.engine.scheduler.kv_cache_manager.block_pool
        hashes = [block.block_hash for block in pool.blocks if block.block_hash is not None]
        return sum(policy.get(key) is not None for key in hashes)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*args: Any, **given: Any) -> Run:
        started.append(Run(tmp_path, *args, **given))
        return started[-1]

    yield start
    for run in started:
        run.engine.close()


def share(run: Run, at_once: int = 1) -> float:
    prompts = conversations()
    while batch := list(itertools.islice(prompts, at_once)):
        for prompt in batch:
            run.ask(prompt)
        run.engine.finish()
    return run.finish()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("num_chunks", "given"),
    [
        (32, {}),
        (64, {}),
        (64, {"extra": {"eviction_policy": "arc"}}),
        (64, {"extra": {"store": "computed"}}),
        (32, {"chunk_blocks": 2}),
    ],
    ids=["32", "64", "arc", "computed", "chunks of two blocks"],
)
def test_the_cpu_tier_has_what_the_gpu_lacks(runs: Any, num_chunks: int, given: dict[str, Any]) -> None:
    """With stores at eviction, a larger share of the prompts is cached than with stores of computed chunks in the
    same memory, which is as large as the GPU's cache or half of it. The chunks on both sides are fewer than the
    watermark."""
    chunk_blocks = given.get("chunk_blocks", 1)
    eager = runs("OffloadingConnector", num_chunks, chunk_blocks=chunk_blocks)
    ours = runs("HiCacheConnector", num_chunks, **given)
    eager_share = share(eager)
    assert share(ours) > eager_share + 0.06
    assert ours.engine.connector.num_late
    assert ours.engine.connector.num_ahead
    if given.get("extra", {}).get("store") != "computed":
        assert not ours.engine.connector.num_lost
        assert eager.num_on_both() * 0.9 > num_chunks * 0.7
        assert ours.num_on_both() * chunk_blocks <= NUM_BLOCKS // 8 + 1


PROGRAMS = [
    ("leaving", 1, False, 5),
    ("computed", 1, False, 5),
    ("leaving", 1, True, 5),
    ("computed", 1, True, 5),
    ("leaving", 2, False, 5),
    ("computed", 2, True, 5),
]


@pytest.mark.parametrize(("store", "chunk_blocks", "priorities", "seed"), PROGRAMS)
def test_requests_at_once_with_aborts_resets_and_preemptions(
    runs: Any, store: str, chunk_blocks: int, priorities: bool, seed: int
) -> None:
    """Four requests at once, with asynchronous scheduling or priorities. Every answer is right, whatever was aborted,
    preempted or reset. Chunks of two blocks: one block may be evicted, or computed a second time, in the step that
    stores the other."""
    given = {"scheduling_policy": "priority", "num_blocks": 26} if priorities else {"is_async": True, "num_blocks": 40}
    rng = random.Random(seed)
    run = runs("HiCacheConnector", 48 // chunk_blocks, chunk_blocks=chunk_blocks, extra={"store": store}, **given)
    prompts = list(conversations())
    for i in range(0, len(prompts), 4):
        for prompt in prompts[i : i + 4]:
            run.ask(prompt, priority=rng.randrange(3) if priorities else 0)
            for _ in range(rng.randrange(3)):
                run.engine.step()
        if i % 12 == 0:
            gone = run.ask(prompts[i // 2] if i % 24 else tokens(300, seed=i))
            for _ in range(rng.randrange(1, 4)):
                run.engine.step()
            run.abort(gone)
        if i % 16 == 8:
            run.finish()
            assert run.engine.scheduler.reset_prefix_cache(reset_connector=i % 32 == 8)
    assert run.finish() > 0
    assert run.engine.worker.num_loaded
    assert run.engine.preempted or not priorities


def test_a_chunk_is_not_stored_from_a_block_that_the_step_overwrites(runs: Any) -> None:
    """The GPU has two copies of a chunk's first block. One step evicts one copy, and stores the chunk ahead, after its
    forward pass. The store reads the other copy."""
    run = runs("HiCacheConnector", 4, chunk_blocks=2, num_blocks=12, max_num_batched_tokens=512)
    prompt = tokens(2 * BLOCK_TOKENS + 3, seed=1)
    lengths = [len(prompt), BLOCK_TOKENS, len(prompt)]  # a prompt of one complete block is computed again
    others = [tokens(280, seed=2), tokens(74, seed=3)]  # 9 blocks, of which 8 have no hash, and 3 blocks
    for asked in [*(prompt[:length] for length in lengths), *others]:
        run.ask(asked)
        run.engine.finish()
    assert run.engine.connector.num_ahead
    run.ask(prompt)
    run.finish()
    assert run.engine.worker.num_loaded == 2


@pytest.mark.smoke
def test_with_a_disk_a_restart_finds_everything_and_nothing_is_written_twice(
    runs: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a disk, chunks are stored when they are computed, and again in the CPU tier when the GPU evicts them. The
    disk then has them already, and does not write them again."""
    path = tmp_path_factory.mktemp("disk")
    extra = {"disk": {"path": str(path), "budget": "256MB", "prefill_tokens_per_s": 0}, "kv_packing": "off"}
    first, prompts = runs("HiCacheConnector", 40, extra=extra), list(conversations())
    for prompt in prompts:
        first.ask(prompt)
        first.engine.finish()
    first.finish()
    connector = first.engine.connector
    [tier] = connector.manager.secondary_tiers
    assert connector.num_late + connector.num_ahead > 40
    # The internal requests of these stores delay no user's request.
    assert not tier.gate._live
    stats = tier._backend.stats()
    first.engine.close()
    [folder] = path.iterdir()
    assert stats.puts == describe(folder).entries

    second = runs("HiCacheConnector", 40, extra=extra)
    last = {tuple(prompt[:96]): prompt for prompt in prompts}
    for prompt in last.values():
        second.ask(prompt)
        second.engine.finish()
    second.finish()
    found = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in last.values())
    assert second.engine.num_cached == found


def serve_others(run: Any, seeds: range, num_tokens: int) -> None:
    """Serve a prompt of `num_tokens` for each seed. These prompts take the blocks of the GPU."""
    for seed in seeds:
        run.ask(tokens(num_tokens, seed))
        run.engine.finish()


@pytest.mark.parametrize("step_blocks", [3, 5, 8])
def test_a_window_frees_the_first_blocks_of_a_chunk_first(runs: Any, step_blocks: int) -> None:
    """A sliding window frees the blocks of a chunk in two steps, the first block before the last one. All chunks are
    stored when the GPU evicts their first block, and later prompts of each length find them."""
    chunk_tokens, num_chunks = 2 * BLOCK_TOKENS, 8
    run = runs(
        "HiCacheConnector",
        400,
        chunk_blocks=2,
        num_blocks=24,
        max_num_batched_tokens=step_blocks * BLOCK_TOKENS,
        window=100,
    )
    prompt = tokens(num_chunks * chunk_tokens + 1, seed=1)
    run.ask(prompt)
    run.engine.finish()
    serve_others(run, range(2, 6), len(prompt))
    connector = run.engine.connector
    assert connector.num_late + connector.num_ahead
    for num in range(1, num_chunks + 1):
        before = run.engine.num_cached
        run.ask(prompt[: num * chunk_tokens + 1])
        run.finish()
        assert run.engine.num_cached - before == num * chunk_tokens
    assert not connector.num_lost


def test_a_request_limits_what_is_stored_of_it(runs: Any) -> None:
    """With `max_offload_tokens`, the chunks after this limit are not stored when the GPU evicts them."""
    run = runs("HiCacheConnector", 64, num_blocks=24)
    prompt = tokens(10 * BLOCK_TOKENS, seed=1)
    run.ask(prompt, params={"max_offload_tokens": 4 * BLOCK_TOKENS})
    run.engine.finish()
    serve_others(run, range(2, 6), 10 * BLOCK_TOKENS)
    before = run.engine.num_cached
    run.ask(prompt)
    run.finish()
    assert run.engine.num_cached - before == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("limited_first", [True, False])
def test_a_limit_of_one_request_does_not_apply_to_others(runs: Any, limited_first: bool) -> None:
    """Two requests have the same prompt, and only one of them has a limit. The chunks of the prompt are stored when the
    GPU evicts them, also if both requests computed them."""
    run = runs("HiCacheConnector", 200, num_blocks=24)
    prompt = tokens(8 * BLOCK_TOKENS + 1, seed=1)
    run.ask(prompt, params={"max_offload_tokens": 0} if limited_first else None)
    run.engine.finish()
    if limited_first:
        serve_others(run, range(2, 5), 16 * BLOCK_TOKENS)
    run.ask(prompt, params=None if limited_first else {"max_offload_tokens": 0})
    run.engine.finish()
    serve_others(run, range(5, 8), 16 * BLOCK_TOKENS)
    before = run.engine.num_cached
    run.ask(prompt)
    run.finish()
    assert run.engine.num_cached - before == 8 * BLOCK_TOKENS


def test_the_limit_of_a_request_that_never_ran_does_not_apply(runs: Any) -> None:
    run = runs("HiCacheConnector", 200, num_blocks=24)
    prompt = tokens(8 * BLOCK_TOKENS + 1, seed=1)
    run.ask(prompt)
    run.engine.finish()
    run.abort(run.ask(prompt, params={"max_offload_tokens": 0}))
    serve_others(run, range(5, 8), 16 * BLOCK_TOKENS)
    before = run.engine.num_cached
    run.ask(prompt)
    run.finish()
    assert run.engine.num_cached - before == 8 * BLOCK_TOKENS


def test_an_ended_session_is_not_stored_when_a_waiting_request_takes_its_blocks(runs: Any) -> None:
    """A request waits for the blocks of a session, and gets them in the step after the end of the session."""
    run = runs("HiCacheConnector", 200, num_blocks=24, max_num_batched_tokens=512)
    run.ask(tokens(16 * BLOCK_TOKENS, seed=1), params={"hicache": {"session_end": True}})
    run.ask(tokens(16 * BLOCK_TOKENS, seed=2))
    run.finish()
    connector = run.engine.connector
    assert not connector.num_late
    assert not connector.num_ahead
    assert not connector.num_lost


@pytest.mark.parametrize("ends_too", [False, True])
def test_an_ended_session_keeps_what_a_running_request_shares(runs: Any, ends_too: bool) -> None:
    """A session ends while another request with the same system prompt runs. When the GPU evicts the system prompt, it
    is stored, also if the other request was the last one of its session."""
    run = runs("HiCacheConnector", 200, num_blocks=24)
    ended, system = {"hicache": {"session_end": True}}, tokens(6 * BLOCK_TOKENS, seed=1)
    run.ask([*system, *tokens(240, seed=2)], params=ended if ends_too else None)
    run.engine.step()
    run.ask([*system, *tokens(40, seed=3)], params=ended)
    run.engine.finish()
    serve_others(run, range(4, 7), 16 * BLOCK_TOKENS)
    before = run.engine.num_cached
    run.ask([*system, 3])
    run.finish()
    assert run.engine.num_cached - before == len(system)


def test_chunks_that_are_computed_later_keep_the_hashes_of_their_blocks(runs: Any) -> None:
    """The connector forgets the hashes of chunks that the GPU lacks, in the first step of a prompt that four steps
    compute. All chunks of the prompt are stored when the GPU evicts them."""
    run = runs("HiCacheConnector", 200, chunk_blocks=2, num_blocks=20, max_num_batched_tokens=4 * BLOCK_TOKENS)
    complete, prompt = 16 * BLOCK_TOKENS, tokens(16 * BLOCK_TOKENS + 1, seed=1)
    serve_others(run, range(2, 11), complete + 1)
    run.ask(tokens(2 * BLOCK_TOKENS + 1, seed=11))
    run.engine.finish()
    hashes = run.engine.connector._hashes_of
    run.ask(prompt)
    run.engine.finish()
    assert run.engine.connector._hashes_of is not hashes
    serve_others(run, range(12, 14), complete + 1)
    before = run.engine.num_cached
    run.ask(prompt)
    run.finish()
    assert run.engine.num_cached - before == complete


@pytest.mark.parametrize(
    ("connector", "given", "message"),
    [
        ("HiCacheConnector", {"extra": {"store": "often"}}, "store='often': choose one of auto, computed, leaving"),
        ("HiCacheConnector", {"extra": {"spec_name": "CPUOffloadingSpec"}}, "spec_name=CPUOffloadingSpec: .* remove"),
        ("HiCacheConnector", {"extra": {"offload_prompt_only": True}}, "offload_prompt_only=true .* remove"),
        (
            "HiCacheConnector",
            {"extra": {"self_describing_kv_events": True}},
            "self_describing_kv_events=true .* remove",
        ),
        (
            "HiCacheConnector",
            {"enable_prefix_caching": False, "extra": {"store": "leaving"}},
            "store=leaving: without --enable-prefix-caching .* set store to auto",
        ),
        ("OffloadingConnector", {"extra": {"store": "leaving"}}, "store=leaving: .* set kv_connector to HiCacheConn"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, connector: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(tmp_path, connector, 8, **given)


def test_without_hashes_chunks_are_stored_when_they_are_computed(runs: Any) -> None:
    """The GPU has no prefix cache. A second request finds the chunks of a first one in the CPU tier."""
    run = runs("HiCacheConnector", 32, enable_prefix_caching=False)
    assert type(run.engine.connector) is OffloadingConnectorScheduler
    for _ in range(2):
        run.ask(tokens(300, seed=1))
        run.finish()
    assert run.engine.num_cached == 300 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("spec", "num_rows", "warns", "is_fallback"),
    [
        (HiCacheOffloadingSpec, 21, True, False),
        (HiCacheOffloadingSpec, 21, True, True),
        (HiCacheOffloadingSpec, 22, False, False),
        (ConnectorSpec, 4, False, False),
    ],
)
def test_a_cpu_tier_that_repeats_the_gpu_is_reported(
    spec: type[HiCacheOffloadingSpec],
    num_rows: int,
    warns: bool,
    is_fallback: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the start a warning names both sizes: 64 blocks of the GPU, and chunks of three blocks. The warning advises
    HiCacheConnector, unless HiCacheConnector has fallen back to the same stores."""
    cache = Cache(blocks_per_chunk=3)
    with caplog.at_level(logging.WARNING, "hicache"):
        started = spec(offloading_config(cache, {"cpu_bytes_to_use": num_rows * cache.chunk_bytes}))
        started.is_fallback = is_fallback
        started.get_worker(cache.on("cpu")).shutdown()
    reported = {record.getMessage() for record in caplog.records if "adds no hits" in record.getMessage()}
    assert len(reported) == warns
    if warns:
        [message] = reported
        assert "it has 63 blocks, the GPU's cache has 64" in message
        assert ("set kv_connector to HiCacheConnector, or cpu_bytes" in message) is not is_fallback
