"""Settings of the threads of one store, which a client chooses."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.storage.process.health import LIMITS, Limits

_MAX_READERS, _MAX_COUNT = 1024, 1 << 62


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of the threads of one store. `readers`: number of threads that read. `queue_jobs`: maximum number of
    queued reads, and of queued writes. `full_bytes`: bytes of queued writes that count as a full queue. `part_bytes`:
    bytes of pages in one call to the store; between calls a reader checks whether the job was cancelled; a larger page
    is read alone. `yields_to_reads`: writes wait while reads are queued. `name`: the tier, in logs and thread names.
    """

    readers: int = 4
    queue_jobs: int = 64
    full_bytes: int = 1 << 40
    part_bytes: int = 8 << 20  # large enough to merge reads of neighbouring slots
    yields_to_reads: bool = False
    name: str = "disk"
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        counts = {"queue_jobs": self.queue_jobs, "full_bytes": self.full_bytes, "part_bytes": self.part_bytes}
        for name, count in {"readers": self.readers, **counts}.items():
            if not isinstance(count, int) or not 1 <= count <= (_MAX_READERS if name == "readers" else _MAX_COUNT):
                raise ValueError(f"{name}={count!r}")
        if not isinstance(self.name, str) or not isinstance(self.yields_to_reads, bool):
            raise ValueError(f"name={self.name!r}, gives_way={self.yields_to_reads!r}")
