"""Sessions of agents as a workload of benchmarks: the turns, who sends them, and what is compared."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hicache.bench.common import Report
from hicache.bench.servers import sessions_vllm
from hicache.bench.servers.clients import Asked, Load, LoadRun, send
from hicache.bench.servers.session_cases import Key, add_cases
from hicache.bench.serving_sessions import REAL_HOST, TINY_HOST, TINY_TRAFFIC, TRAFFIC, SessionSizes, replayed_hits
from hicache.bench.sessions import Prompts, Scale, Traffic, Turn, generated_turns, read_turns, traffic_of

SCALE = Scale(requests=200, block_tokens=8, shortest=200, longest=6000)


def _traffic(seed: int) -> Sequence[Turn]:
    return traffic_of(TINY_TRAFFIC, seed).turns


@pytest.mark.parametrize(
    ("turns_of", "scale", "num_heads"),
    [(partial(generated_turns, SCALE), SCALE, 2), (_traffic, replace(TINY_TRAFFIC.scale, shortest=8), 4)],
    ids=["agents", "traffic"],
)
def test_generated_turns_go_on_from_those_before(
    turns_of: Callable[[int], Sequence[Turn]], scale: Scale, num_heads: int
) -> None:
    """Every turn begins with its session's last one; sessions share their beginnings; lengths are as asked for; a seed
    gives the same again."""
    turns = turns_of(0)
    assert len(turns) == scale.requests and turns == turns_of(0) != turns_of(1)
    last: dict[str, tuple[int, ...]] = {}
    for turn in turns:
        before = last.get(turn.session, turn.blocks[:1])
        assert turn.blocks[: len(before)] == before and (turn.session not in last or turn.blocks != before)
        assert scale.shortest <= 8 * len(turn.blocks) <= scale.longest
        last[turn.session] = turn.blocks
    assert 5 < len(last) < 40
    assert len({blocks[0] for blocks in last.values()}) == num_heads


@pytest.mark.parametrize(("traffic", "sizes"), [(TRAFFIC, REAL_HOST), (TINY_TRAFFIC, TINY_HOST)], ids=["real", "tiny"])
def test_traffic_shows_what_a_host_as_large_as_the_device_brings(traffic: Traffic, sizes: SessionSizes) -> None:
    """Four times what the device holds is under way. Under `exclusive` less is computed than under `write_through`, by
    more than the time over it that is aimed at."""
    workload = traffic_of(traffic)
    assert abs(workload.working_set / sizes.device_tokens - 4) < 0.1
    assert len(workload.turns) > 2 * sizes.num_warm_up - 1
    if traffic is TINY_TRAFFIC:
        none, copies, ours = replayed_hits(workload.turns, sizes, sizes.host_tokens).values()
        assert none <= copies < ours and (1 - ours) / (1 - copies) < 0.8


def test_a_trace_gives_prompts_that_are_alike_where_its_blocks_are(tmp_path: Path) -> None:
    """64 tokens a block in the trace, 8 in the prompts. What is too short or too long is left out."""
    path = tmp_path / "trace.jsonl.gz"
    lengths = {"a": [30, 40, 2000], "b": [10, 30]}
    rows = [
        {"timestamp": 0, "session": name, "input_length": 64 * n, "output_length": 1, "hash_ids": list(range(n))}
        for name, some in lengths.items()
        for n in some
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    turns = read_turns(path, SCALE)
    assert [(turn.session, len(turn.blocks)) for turn in turns] == [("a", 30), ("a", 40), ("b", 30)]
    first, other = Prompts(8, 0), Prompts(8, 1)
    short, long, again = (first.of(turn) for turn in turns)
    assert len(short) == 240 and long[:240] == short == again == Prompts(8, 0).of(turns[0])
    blocks = [tuple(long[start : start + 8]) for start in range(0, 320, 8)]
    assert len(set(blocks)) == 40
    assert not set(blocks) & {tuple(other.of(turns[1])[start : start + 8]) for start in range(0, 320, 8)}


class Asker:
    """Answers after as many turns of the loop as the prompt has blocks; notes who is under way."""

    def __init__(self, turns: list[Turn], never: int = -1) -> None:
        self.turns, self.never = turns, never
        self.asked: list[int] = []
        self.under_way: dict[str, int] = defaultdict(int)
        self.most = self.most_of_session = 0

    async def ask(self, number: int) -> Asked:
        turn = self.turns[number]
        self.asked.append(number)
        self.under_way[turn.session] += 1
        self.most = max(self.most, sum(self.under_way.values()))
        self.most_of_session = max(self.most_of_session, self.under_way[turn.session])
        if number == self.never:
            await asyncio.Event().wait()
        for _ in turn.blocks:
            await asyncio.sleep(0)
        self.under_way[turn.session] -= 1
        return Asked(number, 0.5, 1.0, len(turn.blocks), 0, [number])


@pytest.mark.parametrize("load", [Load(clients=5), Load(requests_per_s=1e5)], ids=["clients", "clock"])
def test_turns_of_a_session_are_sent_one_behind_the_other(load: Load) -> None:
    turns = [Turn(str(number % 16), tuple(range(3 + number % 7))) for number in range(96)]
    asker = Asker(turns)
    run = asyncio.run(send(asker.ask, turns, load, 60))
    assert sorted(asker.asked) == sorted(answer.number for answer in run.answers) == list(range(len(turns)))
    assert asker.most_of_session == 1 and (asker.most == 5 or not load.clients)
    of_session: dict[str, list[int]] = defaultdict(list)
    for number in asker.asked:
        of_session[turns[number].session].append(number)
    assert all(numbers == sorted(numbers) for numbers in of_session.values())
    assert run.is_whole


def test_clients_overlap_turns_where_there_is_no_other_session() -> None:
    """Three clients, two sessions: none of them is idle."""
    turns = [Turn(str(number % 2), tuple(range(9))) for number in range(12)]
    asker = Asker(turns)
    asyncio.run(send(asker.ask, turns, Load(clients=3), 60))
    assert (asker.most, asker.most_of_session) == (3, 2)


def test_a_load_that_is_cut_off_says_so() -> None:
    turns = generated_turns(SCALE)
    run = asyncio.run(send(Asker(turns, never=3).ask, turns, Load(clients=1), 0.5))
    assert [answer.number for answer in run.answers] == [0, 1, 2] and not run.is_whole
    assert LoadRun.from_json(json.loads(json.dumps(vars(run) | {"answers": [vars(a) for a in run.answers]}))) == run


def test_a_disk_is_compared_with_the_better_of_always_and_never_loading() -> None:
    """What was cut off is compared with nothing; answers are compared with those without a cache."""

    def run(makespan_s: float, requests: int = 2, token: int = 0) -> dict[str, LoadRun]:
        answers = [Asked(n, makespan_s / 10, 1.0, 100, 50, [token * n]) for n in range(2)]
        return {load: LoadRun(requests, makespan_s, answers) for load in ("c8", "c32")}

    runs = {
        Key(mode, 1): times
        for mode, times in {
            "none": run(9.0),
            "cpu": run(4.0),
            "spec": run(3.0, token=1),
            "fs": run(5.0, requests=3),
            "hicache": run(2.1),
            "hicache-always": run(2.0),
            "hicache-never": run(2.5),
        }.items()
    }
    report = Report.start("servers", torch.device("cpu"), "")
    sizes = {"requests": 2, "gpu_tokens": 1, "cpu_gib": 1, "disk_cpu_gib": 1}
    add_cases(report, argparse.Namespace(server="vllm", small=False, **sizes), sessions_vllm, runs, "")
    ratios = {
        case.name.removeprefix("servers.vllm.sessions."): (case.ratio, case.target)
        for case in report.cases
        if case.ceiling
    }
    assert ratios["spec"] == (0.75, 0.80) and ratios["spec.c32"] == (0.75, None)
    assert ratios["disk.c8"] == (1.05, 1.03) and ratios["disk.c32"] == (1.05, 1.05)
    assert ratios["p99"] == (0.75, 1.0)
    assert "disk.over_fs" not in ratios
    differing = {case.name: case.value for case in report.cases if case.name.endswith("differing_from_none")}
    assert differing["servers.vllm.sessions.spec.c8.differing_from_none"] == 0.5
    assert differing["servers.vllm.sessions.cpu.c8.differing_from_none"] == 0
