"""Finds the dtypes of recurrent states, which vLLM does not pass to an `OffloadingSpec`.

vLLM pads the states of recurrent layers to the size of an attention block, so chunks with states of different dtypes
have equal sizes. A store must not mix these chunks. The constructor of vLLM's `OffloadingConnectorScheduler` gets
vLLM's cache configuration before it asks the spec for the manager. This module replaces the constructor by a function
that first passes the dtypes to the spec.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

# The original constructor of vLLM.
INIT = OffloadingConnectorScheduler.__init__


def set_recurrent_states() -> None:
    """Replace vLLM's constructor in this process by one that sets `recurrent_states` of the spec. Idempotent."""
    OffloadingConnectorScheduler.__init__ = _init


@functools.wraps(INIT)  # so that probes see the fields that vLLM's own constructor sets
def _init(
    scheduler: OffloadingConnectorScheduler, spec: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    spec.recurrent_states = recurrent_states(kv_cache_config)
    INIT(scheduler, spec, vllm_config, kv_cache_config)


def recurrent_states(kv_cache_config: KVCacheConfig) -> str:
    """Return kind, shapes and dtypes of the states in each group of recurrent layers, as JSON; "" without recurrent
    layers."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [
        [str(spec.mamba_type), [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for spec in specs
        if isinstance(spec, MambaSpec)
    ]
    return json.dumps(states) if states else ""
