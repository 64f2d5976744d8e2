"""Hit rates that a trace would have on the planned tiers, by the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hicache.planning.memory import Tier
from hicache.replay.simulation import ReplaySettings, replay
from hicache.replay.trace import Trace


@dataclass(frozen=True)
class HitRow:
    """The hit rate with some tiers, over blocks. `num_tokens`: of each tier; None: without a limit."""

    tiers: str
    num_tokens: tuple[int | None, ...]
    hit_rate: float


def hit_rows(trace: Trace, tiers: tuple[Tier, ...], policy: str) -> Iterator[HitRow]:
    """With the device alone, with each further tier, with a host tier of twice the size, and without a limit."""
    for number in range(1, len(tiers) + 1):
        yield _row(trace, [(tier.name, tier.num_tokens) for tier in tiers[:number]], policy)
    if len(tiers) > 1:
        device, host = tiers[:2]
        yield _row(trace, [(device.name, device.num_tokens), ("twice the host", 2 * host.num_tokens)], policy)
    unlimited = replay(trace, ReplaySettings(device_blocks=None, host_blocks=0, disk_blocks=0, policy=policy))
    yield HitRow("without a limit", (None,), unlimited.hit_rate)


def _row(trace: Trace, sizes: list[tuple[str, int]], policy: str) -> HitRow:
    blocks = [num_tokens // trace.block_tokens for _, num_tokens in sizes]
    device, host, disk = [*blocks, 0, 0][:3]
    names = " + ".join(name for name, _ in sizes)
    tokens = tuple(num_tokens for _, num_tokens in sizes)
    if not device:
        return HitRow(names, tokens, 0.0)
    # A tier of less than a block holds none, and without a host tier there is no disk tier.
    settings = ReplaySettings(device_blocks=device, host_blocks=host, disk_blocks=disk if host else 0, policy=policy)
    return HitRow(names, tokens, replay(trace, settings).hit_rate)
