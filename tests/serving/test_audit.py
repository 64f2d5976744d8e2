"""The audit of KV bytes: it compares pages that come back, finds one flipped byte, and survives the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.engine import CacheEngine
from hicache.errors import ConfigError
from hicache.kernels.page_copy import PageMover
from hicache.serving.audit import AuditCounts, KVAudit
from hicache.serving.request import Request
from hicache.serving.scheduler import Scheduler
from serving_case import prompt, shared, tiny_engine, tiny_llama, tiny_runner, token_bytes


def _engine(model: Any, tmp_path: Path, **settings: Any) -> CacheEngine:
    return tiny_engine(
        model,
        device_tokens=160,
        host_bytes=512 * token_bytes(model),
        disk={"path": str(tmp_path / "store")},
        **settings,
    )


def _ask(engine: CacheEngine, model: Any, audit: KVAudit, *lengths: int) -> None:
    """One request after the other, named and seeded by its length."""
    scheduler = Scheduler(engine, tiny_runner(model, engine), auditor=audit)
    for length in lengths:
        result = scheduler.run([Request(str(length), prompt(length, seed=length), 4)])[0]
        assert result.finish_reason == "length"
        engine.flush()


def test_pages_that_come_back_are_compared(tmp_path: Path) -> None:
    """Computed pages are recorded, pages on the device are not compared, pages from the host are."""
    model = shared(tiny_llama)
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny")
        _ask(engine, model, audit, 100)
        assert audit.counts == AuditCounts(recorded=6)  # 100 + 3 of 4 tokens have KV: 6 whole pages of 16
        _ask(engine, model, audit, 100)
        assert audit.counts == AuditCounts(recorded=6)  # all 6 stayed on the device
        _ask(engine, model, audit, 150)
        assert audit.counts.compared == 0
        _ask(engine, model, audit, 100)
        assert audit.counts.mismatched == audit.counts.unrecorded == 0
        assert 0 < audit.counts.compared <= 6


def test_one_flipped_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a load changes one byte of one layer, exactly that page is a mismatch."""
    model = shared(tiny_llama, device="cpu")
    scatter = PageMover.scatter

    def flipping(self: PageMover, staging: torch.Tensor, slots: torch.Tensor, first: int, count: int) -> None:
        staging = staging.clone()
        if first == 1:
            staging.view(len(staging), -1)[2, 5] ^= 1
        scatter(self, staging, slots, first, count)

    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny")
        _ask(engine, model, audit, 100, 150)
        monkeypatch.setattr(PageMover, "scatter", flipping)
        _ask(engine, model, audit, 100)
        assert audit.counts.mismatched == 1
        assert audit.counts.compared > 2


def test_what_another_process_computed_is_known_once_it_was_seen(tmp_path: Path) -> None:
    """Pages of other rounding are no mismatch where others store pages too, and are compared from then on."""
    model = shared(tiny_llama, device="cpu")
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny", is_shared=True)
        _ask(engine, model, audit, 100, 150)
        audit._known = {key: {b"of another process"} for key in audit._known}
        _ask(engine, model, audit, 100)
        first = audit.counts
        assert first.unrecorded > 0 and first.compared == first.mismatched == 0
        _ask(engine, model, audit, 150, 100)
        assert audit.counts.compared > 0 and audit.counts.mismatched == 0


def test_digests_outlive_the_process(tmp_path: Path) -> None:
    """With a sidecar, a second engine compares pages of the first; without one, or for another model, it does not."""
    model = shared(tiny_llama)
    sidecar = tmp_path / "audit.jsonl"
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny", sidecar)
        _ask(engine, model, audit, 100)
        audit.close()
    for identity, path, expected in [
        ("tiny", sidecar, AuditCounts(compared=6)),
        ("tiny", None, AuditCounts(unrecorded=6)),
        ("other", sidecar, AuditCounts(unrecorded=6)),
    ]:
        with _engine(model, tmp_path) as engine:
            audit = KVAudit(engine, identity, path)
            _ask(engine, model, audit, 100)
            audit.close()
            assert audit.counts == expected


def test_a_torn_last_line_is_dropped_and_the_file_stays_good(tmp_path: Path) -> None:
    """A line that a killed process wrote half is dropped, later digests start on a new line, and the file stays
    readable."""
    model = shared(tiny_llama)
    sidecar = tmp_path / "audit.jsonl"
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny", sidecar)
        _ask(engine, model, audit, 100)
        audit.close()
    whole = sidecar.read_text().splitlines()
    sidecar.write_text("\n".join(whole)[:-10])
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny", sidecar)
        _ask(engine, model, audit, 100, 50)
        audit.close()
        assert audit.counts == AuditCounts(compared=5, unrecorded=1, recorded=3)
    lines = sidecar.read_text().splitlines()
    assert lines[:5] == whole[:5] and len(lines) == 5 + 3
    with _engine(model, tmp_path) as engine:
        audit = KVAudit(engine, "tiny", sidecar)
        _ask(engine, model, audit, 50)
        audit.close()
        assert audit.counts == AuditCounts(compared=3)


def test_a_file_that_is_not_an_audit_file_is_refused(tmp_path: Path) -> None:
    """A damaged line in the middle, or a path that cannot be opened, raises ConfigError that names file and line."""
    model = shared(tiny_llama)
    sidecar = tmp_path / "audit.jsonl"
    sidecar.write_text('{"page": "00", "kv": "00"}\nnonsense\n{"page": "01", "kv": "01"}\n')
    with tiny_engine(model) as engine:
        with pytest.raises(ConfigError, match=r"audit\.jsonl:2"):
            KVAudit(engine, "tiny", sidecar)
        with pytest.raises(ConfigError):
            KVAudit(engine, "tiny", tmp_path)
