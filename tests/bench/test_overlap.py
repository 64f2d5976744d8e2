"""The overlap bench: its forward against attention written out, its checks against damage, its figures and names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.bench.common import Report, read_report
from hicache.bench.forward8b import TINY, Forward, Suffix
from hicache.bench.overlap import AGED, CONTIGUOUS, ORDERS, Overlap, report_host_prefix
from hicache.bench.stage import Stage, Step, step_timer
from hicache.bench.transfer import shuffled_runs
from hicache.cli import main
from hicache.device import MHATokenToKVPool

PREFIX = 256
PARTS = ("", "hidden.", "control.", "beside.")


def _pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(96, 16, torch.float64, TINY.kv_heads, TINY.head_dim, TINY.layers, "cpu", False)


def _naive(forward: Forward, suffix: Suffix, prefix: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The forward token by token and head by head; `prefix`: keys and values of each layer [P, kv_heads, head_dim]."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(dim=1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    shape, x = forward.shape, suffix.x.clone()
    dim, q_width = shape.head_dim, shape.heads * shape.head_dim
    kv_width = shape.kv_heads * dim
    for old_keys, old_values in prefix:
        qkv = normed(x) @ forward._qkv
        keys = torch.cat([old_keys, qkv[:, q_width : q_width + kv_width].reshape(-1, shape.kv_heads, dim)])
        values = torch.cat([old_values, qkv[:, q_width + kv_width :].reshape(-1, shape.kv_heads, dim)])
        attended = torch.zeros(len(x), q_width, dtype=x.dtype)
        for i in range(len(x)):
            seen = len(old_keys) + i + 1
            for head in range(shape.heads):
                group = head * shape.kv_heads // shape.heads
                q = qkv[i, head * dim : (head + 1) * dim]
                weights = ((keys[:seen, group] @ q) / math.sqrt(dim)).softmax(dim=0)
                attended[i, head * dim : (head + 1) * dim] = weights @ values[:seen, group]
        x = x + attended @ forward._out
        gate_up = normed(x) @ forward._gate_up
        gate, up = gate_up[:, : shape.mlp], gate_up[:, shape.mlp :]
        x = x + (gate * gate.sigmoid() * up) @ forward._down
    return x


@pytest.mark.parametrize(("order", "num_tokens"), [("one run", 7), ("scattered", 1), ("scattered", 7)])
def test_the_forward_is_attention_over_prefix_and_suffix(order: str, num_tokens: int) -> None:
    """In place and gathered, the output is that of causal attention and MLP written out, over the pool's own rows."""
    pool = _pool()
    slots = torch.arange(16, 56)
    if order == "scattered":
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:40] + 16
    for layer in pool.layer_ids:
        for buffer in pool.layer_buffers(layer):
            buffer.normal_()
    prefix = [tuple(b[slots[:33]].clone() for b in pool.layer_buffers(layer)) for layer in pool.layer_ids]
    forward = Forward(TINY, pool, slots[:33], slots[33:])
    suffix = forward.suffix(num_tokens)
    assert (suffix.start is None) == (order == "scattered")
    expected = _naive(forward, suffix, [(keys, values) for keys, values in prefix])
    torch.testing.assert_close(forward(suffix), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(forward(forward.suffix(num_tokens, gather=True)), expected, rtol=1e-9, atol=1e-9)


def test_a_suffix_needs_its_slots() -> None:
    """As many new tokens as there are new slots are taken; none, or one more, raise."""
    forward = Forward(TINY, _pool(), torch.arange(16, 32), torch.arange(32, 40))
    assert forward.suffix(8).slots.tolist() == list(range(16, 40))
    for num_tokens in (0, 9):
        with pytest.raises(ValueError):
            forward.suffix(num_tokens)


@pytest.fixture(params=[CONTIGUOUS, AGED], ids=lambda layout: layout.name)
def stage(request: pytest.FixtureRequest, device: str) -> Iterator[Stage]:
    with closing(Stage(TINY, request.param, PREFIX, torch.device(device))) as stage:
        yield stage


def test_prefix_and_new_tokens_share_no_slot(stage: Stage) -> None:
    """All slots of prefix and suffix are distinct, none is the sink's, and contiguous ones are one run."""
    slots = torch.cat([stage.rig.slots, stage.forward.suffix(PREFIX // 4).loc]).cpu()
    assert len(slots) == PREFIX * 5 // 4 == len(slots.unique()) and int(slots.min()) >= stage.rig.pool.page_size
    in_place = stage.forward.suffix(8).start is not None
    assert in_place == bool((slots.diff() == 1).all())


def test_every_variant_gives_the_resident_output(stage: Stage) -> None:
    """Poisoned before and loaded again, layer by layer or as a whole, the prefix gives the same bits at every step."""
    suffix = stage.forward.suffix(16)
    timer = step_timer(stage.sync)
    steps = stage.steps(suffix)
    assert list(steps) == ["load", "compute", "together", "control", "beside"]
    for _ in range(3):
        for name, step in steps.items():
            stage.output = torch.zeros_like(suffix.x)
            assert timer(step) > 0
            assert bool(stage.output.any()) == (name != "load")
    stage.rig.verify()


def test_poison_and_wrong_bytes_are_seen(stage: Stage) -> None:
    """Before each load the whole prefix is poison, and a forward over it without that load fails its check."""
    steps = stage.steps(stage.forward.suffix(8))
    for name in ("together", "control"):
        stage.load()
        steps[name].before()
        for layer in stage.rig.pool.layer_ids:
            for buffer in stage.rig.pool.layer_buffers(layer):
                assert buffer[stage.rig.slots].unique().tolist() == [-7.0]
        with pytest.raises(AssertionError):
            step_timer(stage.sync)(steps["compute"])
    # When one host page changes, every step that loads it fails too.
    stage.load()
    steps = stage.steps(stage.forward.suffix(8))
    stage.rig.host.bytes_of[int(stage.rig.pages[1])].zero_()
    for name in ("together", "control"):
        with pytest.raises(AssertionError):
            step_timer(stage.sync)(steps[name])


@pytest.mark.parametrize("variant", ["together", "control"])
def test_only_the_control_waits_for_all_layers_first(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control asks for the last layer before the forward and for none in it; the other asks for each, in order."""
    with closing(Stage(TINY, CONTIGUOUS, PREFIX, torch.device("cpu"))) as stage:
        suffix, counter = stage.forward.suffix(8), stage.rig.counter
        asked: list[int] = []
        for events in counter._ring:
            wait = events.wait
            monkeypatch.setattr(events, "wait", lambda layer, wait=wait: (asked.append(layer), wait(layer)))
        {"together": stage.together, "control": stage.control}[variant](suffix)
        each = [layer for layer in range(TINY.layers) for _ in ("keys", "values")]
        assert asked == ([TINY.layers - 1] if variant == "control" else each)
        assert counter.can_begin()


def test_what_is_beside_a_step_is_not_timed() -> None:
    """Before, clock, run, clock, after: the device is idle at both ends of the run, and nothing else is within."""
    calls: list[str] = []
    step = Step(lambda: calls.append("run"), lambda: calls.append("before"), lambda: calls.append("after"))
    step_timer(lambda: calls.append("sync"))(step)
    assert calls == ["before", "sync", "run", "sync", "after"]


def _report() -> Report:
    return Report("overlap", "toy", {}, "", "", "")


def test_shares_follow_from_the_seconds() -> None:
    """max over measured, and the hidden share of the shorter half, for every run of both variants."""
    overlap = Overlap(64, 0.080, 0.020, (0.080, 0.085, 0.100), (0.100, 0.100, 0.110), (0.080, 0.080, 0.082))
    contiguous, random, aged = ORDERS
    report = _report()
    overlap.report(report, random, target=True)
    overlap.report(report, aged, target=True)
    overlap.report(report, contiguous, target=False)
    cases = {case.name: case for case in report.cases}
    shares, hidden, control, beside = (cases[f"overlap.{part}suffix64.random"] for part in PARTS)
    assert shares.value == pytest.approx(0.080 / 0.085) and shares.met is False and shares.target == 0.965
    assert overlap.hidden(overlap.together) == pytest.approx([1.0, 0.75, 0.0])
    assert hidden.value == pytest.approx(0.75) and control.value == pytest.approx(0.0)
    assert beside.value == pytest.approx(1.0) and overlap.hidden([0.110]) == pytest.approx([-0.5])
    assert cases["overlap.aged.suffix64"].target == 0.95 and "overlap.aged.control.suffix64" in cases
    assert {cases[f"overlap.{part}suffix64"].target for part in PARTS} == {None}
    assert aged.submit(32768) == "overlap.aged.submit" and random.submit(32768) == "submit.32k.random"


def test_the_host_prefix_is_judged_at_the_shortest_long_forward() -> None:
    """The smallest suffix with compute of at least 1.2 times the load is taken; without one there is no case."""
    times = ((4096, 4.0, 4.0), (2048, 1.2, 1.3), (1024, 1.19, 1.2))
    overlaps = [Overlap(tokens, 1.0, compute, *((run,) * 3,) * 3) for tokens, compute, run in times]
    report = _report()
    report_host_prefix(report, overlaps[2:], ORDERS[0], target=True)
    for order in ORDERS:
        report_host_prefix(report, overlaps, order, target=True)
    endings = ("", ".random", ".aged")
    assert [case.name for case in report.cases] == [f"forward.host_prefix{ending}" for ending in endings]
    case = report.cases[0]
    assert (case.value, case.ceiling) == (pytest.approx(1300), pytest.approx(1200)) and "2048" in case.note
    assert case.better == "lower" and case.target == 1.02 and case.met is False


def test_runs_are_all_ids_and_of_the_mean_length() -> None:
    """Shuffled runs are the ids, each once, in runs of the wanted length on average; runs of one id are any order."""
    for mean in (1, 4, 8):
        ids = shuffled_runs(np.random.default_rng(mean), 4000, mean)
        assert sorted(ids.tolist()) == list(range(4000))
        num_runs = 1 + np.count_nonzero(np.diff(ids) != 1)
        assert 4000 / num_runs == pytest.approx(mean, rel=0.1)


def test_a_small_run_has_every_case(tmp_path: Path) -> None:
    """On the CPU the names are those of the full run, by its own sizes, and no figure has a target."""
    arguments = ["--device", "cpu", "--samples", "2", "--prefix-tokens", "256", "--suffixes", "16", "8"]
    assert main(["bench", "run", "overlap", "--out", str(tmp_path), *arguments]) == 0
    (path,) = tmp_path.iterdir()
    report = read_report(path)
    lengths = ["suffix8", "suffix16", "suffix8.random"]
    submits = ["submit.256", "submit.256.staging256", "submit.256.random", "overlap.aged.submit"]
    expected = {"matmul.during_load", "attention.during_load"}
    expected |= {f"{name}{part}" for name in submits for part in ("", ".all_layers")}
    expected |= {f"overlap.{part}{s}" for part in PARTS for s in lengths}
    expected |= {f"overlap.aged.{part}suffix8" for part in PARTS}
    names = {case.name for case in report.cases}
    assert {name for name in names if "host_prefix" not in name} == expected
    assert {case.samples for case in report.cases} == {2} and all(case.target is None for case in report.cases)


@pytest.mark.parametrize(
    "flags", [["--prefix-tokens", "100"], ["--prefix-tokens", "256", "--suffixes", "65"], ["--suffixes", "0", "8"]]
)
def test_sizes_that_do_not_fit_are_named(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Part of a page, no new tokens, or more of them than there are free slots: a line that names the flag."""
    assert main(["bench", "run", "overlap", "--device", "cpu", "--out", str(tmp_path / "out"), *flags]) == 2
    assert next(flag for flag in reversed(flags) if flag.startswith("--")) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
