"""Finds the CPUs on the NUMA node of a GPU, and runs threads on these CPUs.

Memory belongs to the NUMA node whose CPU touches it first. A pinned copy from another node shares the link between
sockets, so the arena's memory is first touched near the GPU that will read it. If the machine does not report the node,
no CPU is preferred; that is not an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from hicache.storage.memory import usable_cpus

SYS = Path("/sys")
MAX_THREADS = 16  # limit, because clearing pages is bound by memory bandwidth, which few cores saturate

Item = TypeVar("Item")


def pci_address(device: torch.device) -> str | None:
    """Return the PCI address of a CUDA device in the format of sysfs (`0000:dc:00.0`), or None if this torch does not
    report it."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def cpus_near(address: str | None, allowed: Collection[int], sys: Path = SYS) -> frozenset[int]:
    """Return the `allowed` CPUs on the node of the PCI device at `address`; empty for no preference.

    There is no preference if the machine has a single node, if the device or its node (-1) is unknown, or if no CPU of
    the node is allowed.
    """
    nodes = sys / "devices" / "system" / "node"
    if address is None or len(list(nodes.glob("node[0-9]*"))) < 2:
        return frozenset()
    try:
        node = int((sys / "bus" / "pci" / "devices" / address / "numa_node").read_text())
        cpus = parse_cpu_list((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    return cpus & frozenset(allowed)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs: `0-2,8` gives {0, 1, 2, 8}, and empty text (a node without CPUs) gives the empty set.
    Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def run_near(work: Callable[[Item], object], items: Iterable[Item], cpus: Collection[int]) -> None:
    """Call `work` on every item from new threads that are bound to `cpus` (empty: the threads are not bound).

    Returns when all calls have ended; raises the first error of a call. The affinity of other threads does not change.
    """
    items = list(items)
    num_threads = max(1, min(MAX_THREADS, len(items), len(cpus or usable_cpus())))
    with ThreadPoolExecutor(num_threads, "hicache-touch", _bind, (cpus,)) as threads:
        for _ in threads.map(work, items):
            pass


def _bind(cpus: Collection[int]) -> None:
    """Bind the calling thread to `cpus`. Does nothing if `cpus` is empty."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # these CPUs are no longer allowed, so the thread keeps its affinity
        return
