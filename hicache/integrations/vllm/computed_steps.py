"""Reports the prompt tokens of each computed step to hicache's tiers, which measure the prefill speed.

vLLM's offloading interfaces report copies of chunks, but not which tokens a step computes: a chunk may be copied late,
or again. So this module replaces the method with which vLLM's scheduler receives the output of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

UPDATE_FROM_OUTPUT = Scheduler.update_from_output  # the original method of vLLM


@runtime_checkable
class TimesPrefill(Protocol):
    """The interface of hicache's tier for vLLM's scheduler."""

    def on_computed(self, spans: Sequence[tuple[int, int]]) -> None:
        """Record that the GPU has computed a step. `spans`: tokens [start, end) of each prompt that the step computed.
        The scheduler's thread calls this method."""
        ...


def report_steps() -> None:
    """Replace the method in this process, which must be the scheduler's process. Idempotent."""
    Scheduler.update_from_output = _update_from_output


def _update_from_output(scheduler: Scheduler, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
    spans = _prompt_spans(scheduler, scheduler_output)
    for tier in _tiers(scheduler.connector):
        tier.on_computed(spans)
    return UPDATE_FROM_OUTPUT(scheduler, scheduler_output, *args, **kwargs)


def _prompt_spans(scheduler: Scheduler, output: SchedulerOutput) -> list[tuple[int, int]]:
    """Return the tokens [start, end) of each prompt that a step computed; none if one of its requests was aborted
    meanwhile, because the length of its prompt is not known any more."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    spans = []
    for req_id, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests.get(req_id)
        if request is None:
            return []
        start, end = starts[req_id], min(starts[req_id] + num_tokens, request.num_prompt_tokens)
        if start < end:
            spans.append((start, end))
    return spans


def _tiers(connector: KVConnectorBase_V1 | None) -> Iterator[TimesPrefill]:
    if isinstance(connector, MultiConnector):
        for each in connector.sub_connectors:
            yield from _tiers(each)
    elif isinstance(connector, OffloadingConnector) and connector.connector_scheduler is not None:
        manager = connector.connector_scheduler.manager
        tiers = manager.secondary_tiers if isinstance(manager, TieringOffloadingManager) else ()
        yield from (tier for tier in tiers if isinstance(tier, TimesPrefill))
