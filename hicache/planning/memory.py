"""Computes the number of tokens that each tier can store, and the engine settings for these tiers. All sizes are those
of one GPU's process.

    memory of the GPU = weights + pools + workspace

The sizes of the pools come from `hicache.build.sizing`, as in a real engine. Several GPUs divide the weights and heads.
Latent rows cannot be divided: every GPU stores them all, and the disk stores them once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hicache.build.sizing import (
    RowBytes,
    device_bytes,
    host_page_bytes,
    host_shares,
    host_states,
    resolve,
    row_bytes,
)
from hicache.config import DiskConfig, EngineConfig, default_write_policy
from hicache.console import flag_size, gib, rounded
from hicache.errors import ConfigError, OutOfMemory
from hicache.layout import ModelGeometry
from hicache.planning.gpus import Gpu
from hicache.planning.presets import PlannedModel
from hicache.serving.server.sizes import CUDA_SHARE, MAX_CONTEXT, MAX_TOKENS, largest_device_tokens
from hicache.tiers import FULL, MAMBA, SWA, Component

# assumed free host bytes: the planned machine may have more memory than this one
_PLENTY = 1 << 60
_MAX_GPUS = 1024
CONNECTOR, SPEC = "HiCacheConnector", "HiCacheOffloadingSpec"
DEPLOYMENTS = {"serve": ("exclusive", "write_through"), "connector": (CONNECTOR,), "spec": (SPEC,)}
_SLOT_BYTES = 4  # bytes of the request table for each position of a request


@dataclass(frozen=True)
class PlanRequest:
    """The hardware and settings to plan for. `host_bytes`, `disk_bytes`: bytes of the host tier and of the disk tier,
    over all GPUs; None: the engine chooses the size; 0: the plan has no such tier. `workspace_bytes`: bytes of each GPU
    that stay free for forward passes; None: the same share of the GPU's memory as in `hicache serve`. `deployment`: a
    key of DEPLOYMENTS, which chooses the write policy of the plan."""

    num_gpus: int = 1
    host_bytes: int | None = None
    disk_bytes: int = 0
    disk_path: str = "hicache-store"
    workspace_bytes: int | None = None
    deployment: str = "serve"
    dtype: str = "auto"
    max_running: int = 32
    chunk_tokens: int = 8192
    max_context_len: int | None = None


@dataclass(frozen=True)
class Tier:
    """A tier over all GPUs. `num_bytes`: its size. `num_tokens`: number of tokens that the tier can store.
    `num_states`: number of recurrent states that it can store in addition."""

    name: str
    num_bytes: int
    num_tokens: int
    num_states: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of tiers. `rows`: bytes that one GPU stores. `moved`: bytes of the same rows on host and disk, where pages
    may be packed. `tiers`: device, then host and disk if present. `config`: all engine settings with the computed
    sizes. `start`: the settings of `config` without those that an engine computes itself. `deployment`: a key of
    DEPLOYMENTS."""

    weight_bytes: int
    pool_bytes: int
    workspace_bytes: int
    rows: RowBytes
    moved: RowBytes
    tiers: tuple[Tier, ...]
    config: EngineConfig
    start: EngineConfig
    deployment: str = "serve"

    @property
    def write_policy(self) -> str:
        """The write policy of the plan. For `hicache serve` it is the engine's default for these tiers. For a plug-in
        of vLLM it is the policy of hicache's engine that stores the same pages on the host."""
        if self.deployment == "serve":
            return default_write_policy(has_stores=self.config.disk is not None)
        (store,) = DEPLOYMENTS[self.deployment]
        return "exclusive" if self._adds_up(store) else "write_through"

    @property
    def memory_tokens(self) -> int:
        """The number of different tokens that device and host can store together under the write policy of the plan."""
        return self.different_tokens(self.write_policy)

    def different_tokens(self, store: str) -> int:
        """Return the number of different tokens that device and host can store together.

        `store`: a write policy of hicache's engine, or the name of a plug-in of vLLM. If the host stores the pages that
        the device evicts, this number is the sum of both capacities. If the host stores all computed pages, it also has
        copies of the device's tokens, so this number is the larger capacity.
        """
        sizes = [tier.num_tokens for tier in self.tiers if tier.name in ("device", "host")]
        return sum(sizes) if self._adds_up(store) else max(sizes)

    def _adds_up(self, store: str) -> bool:
        """Return whether the host stores the pages that the device evicts. For models with recurrent states,
        HiCacheConnector stores chunks only when they have been computed."""
        return store == "exclusive" or (store == CONNECTOR and not self.rows.state)


def plan_memory(model: PlannedModel, gpu: Gpu, request: PlanRequest) -> MemoryPlan:
    """Compute the sizes of all tiers for a model on GPUs of one kind. Raises OutOfMemory if the weights, the workspace
    and one page do not fit on the GPUs; its message names a sufficient number of GPUs. Raises ConfigError if a tier of
    a given size is smaller than one page."""
    plan = _plan(model, gpu, request)
    if plan is not None:
        return plan
    more = (request.num_gpus << step for step in range(1, _MAX_GPUS.bit_length()))
    alone = dataclasses.replace(request, host_bytes=0, disk_bytes=0)
    enough = next((n for n in more if _plan(model, gpu, dataclasses.replace(alone, num_gpus=n)) is not None), None)
    remedy = "no number of such GPUs would do" if enough is None else f"{enough} would do: --gpus {enough}"
    raise OutOfMemory(
        f"{model.name}: {gib(model.weight_bytes)} GiB of weights, a workspace and a page do not fit in "
        f"{request.num_gpus} x {gib(gpu.memory_bytes)} GiB ({gpu.name}); {remedy}"
    )


def share_of(geometry: ModelGeometry, num_gpus: int) -> ModelGeometry:
    """Return the part of the model that each GPU stores. Heads are divided; if there are fewer heads than GPUs, several
    GPUs store the same head."""
    state = geometry.state
    if state is not None:
        conv = tuple((_share(shape[0], num_gpus), *shape[1:]) for shape in state.conv)
        temporal = (_share(state.temporal[0], num_gpus), *state.temporal[1:])
        state = dataclasses.replace(state, conv=conv, temporal=temporal)
    swa = geometry.swa_head_num
    return dataclasses.replace(
        geometry,
        head_num=_share(geometry.head_num, num_gpus),
        swa_head_num=None if swa is None else _share(swa, num_gpus),
        state=state,
    )


def _plan(model: PlannedModel, gpu: Gpu, request: PlanRequest) -> MemoryPlan | None:
    """Return the plan; None if weights, workspace and one page do not fit."""
    geometry, start = share_of(model.geometry, request.num_gpus), _start(model, request)
    weight_bytes = _share(model.weight_bytes, request.num_gpus)
    left, needed = gpu.memory_bytes - weight_bytes, _needed(start)
    workspace = (
        max(needed, left - int(left * CUDA_SHARE)) if request.workspace_bytes is None else request.workspace_bytes
    )
    if workspace < needed:
        raise ConfigError(
            f"--workspace {flag_size(workspace)}: staging and the request table take {rounded(needed)}; give more"
        )
    sized = dataclasses.replace(start, dtype=_dtype(model.geometry, start))
    num_tokens = largest_device_tokens(sized, geometry, left - workspace)
    if not num_tokens:
        return None
    # No request can be longer than the device tier.
    start = dataclasses.replace(start, device_tokens=num_tokens, max_context_len=min(start.max_context_len, num_tokens))
    config = resolve(start, geometry, _PLENTY)
    rows = row_bytes(geometry, config.torch_dtype)
    pool_bytes = device_bytes(config, rows)
    page_bytes, page = host_page_bytes(config, geometry), config.host_page_size
    moved = RowBytes(-(-page_bytes[FULL] // page), -(-page_bytes.get(SWA, 0) // page), rows.state)
    if config.host_bytes:
        start = dataclasses.replace(start, host_bytes=config.host_bytes)
    tiers = [Tier("device", pool_bytes * request.num_gpus, num_tokens, config.mamba_size)]
    copies = dict.fromkeys(page_bytes, request.num_gpus)
    if isinstance(config.host_bytes, int) and config.host_bytes:
        tiers.append(_tier("host", config, page_bytes, copies, config.host_bytes * request.num_gpus))
    if request.disk_bytes:
        # all ranks have the same latent rows, and one rank stores them on the disk
        once = {FULL: 1} if geometry.latent is not None else {}
        tiers.append(_tier("disk", config, page_bytes, copies | once, request.disk_bytes))
    return MemoryPlan(
        weight_bytes=weight_bytes,
        pool_bytes=pool_bytes,
        workspace_bytes=gpu.memory_bytes - weight_bytes - pool_bytes,
        rows=rows,
        moved=moved,
        tiers=tuple(tiers),
        config=config,
        start=start,
        deployment=request.deployment,
    )


def _start(model: PlannedModel, request: PlanRequest) -> EngineConfig:
    """Return the engine settings with a placeholder for `device_tokens`, which is computed later."""
    disk = None
    if request.disk_bytes:
        # `budget_bytes` bounds all stores of the path together.
        disk = DiskConfig(path=request.disk_path, budget_bytes=request.disk_bytes)
    return EngineConfig(
        device_tokens=MAX_TOKENS,
        host_bytes="auto" if request.host_bytes is None else request.host_bytes // request.num_gpus,
        max_requests=request.max_running,
        max_context_len=request.max_context_len or min(model.max_context_len, MAX_CONTEXT),
        prefill_chunk_tokens=request.chunk_tokens,
        device="cuda",
        dtype=request.dtype,
        model_id=model.name,
        disk=disk,
    )


def _tier(
    name: str, config: EngineConfig, of_gpu: Mapping[Component, int], copies: Mapping[Component, int], num_bytes: int
) -> Tier:
    """Return a tier of `num_bytes`. Its ratio of states to pages is that of the host tier. `of_gpu`: bytes of a page of
    each component on one GPU. `copies`: number of GPUs that store their own page of a component in this tier."""
    page, states = config.host_page_size, None
    page_bytes = {component: size * copies[component] for component, size in of_gpu.items()}
    if (state_bytes := page_bytes.get(MAMBA)) is not None:
        states = host_states(dataclasses.replace(config, host_states=0), num_bytes, page_bytes[FULL], state_bytes)
    shares = host_shares(dataclasses.replace(config, host_bytes=num_bytes), page_bytes, states)
    num_pages = shares[FULL] // page_bytes[FULL] - (name == "host")  # one host page is for padding
    if num_pages < 1:
        raise ConfigError(
            f"--{'host-memory' if name == 'host' else name} {flag_size(num_bytes)}: too little for a page of "
            f"{rounded(sum(page_bytes.values()))} over all GPUs; give more, or 0 for no such tier"
        )
    return Tier(name, num_bytes, num_pages * page, states or 0)


def _needed(config: EngineConfig) -> int:
    """Return the bytes of the known parts of the workspace: the request table and the staging buffers."""
    return (config.max_requests + 1) * config.max_context_len * _SLOT_BYTES + config.advanced.staging_bytes


def _dtype(geometry: ModelGeometry, config: EngineConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return str(geometry.dtype or torch.bfloat16).removeprefix("torch.")


def _share(total: int, num_gpus: int) -> int:
    return -(-total // num_gpus)
