"""Settings of the threads of one store, which a client chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hicache.storage.process.health import LIMITS, Limits

Backup: TypeAlias = Literal["used", "all", "none"]
BACKUPS: tuple[Backup, ...] = ("used", "all", "none")
_MAX_READERS, _MAX_COUNT = 1024, 1 << 62


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of the threads of one store. `readers`: number of threads that read. `queue_jobs`: maximum number of
    queued reads, and of queued writes. `full_bytes`: bytes of queued writes that count as a full queue. `part_bytes`:
    maximum bytes of pages that one call to the store reads; a larger page is read alone. Between calls a reader checks
    whether the job was cancelled. `yields_to_reads`: writes wait while reads are queued. `detaches_reads`: pages are
    read into memory of the store process first, so that a read that is cancelled or stalls is answered immediately.
    `name`: the tier, in logs and thread names.
    """

    readers: int = 4
    queue_jobs: int = 64
    full_bytes: int = 1 << 40
    part_bytes: int = 8 << 20  # large enough to merge reads of neighbouring slots
    yields_to_reads: bool = False
    detaches_reads: bool = False
    name: str = "disk"
    limits: Limits = LIMITS

    @classmethod
    def of_remote(cls, url: str, **more: Any) -> ServiceSettings:
        """Return settings for a store on other machines. One call of Mooncake's library uses the full rate of the link,
        so one reader is enough. For other stores, several readers hide the latency."""
        readers = 1 if url.strip().lower().startswith("mooncake://") else 4
        # The backoff is short, so that a restarted server is used again soon.
        limits = Limits(io_timeout_s=2.0, max_reopen_backoff_s=30.0, close_s=2.0)
        chosen = {"readers": readers, "part_bytes": 64 << 20, "yields_to_reads": True, "detaches_reads": True}
        return cls(**{**chosen, "name": "remote", "limits": limits, **more})

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        counts = {"queue_jobs": self.queue_jobs, "full_bytes": self.full_bytes, "part_bytes": self.part_bytes}
        for name, count in {"readers": self.readers, **counts}.items():
            if not isinstance(count, int) or not 1 <= count <= (_MAX_READERS if name == "readers" else _MAX_COUNT):
                raise ValueError(f"{name}={count!r}")
        switches = self.yields_to_reads, self.detaches_reads
        if not isinstance(self.name, str) or not all(isinstance(switch, bool) for switch in switches):
            raise ValueError(f"name={self.name!r}, yields_to_reads and detaches_reads={switches}")


@dataclass(frozen=True)
class RemoteSettings:
    """The remote store of a process. `url`: see `hicache.storage.urls`; "" for none. `backup`: the pages that are
    copied to the remote store: "all", "none" or "used". "used" means pages that a request used after they were
    computed, and pages whose `WriteJob` is `is_costly`. `max_queued_pages`, `max_queued_bytes`: limits of the queue of
    copies; pages beyond these limits are not copied, and are counted as dropped."""

    url: str = ""
    backup: Backup = "used"
    max_queued_pages: int = 1 << 16
    max_queued_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        if self.backup not in BACKUPS or not isinstance(self.url, str):
            raise ValueError(f"backup={self.backup!r}: choose {', '.join(BACKUPS)}")
        for count in (self.max_queued_pages, self.max_queued_bytes):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"the queue of a remote store has a limit of {count!r}")
