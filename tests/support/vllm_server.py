"""A vLLM that serves some prompts: python vllm_server.py, with JSON on its standard input.

`{"model": folder, "extra": configuration of the connector, "steps": [...]}`; `connector`: HiCacheConnector, or vLLM's;
`llm`: more arguments of `LLM`; `is_patient`: no call of a remote store times out; `prompts`: number of prompts;
`prompt_tokens`: their length. The steps:

    run            all prompts at once
    run each       one prompt after the other
    compute each   one prompt after the other, without reading a cache
    preempt        each prompt preempted by requests of higher priority
    warm           all prompts, one after the other; the results are not recorded
    others         ten other prompts of that length, one after the other; the results are not recorded
    together       eight prompts at once, which begin like the first prompt
    reset          empty the prefix cache and the CPU tier, once each `RecordingTier` has stored its chunks
    forget         empty the prefix cache
    copy           wait until each `RecordingTier` has copied all chunks of the prompts to its remote store
    faults         the stores fail from now on

The last line of the output is JSON: for each run the cached tokens, by vLLM's count, and the output of every prompt;
for "together" only the cached tokens; for each `RecordingTier` in this process the chunks that it stored and loaded, as
dicts from a chunk's key to the checksums of its bytes; the number of chunks that a `CopyingWorker` in this process
loaded; vLLM's counts of preemptions and of tokens that the connector has loaded; and the tier's metrics in vLLM's
registry, summed over their labels.

The dtype is float32: in bfloat16 two logits of the test's model are equal, and the last bit of a sum would decide on a
token.
"""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import xxhash
from vllm import LLM, SamplingParams
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.metrics.reader import Histogram

from hicache.bench.servers.vllm_worker import CopyingWorker
from hicache.integrations import server_store
from hicache.integrations.vllm import HiCacheTier
from hicache.storage import LmdbPageStore
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.shared_memory import BACKUP_NUMBERS
from patient_stores import patient_remote
from waiting import BOUND_S, eventually

PROMPT_TOKENS = 1200
Checksums = dict[str, list[str]]  # by a chunk's key in hexadecimal: checksums of its bytes, one for each copy
stored: list[Checksums] = []  # stored chunks, one dict for each tier
given: list[Checksums] = []
loaded: list[int] = []  # number of chunks of each load
tiers: list[RecordingTier] = []


class RecordingTier(HiCacheTier):
    """A tier that records checksums of the bytes that it stores and loads."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stored, self._given = Checksums(), Checksums()
        self._loading: dict[int, TransferJob] = {}
        tiers.append(self)
        stored.append(self._stored)
        given.append(self._given)

    @property
    def is_storing(self) -> bool:
        return bool(self._stores)

    @property
    def num_copied(self) -> float:
        """The number of chunks that the store process has copied to the remote store."""
        return self._backend.status.backup[BACKUP_NUMBERS.index("sent_pages")]

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._record(self._stored, job_metadata, set(job_metadata.keys))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = job_metadata
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            job = self._loading.pop(result.job_id, None)
            if job is not None:
                self._record(self._given, job, set(result.successful_keys or ()))
        return results

    def _record(self, checksums: Checksums, job: TransferJob, keys: set[OffloadKey]) -> None:
        for key, row in zip(job.keys, self._pages(job), strict=True):
            if key in keys:
                checksums.setdefault(key.hex(), []).append(xxhash.xxh3_64_hexdigest(row))


def record_loads() -> None:
    original = CopyingWorker.submit_load

    def submit_load(worker: CopyingWorker, job_id: int, source: Any, target: Any, **kwargs: Any) -> bool:
        loaded.append(len(source.chunk_ids))
        return original(worker, job_id, source, target, **kwargs)

    CopyingWorker.submit_load = submit_load  # type: ignore[method-assign]


def inject_faults() -> None:
    """Make every seventh call of a store fail, and lose every fifth page that it would store or return. The stores must
    run in threads of this process."""

    def faulty(original: Any) -> Any:
        calls = itertools.count(1)

        def call(self: LmdbPageStore, items: Any, *args: Any, **kwargs: Any) -> Any:
            number = next(calls)
            if number % 7 == 0:
                raise OSError(errno.EIO, "injected")
            answers = original(self, items, *args, **kwargs)
            return [ok and (number + pool_page) % 5 > 0 for pool_page, ok in enumerate(answers)]

        return call

    for method in ("contains", "get_into", "put"):
        setattr(LmdbPageStore, method, faulty(getattr(LmdbPageStore, method)))


def preempted(llm: LLM, number: int, prompt: Any, sampling: SamplingParams) -> tuple[int, list[int]]:
    """Send the prompt with low priority. In the step that schedules the ninth chunk of 64 tokens, two requests with
    high priority need a second block each, and the cache only has 22 blocks."""
    engine = llm.llm_engine

    def add(name: str, prompt: Any, sampling: SamplingParams, priority: int) -> None:
        engine.add_request(f"{name}-{number}", prompt, sampling, priority=priority)

    def other(num_prompt_tokens: int, num_tokens: int) -> tuple[Any, SamplingParams]:
        tokens = [random.Random(number).randrange(256) for _ in range(num_prompt_tokens)]
        return {"prompt_token_ids": tokens}, SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    add("running", *other(3, 28), priority=0)
    add("low", prompt, sampling, priority=10)
    outputs = [*engine.step(), *engine.step()]
    for name in ("high", "higher"):
        add(name, *other(27, 20), priority=0)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [answer] = [output for output in outputs if output.finished and output.request_id == f"low-{number}"]
    return answer.num_cached_tokens or 0, list(answer.outputs[0].token_ids)


def main(task: dict[str, Any]) -> None:

    if task.get("is_patient"):  # a remote store may be slow on a busy machine
        ServiceSettings.of_remote = staticmethod(patient_remote)  # type: ignore[method-assign, assignment]
    if "faults" in task["steps"]:
        server_store.open_tier = functools.partial(server_store.open_tier, in_process=True)
        # Threads of the stores wait for the interpreter lock, which vLLM's busy loop holds most of the time.
        sys.setswitchinterval(1e-4)
        server_store.ServiceSettings = functools.partial(ServiceSettings, limits=Limits(io_timeout_s=BOUND_S))
    settings = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 2048,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "kv_transfer_config": {
            "kv_connector": task.get("connector", "OffloadingConnector"),
            "kv_connector_module_path": "hicache.integrations.vllm" if "connector" in task else None,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": task["extra"],
        },
    }
    llm = LLM(task["model"], **{**settings, **task.get("llm", {})})

    def random_tokens(seed: int) -> list[int]:
        return [random.Random(seed).randrange(256) for _ in range(task.get("prompt_tokens", PROMPT_TOKENS))]

    prompts = [{"prompt_token_ids": random_tokens(n)} for n in range(task.get("prompts", 2))]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def ask(prompts: Any, sampling: SamplingParams = sampling) -> list[tuple[int, list[int]]]:
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return [(answer.num_cached_tokens or 0, list(answer.outputs[0].token_ids)) for answer in answers]

    record_loads()
    runs, together = [], []
    for step in task["steps"]:
        if step == "run":
            runs.append(ask(prompts))
        elif step == "run each":
            runs.append([answer for prompt in prompts for answer in ask(prompt)])
        elif step == "compute each":
            computed = copy.copy(sampling)
            computed.skip_reading_prefix_cache = True
            runs.append([answer for prompt in prompts for answer in ask(prompt, computed)])
        elif step == "warm":
            for prompt in prompts:
                ask(prompt)
        elif step == "others":
            for n in range(10):
                ask({"prompt_token_ids": random_tokens(100 + n)})
        elif step == "preempt":
            runs.append([preempted(llm, n, prompt, sampling) for n, prompt in enumerate(prompts)])
        elif step == "together":
            shared = prompts[0]["prompt_token_ids"][:-1]
            together = [cached for cached, _ in ask([{"prompt_token_ids": [*shared, n]} for n in range(8)])]
        elif step == "reset":  # a step of vLLM polls the tiers
            eventually(lambda: not any(tier.is_storing for tier in tiers) or not ask({"prompt_token_ids": [3]}))
            assert llm.reset_prefix_cache(reset_connector=True)
        elif step == "copy":  # a close drops the copies that take longer than a few seconds
            length = task.get("prompt_tokens", PROMPT_TOKENS)
            num_chunks = len(prompts) * (length // llm.llm_engine.vllm_config.cache_config.block_size)
            eventually(
                lambda: (
                    all(tier.num_copied >= num_chunks for tier in tiers)  # noqa: B023
                    or not ask({"prompt_token_ids": [3]})
                )
            )
        elif step == "forget":  # vLLM refuses the reset until a step has recorded that all copies ended
            eventually(lambda: llm.reset_prefix_cache() or not ask({"prompt_token_ids": [3]}))
        else:
            inject_faults()
    metrics = Counter[str]()
    preemptions = external = 0
    for metric in llm.get_metrics():
        if metric.name == "vllm:num_preemptions":
            preemptions += metric.value
        if metric.name == "vllm:external_prefix_cache_hits":
            external += metric.value
        if metric.name.startswith("vllm:hicache_") and not isinstance(metric, Histogram):
            metrics[metric.name.removeprefix("vllm:hicache_")] += metric.value
    # vLLM ends its workers before the tier. The tier then finishes its stores, but by default vLLM kills both after
    # five seconds.
    llm.llm_engine.engine_core.shutdown(timeout=BOUND_S)
    counted = {
        "together": together,
        "loaded": sum(loaded),
        "preemptions": preemptions,
        "external": external,
        "metrics": metrics,
    }
    print(json.dumps({"runs": runs, "stored": stored, "given": given, **counted}))


if __name__ == "__main__":
    sys.modules["vllm_server"] = sys.modules["__main__"]  # vLLM imports our classes by this name
    main(json.load(sys.stdin))
