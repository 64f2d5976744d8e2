"""How the threads of one store work, as a client asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.storage.process.health import LIMITS, Limits

_MAX_READERS, _MAX_COUNT = 1024, 1 << 62


@dataclass(frozen=True)
class ServiceSettings:
    """`readers`: threads that read. `queue_jobs`: how many reads, and how many writes, may wait. `full_bytes`: waiting
    writes of so many bytes count as a full queue. `part_bytes`: of the pages of one call to the store, between two
    looks of a reader at whether it should go on; a larger page goes alone. `gives_way`: writes wait while reads do.
    `name`: of the tier, in logs and threads.
    """

    readers: int = 4
    queue_jobs: int = 64
    full_bytes: int = 1 << 40
    part_bytes: int = 8 << 20  # neighbours are read together
    gives_way: bool = False
    name: str = "disk"
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        """ValueError for what a process cannot serve by."""
        counts = {"queue_jobs": self.queue_jobs, "full_bytes": self.full_bytes, "part_bytes": self.part_bytes}
        for name, count in {"readers": self.readers, **counts}.items():
            if not isinstance(count, int) or not 1 <= count <= (_MAX_READERS if name == "readers" else _MAX_COUNT):
                raise ValueError(f"{name}={count!r}")
        if not isinstance(self.name, str) or not isinstance(self.gives_way, bool):
            raise ValueError(f"name={self.name!r}, gives_way={self.gives_way!r}")
