"""The host tier of one component: pages in pinned memory, what they hold, and the copies to and from the device.

`Part`: what SGLang's transfers name, as pages of such tiers and slots of device pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.config import AdvancedConfig
from hicache.config.environment import kernel_choice
from hicache.errors import ConfigError
from hicache.host.index import PageIndex
from hicache.host.pool import HostPagePool
from hicache.host.run import RunPart, path_of
from hicache.integrations.sglang.linker_pools import LinkedPool, PoolName, PoolTransfer
from hicache.integrations.sglang.linker_settings import LinkerConfig
from hicache.kernels.page_copy import PageMover
from hicache.transfer import CpuTransfer, CudaTransfer, LayerTransferCounter, TransferBackend
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents


@dataclass(frozen=True, eq=False)
class HostTier:
    """`pool`: what the component's slots address on the device."""

    pool: LinkedPool
    host: HostPagePool
    index: PageIndex
    counter: LayerTransferCounter
    transfer: TransferBackend

    @property
    def name(self) -> str:
        return self.pool.name

    def keys(self, keys: Sequence[str]) -> list[bytes]:
        """As keys of this component's pages, which no other has."""
        return [f"{self.name}/{key}".encode() for key in keys]

    def close(self) -> None:
        """End the copies and unpin. Only when no thread uses the pages."""
        self.transfer.close()
        self.host.close()


def host_tiers(config: LinkerConfig, pools: Sequence[LinkedPool]) -> dict[str, HostTier]:
    """`host_bytes` shared as the device memory is. `ConfigError` and `OutOfMemory` name the setting."""
    total = sum(pool.device_bytes for pool in pools)
    smallest = max(-(-2 * pool.page_bytes * total // pool.device_bytes) for pool in pools)
    if config.host_bytes < smallest:
        raise ConfigError(
            f"host_bytes={config.host_bytes} holds no page of each of {', '.join(pool.name for pool in pools)}; "
            f"raise host_bytes to at least {smallest}"
        )
    return {pool.name: _host_tier(config, pool, config.host_bytes * pool.device_bytes // total) for pool in pools}


def _host_tier(config: LinkerConfig, pool: LinkedPool, host_bytes: int) -> HostTier:
    on_cuda = pool.device.type == "cuda"
    layers = pool.layout.layers
    device = pool.device if on_cuda else None
    host = HostPagePool(pool.layout, pool.page_tokens, host_bytes, pin=on_cuda, device=device, shared=True)
    counter = LayerTransferCounter(len(layers), CudaLayerEvents if on_cuda else CpuLayerEvents)
    spans = [pool.layout.spans_of(layer) for layer in layers]
    try:
        mover = PageMover(
            [pool.buffers[layer] for layer in layers], pool.page_tokens, kernel_choice(pool.device), spans
        )
    except ValueError as error:
        raise ConfigError(f"the rows of the component {pool.name} cannot be moved: {error}") from error
    transfer: TransferBackend = CpuTransfer(host.bytes_of, mover, counter)
    if on_cuda:
        transfer = CudaTransfer(
            host.bytes_of,
            mover,
            counter,
            rows_per_chunk=host.arena.rows_per_chunk,
            device_page_tokens=pool.page_tokens,
            staging_bytes=config.staging_bytes,
            chunk_tokens=AdvancedConfig().transfer_chunk_tokens,
        )
    transfer.start()
    return HostTier(pool, host, PageIndex(host, config.policy), counter, transfer)


@dataclass(frozen=True)
class Part:
    """What one component has of a transfer: pages that follow each other in a prompt, and `slots`, int64
    `[len(keys) * page_tokens]`, on its device."""

    tier: HostTier
    keys: list[bytes]
    slots: torch.Tensor

    def use(self) -> None:
        """A request uses those that are on the host, and what is known to come before them."""
        index = self.tier.index
        if held := index.parts(self.keys):
            above = [RunPart(run, 0, 0, len(run.keys)) for run in path_of(held[0].run)[:-1]]
            index.touch([part.run for part in index.count_use([*above, *held])])


def parts_of(transfers: Sequence[PoolTransfer], tiers: Mapping[str, HostTier]) -> list[Part] | None:
    """None unless each transfer names a component, and a slot for each token of its pages."""
    parts = []
    for transfer in transfers:
        tier = tiers.get(PoolName(transfer.name).value)
        if tier is None or transfer.device_indices is None or not transfer.keys:
            return None
        slots = transfer.device_indices.reshape(-1).to(torch.int64)
        if len(slots) != len(transfer.keys) * tier.pool.page_tokens:
            return None
        parts.append(Part(tier, tier.keys(transfer.keys), slots))
    return parts or None
