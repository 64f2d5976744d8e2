"""An exception inside a call, as Ctrl-C raises one: the engine still closes, and says what it can no longer do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, build_engine
from hicache.errors import InvariantError
from hicache.storage import open_existing
from toy_model import GEOMETRY, config
from waiting import eventually


def compute(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        engine.commit(lease, tokens)


def test_an_engine_closes_after_an_interrupt_inside_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of a write is lost between its arrival and its count, so it counts as under way for good. Flush says
    so, close returns, and the store has what was acknowledged."""
    advanced = AdvancedConfig(disk_io_timeout_s=0.2)
    settings = config(disk=DiskConfig(path=str(tmp_path), budget_bytes=8 << 20), advanced=advanced)
    with build_engine(settings, GEOMETRY) as engine:
        (persist,) = engine.inspect.persists

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        compute(engine, "a", np.arange(100))
        with monkeypatch.context() as patch:
            patch.setattr(persist, "_take", interrupted)

            def is_interrupted() -> bool:
                try:
                    engine.poll()
                except KeyboardInterrupt:
                    return True
                return False

            eventually(is_interrupted)
        with pytest.raises(InvariantError):
            engine.flush()
    store = open_existing(tmp_path)
    assert store.stats().entries == 96 // 8
    store.check()
    store.close()
