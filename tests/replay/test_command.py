"""`hicache replay` as a user meets it: its rows, and an interrupt in the middle."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disk_case import Clock
from hicache.cli import main
from hicache.errors import ConfigError
from hicache.replay.cost import TierCosts, costs_of
from hicache.replay.curve import miss_ratio_curve
from hicache.replay.simulation import ReplaySettings, one_tier, optimal, replay
from hicache.replay.sweep import cases_of, sweep
from hicache.replay.trace import read_trace
from prefetch_case import PacedStore, engine_of, fill, measure_disk, tokens_of
from programs import command
from replay_case import synthetic_trace, trace_of
from toy_model import serve
from waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
RATES = {"prefill_tokens_per_s": 1000.0, "bytes_per_token": 100.0, "load_bytes_per_s": 50_000.0}


def trace_file(tmp_path: Path, num_requests: int = 200) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids.tolist()}
        for at, ids in enumerate(synthetic_trace(num_requests))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    assert main(["replay", *flags, "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["schema"] == 1 and not list(tmp_path.glob(".out*"))
    rows: list[dict[str, Any]] = content["rows"]
    return rows


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_every_size_and_policy_has_a_row(tmp_path: Path, processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows equal those of single replays, in one process and in several. Further rows are for one tier of the total
    size, and for a host of twice the size. The tables show all rows. Sizes in bytes equal those in tokens, and no row
    counts the warm-up."""
    path = trace_file(tmp_path, 120)
    size = ["--host-bytes", "200KiB", "--bytes-per-token", "4", "--host-bytes-per-token", "2"]
    flags = ["--device-blocks", "60", "500", *size, "--policies", "lru,filo", "--warm-up", "0.25", "--curve"]
    rows = rows_of(tmp_path, str(path), *flags, "--processes", processes)
    assert [row["name"] for row in rows] == [*["lru", "filo", "optimal"] * 2, "unlimited"]
    trace, shown = replace(read_trace(path), num_warm_up=30), capsys.readouterr().out
    costs = TierCosts(bytes_per_token=4, host_bytes_per_token=2)
    for row in rows[:-1]:
        settings = ReplaySettings(**row["settings"])
        assert settings.host_blocks == 200 and row["requests"] == 90
        best, result = optimal(trace, settings, costs), replay(trace, settings, costs=costs)
        if row["name"] == "optimal":
            assert row == best.to_json()
            continue
        tiers, twice = one_tier(trace, settings).hit_rate, replay(trace, replace(settings, host_blocks=400)).hit_rate
        assert row == result.to_json() | {"one_tier_hit_rate": tiers, "twice_the_host_hit_rate": twice}
        for rate in (row["hit_rate"], tiers, twice):
            assert f"{rate:.4f}" in shown
        assert f"{result.hit_rate / best.hit_rate:.3f}" in shown
    assert rows[-1]["hit_rate"] == optimal(trace, ReplaySettings(None)).hit_rate
    assert "the first 30 requests not counted" in shown and "copies, GiB" in shown
    curve = json.loads((tmp_path / "out.json").read_text())["miss_ratio_curve"]
    assert curve == [asdict(point) for point in miss_ratio_curve(trace)]
    assert f"{curve[0]['optimal']:.4f}" in shown


def test_rates_give_times_to_the_first_token(tmp_path: Path) -> None:
    """With rates from a file and flags, rows have times. A higher speed of prefill makes them shorter."""
    path, rates = trace_file(tmp_path), tmp_path / "rates.json"
    rates.write_text(json.dumps(RATES))
    hinted = rows_of(tmp_path, str(path), "--device-blocks", "100", "--policies", "lru", "--hints", "next,session")
    assert hinted[0]["settings"]["hints"] == ["session", "next"]
    flags = [str(path), "--device-blocks", "100", "--policies", "lru", "--processes", "1", "--calibration", str(rates)]
    slow, fast = rows_of(tmp_path, *flags)[0], rows_of(tmp_path, *flags, "--prefill-tokens-per-s", "2000")[0]
    assert hinted[0]["hit_rate"] > slow["hit_rate"]
    assert slow["ttft_s"]["mean"] == pytest.approx(2 * fast["ttft_s"]["mean"])
    assert slow["gpu_s"] == pytest.approx(2 * fast["gpu_s"]) == pytest.approx(slow["ttft_s"]["mean"] * 200)


def test_times_are_sums_of_copies_and_computing() -> None:
    """Times equal a computation by hand: 8 tokens are copied from host and disk, and 4 are computed. At least the last
    token is computed."""
    costs = TierCosts(10.0, 100.0, None, 1000.0, 500.0, prefill_pair_s=0.01)
    tokens = [np.array(tokens) for tokens in ([12, 12], [0, 12], [4, 0], [4, 0])]
    first, second = costs.ttft_s(*tokens)
    assert costs.prefill_s(tokens[0], np.array([8, 12])).tolist() == pytest.approx([4 * (0.1 + 0.01 * 10), second])
    assert first == pytest.approx(8 * 100 / 1000 + 4 * 100 / 500 + 4 * (0.1 + 0.01 * 10))
    assert second == pytest.approx(0.1 + 0.01 * 11.5)
    result = replay(trace_of([1, 2], [1, 2]), ReplaySettings(8), costs=costs)
    assert result.ttft_s.tolist() == pytest.approx([8 * (0.1 + 0.01 * 4), 0.1 + 0.01 * 7.5])


def test_rates_are_found_in_files(tmp_path: Path) -> None:
    """Rates are read from the statistics of an engine after a read, a load and a prompt, and from files of plain rates.
    Zeros are unknown rates. Rates of later files and of flags replace earlier ones."""
    files = [tmp_path / name for name in ("stats.json", "plain.json")]
    store, tokens = PacedStore(Clock()), tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        fresh = engine.stats()
        measure_disk(engine, store, tokens, 0.0)
        assert serve(engine, "a", tokens).hit.disk > 0
        engine.flush()
        engine.observe_prefill(1000, 2.0)
        stats = engine.stats()
    for file, content in zip(files, (stats, {"bytes_per_token": 3, "disk_bytes_per_s": 2e9}), strict=True):
        file.write_text(json.dumps(content))
    prefill, load, read = (stats[f"cost.{name}_per_second"] for name in ("prefill_tokens", "load_bytes", "read_bytes"))
    assert prefill == pytest.approx(500) and load > 0 and read > 0
    assert costs_of(files[:1], {"bytes_per_token": 9}) == TierCosts(prefill, 9, None, load, read)
    assert costs_of(files, {"host_bytes_per_token": 2}) == TierCosts(prefill, 3, 2, load, 2e9)
    assert costs_of(files[::-1], {"prefill_tokens_per_s": 8.0}) == TierCosts(8.0, 3, None, load, read)
    assert costs_of([], {"bytes_per_token": 9.0}) == TierCosts(bytes_per_token=9.0)
    assert costs_of([], {"bytes_per_token": None}) is None
    files[0].write_text(json.dumps(fresh))
    with pytest.raises(ConfigError, match="no rate"):
        costs_of(files[:1], {})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "cases": []}', '{"bytes_per_token": "x"}'])
def test_a_file_without_rates_is_refused(tmp_path: Path, content: str) -> None:
    """The error about a file without rates names the file."""
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="rates"):
        costs_of([path], {})


@pytest.mark.long
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    """Two forks replay. Ctrl-C is sent to all of them, as a terminal does. The command prints one line and has status
    130, and no process and no file is left."""
    path, out = trace_file(tmp_path, 2_000), tmp_path / "out.json"
    line = ("replay", path, "--processes", "2", "--json", out)
    with command(*line, start_new_session=True, cwd=ROOT) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: len(children.read_text().split()) == 2)
        pids = children.read_text().split()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*pids, process.pid)]
        assert len(set(lines)) == 1, "processes are forked: others would import torch first"
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate()
        assert process.returncode == 130, error
    assert len(error.splitlines()) == 1 and "interrupted" in error, error
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not out.exists()


def test_progress_counts_all_requests() -> None:
    """The progress of a sweep rises to the requests of all cases, in one process and in several. An exception of the
    callback ends the sweep."""
    trace = trace_of(*([at % 7] for at in range(150)))
    cases = cases_of([ReplaySettings(5)], ("lru", "lfu"))
    one, two = list[int](), list[int]()
    alone, concurrent = sweep(trace, cases, None, 1, one.append), sweep(trace, cases, None, 2, two.append)
    for counts in (one, two):
        assert counts == sorted(counts) and counts[-1] == 150 * len(cases) == 600
    assert [result.name for result in alone] == ["lru", "lfu", "optimal", "unlimited"]
    assert [result.to_json() for result in alone] == [result.to_json() for result in concurrent]

    def stop(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        sweep(trace, cases, None, 1, stop)
