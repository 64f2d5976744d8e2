"""Recorded traces: they have the requests that arrived, and can be replayed."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.replay.recorder import TraceRecorder
from hicache.replay.settings import ReplaySettings
from hicache.replay.simulation import replay
from hicache.replay.trace import read_trace


def test_what_is_recorded_replays(tmp_path: Path) -> None:
    """Lines are in order of arrival, in whatever order requests ended. Blocks are equal if prefix and tenant are.
    Requests that were never admitted are left out."""
    path, now_s = tmp_path / "trace.jsonl", iter(range(100))
    with TraceRecorder(path, 4, clock=lambda: float(next(now_s))) as recorder:
        recorder.arrived("a", np.arange(10), session="x")
        recorder.arrived("refused", np.arange(12))
        recorder.arrived("b", np.arange(14))
        recorder.arrived("c", np.arange(10), namespace="other")
        recorder.arrived("d", np.arange(3))
        recorder.ended("c", 7)
        recorder.ended("b", 5)
        recorder.ended("unknown", 5)
        recorder.ended("refused", None)
    trace = read_trace(path)
    a, b, c, d = trace.requests
    assert trace.block_tokens == 4 and recorder.num_written == 4
    assert [request.time_s for request in trace.requests] == [0.0, 2.0, 3.0, 4.0]
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [
        (10, 0),
        (14, 5),
        (10, 7),
        (3, 0),
    ]
    assert (len(a.blocks), len(b.blocks), len(d.blocks)) == (2, 3, 0) and a.session == "x" and not b.session
    assert b.blocks[:2].tolist() == a.blocks.tolist() and not set(c.blocks.tolist()) & set(b.blocks.tolist())
    result = replay(trace, ReplaySettings(None))
    assert result.device_tokens.tolist() == [0, 8, 0, 0]
    recorder.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fails_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the disk fails, requests continue, the log has one warning, and the lines written before are a valid trace."""
    path, (soft, hard) = tmp_path / "trace.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # limit of the length of a file
    try:
        with TraceRecorder(path, 4) as recorder:
            for name in range(40):
                recorder.arrived(str(name), np.arange(12))
                recorder.ended(str(name), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    warning = f"recording to {path} stopped after a disk error: File too large"
    assert [record.message for record in caplog.records] == [warning]
    assert 0 < recorder.num_written == len(read_trace(path).requests) < 40


def test_a_recording_writes_over_nothing(tmp_path: Path) -> None:
    """A recording to an existing file is refused, and the file stays."""
    path = tmp_path / "trace.jsonl"
    path.write_text("before")
    with pytest.raises(ConfigError, match="trace"):
        TraceRecorder(path, 4)
    assert path.read_text() == "before"
