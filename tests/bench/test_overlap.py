"""The overlap bench: its forward against attention written out, its checks against damage, its figures and names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.bench import overlap as bench
from hicache.bench.common import BenchUnavailable, Report, read_report
from hicache.bench.forward8b import FULL, TINY, Forward, Suffix
from hicache.bench.overlap import AGED, CONTIGUOUS, ORDERS, RANDOM, Overlap, check_control, host_prefix_case
from hicache.bench.stage import Stage, Step, step_timer
from hicache.bench.transfer import Layout, shuffled_runs
from hicache.cli import main
from hicache.device import MHATokenToKVPool

PREFIX = 256


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


@pytest.mark.parametrize("order", ["one run", "scattered"])
@pytest.mark.parametrize("num_tokens", [1, 7])
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
        with pytest.raises(ValueError, match="8 slots"):
            forward.suffix(num_tokens)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[CONTIGUOUS, RANDOM, AGED], ids=lambda layout: layout.name)
def stage(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Stage]:
    layout = request.param
    assert isinstance(layout, Layout)
    stage = Stage(TINY, layout, PREFIX, device)
    yield stage
    stage.close()


def _slots(stage: Stage) -> torch.Tensor:
    return torch.cat([stage.rig.slots, stage.forward.suffix(PREFIX // 4).loc]).cpu()


def test_prefix_and_new_tokens_share_no_slot(stage: Stage) -> None:
    """All slots of prefix and suffix are distinct, none is the sink's, and contiguous ones are one run."""
    slots = _slots(stage)
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


def test_poison_is_seen_where_nothing_loads(stage: Stage) -> None:
    """Before each load the whole prefix is poison, and a forward over it without that load fails its check."""
    steps = stage.steps(stage.forward.suffix(8))
    for name in ("together", "control"):
        stage.load()
        steps[name].before()
        for layer in stage.rig.pool.layer_ids:
            for buffer in stage.rig.pool.layer_buffers(layer):
                assert buffer[stage.rig.slots].unique().tolist() == [-7.0]
        with pytest.raises(AssertionError, match="8 new tokens"):
            step_timer(stage.sync)(steps["compute"])


def test_wrong_bytes_on_the_host_fail_the_run(stage: Stage) -> None:
    """When one host page changes, every step that loads it fails its check."""
    steps = stage.steps(stage.forward.suffix(8))
    page = int(stage.rig.pages[1])
    stage.rig.host.bytes_of[page].zero_()
    for name in ("together", "control"):
        with pytest.raises(AssertionError, match="resident"):
            step_timer(stage.sync)(steps[name])


@pytest.mark.parametrize("variant", ["together", "control"])
def test_only_the_control_waits_for_all_layers_first(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control asks for the last layer before the forward and for none in it; the other asks for each, in order."""
    stage = Stage(TINY, CONTIGUOUS, PREFIX, torch.device("cpu"))
    try:
        suffix, counter = stage.forward.suffix(8), stage.rig.counter
        asked: list[int] = []
        for events in counter._ring:
            wait = events.wait
            monkeypatch.setattr(events, "wait", lambda layer, wait=wait: (asked.append(layer), wait(layer)))
        {"together": stage.together, "control": stage.control}[variant](suffix)
        each = [layer for layer in range(TINY.layers) for _ in ("keys", "values")]
        assert asked == ([TINY.layers - 1] if variant == "control" else each)
        assert counter.can_begin()
    finally:
        stage.close()


def test_what_is_beside_a_step_is_not_timed() -> None:
    """Before, clock, run, clock, after: the device is idle at both ends of the run, and nothing else is within."""
    calls: list[str] = []
    step = Step(lambda: calls.append("run"), lambda: calls.append("before"), lambda: calls.append("after"))
    step_timer(lambda: calls.append("sync"))(step)
    assert calls == ["before", "sync", "run", "sync", "after"]


def test_shares_follow_from_the_seconds() -> None:
    """max over measured, and the hidden share of the shorter half, for every run of both variants."""
    overlap = Overlap(64, 0.080, 0.020, (0.080, 0.085, 0.100), (0.100, 0.100, 0.110), (0.080, 0.080, 0.082))
    contiguous, random, aged = ORDERS
    shares, hidden, control, beside = overlap.cases(random, target=True)
    names = ["overlap.suffix64.random", "overlap.hidden.suffix64.random", "overlap.control.suffix64.random"]
    assert [case.name for case in (shares, hidden, control)] == names
    assert shares.value == pytest.approx(0.080 / 0.085) and shares.met is False and shares.target == 0.965
    assert overlap.hidden(overlap.together) == pytest.approx([1.0, 0.75, 0.0])
    assert hidden.value == pytest.approx(0.75) and control.value == pytest.approx(0.0)
    assert beside.name == "overlap.beside.suffix64.random" and beside.value == pytest.approx(1.0)
    assert overlap.hidden([0.110]) == pytest.approx([-0.5])
    assert [case.target for case in overlap.cases(contiguous, target=False)] == [None] * 4
    names = ["overlap.aged.suffix64", "overlap.aged.hidden.suffix64", "overlap.aged.control.suffix64"]
    shares, *others = overlap.cases(aged, target=True)
    assert [case.name for case in (shares, *others[:2])] == names and shares.target == 0.95
    assert aged.submit(32768) == "overlap.aged.submit" and random.submit(32768) == "submit.32k.random"


def _overlap(num_tokens: int, compute: float, together: float, control: float) -> Overlap:
    return Overlap(num_tokens, 1.0, compute, (together,) * 3, (control,) * 3, (together,) * 3)


def test_the_host_prefix_is_judged_at_the_shortest_long_forward() -> None:
    """The smallest suffix with compute of at least 1.2 times the load is taken; without one there is no case."""
    overlaps = [_overlap(4096, 4.0, 4.0, 5.0), _overlap(2048, 1.2, 1.3, 2.2), _overlap(1024, 1.19, 1.2, 2.2)]
    case = host_prefix_case(overlaps, ORDERS[0], target=True)
    assert case is not None and case.name == "forward.host_prefix" and "2048 new tokens" in case.note
    assert (case.value, case.ceiling) == (pytest.approx(1300), pytest.approx(1200))
    assert case.better == "lower" and case.target == 1.02 and case.met is False
    assert host_prefix_case(overlaps[2:], ORDERS[0], target=True) is None
    others = [host_prefix_case(overlaps, order, target=True) for order in ORDERS[1:]]
    assert [case.name for case in others if case] == ["forward.host_prefix.random", "forward.host_prefix.aged"]


def test_runs_are_all_ids_and_of_the_mean_length() -> None:
    """Shuffled runs are the ids, each once, in runs of the wanted length on average; runs of one id are any order."""
    for mean in (1, 4, 8):
        ids = shuffled_runs(np.random.default_rng(mean), 4000, mean)
        assert sorted(ids.tolist()) == list(range(4000))
        num_runs = 1 + np.count_nonzero(np.diff(ids) != 1)
        assert 4000 / num_runs == pytest.approx(mean, rel=0.1)


def test_the_control_must_show_the_difference_where_the_halves_are_alike() -> None:
    """The suffix nearest to balance decides: a gap of hidden shares above 0.3 passes, one of 0.3 or less raises."""
    far = _overlap(64, 0.1, 1.1, 1.1)
    check_control([far, _overlap(1024, 0.9, 1.0, 1.9)])
    with pytest.raises(AssertionError, match="1024 new tokens"):
        check_control([far, _overlap(1024, 0.9, 1.7, 1.9)])
    with pytest.raises(AssertionError, match="64 new tokens"):
        check_control([far])


def test_a_small_run_has_every_case(tmp_path: Path) -> None:
    """On the CPU the names are those of the full run, by its own sizes, and no figure has a target."""
    arguments = ["--device", "cpu", "--samples", "2", "--prefix-tokens", "256", "--suffixes", "16", "8"]
    assert main(["bench", "run", "overlap", "--out", str(tmp_path), *arguments]) == 0
    (path,) = tmp_path.iterdir()
    report = read_report(path)
    lengths = ["suffix8", "suffix16", "suffix8.random"]
    submits = ["submit.256", "submit.256.staging256", "submit.256.random", "overlap.aged.submit"]
    expected = {"matmul.during_load", "attention.during_load", "forward.gather.suffix8"}
    expected |= {f"{name}{part}" for name in submits for part in ("", ".all_layers")}
    parts = ("", "hidden.", "control.", "beside.")
    expected |= {f"overlap.{part}{s}" for part in parts for s in lengths}
    expected |= {f"overlap.aged.{part}suffix8" for part in parts}
    names = {case.name for case in report.cases}
    assert {name for name in names if "host_prefix" not in name} == expected
    assert {case.samples for case in report.cases} == {2} and all(case.target is None for case in report.cases)


def test_the_full_run_is_of_the_published_sizes() -> None:
    """On CUDA the shape is the 8B geometry, and pages, suffixes and bounds are those that are published."""
    assert (FULL.layers, FULL.hidden, FULL.heads, FULL.kv_heads, FULL.head_dim, FULL.mlp) == (
        32,
        4096,
        32,
        8,
        128,
        14336,
    )
    assert bench.SUFFIXES == (64, 256, 1024, 2048, 4096, 8192) and bench.PAGE == 64
    assert set(bench.RANDOM_SUFFIXES) < set(bench.SUFFIXES)
    bounds = (bench.SUBMIT_MS, bench.MATMUL_TARGET, bench.HOST_PREFIX_TARGET, bench.OVERLAP_TARGET)
    assert bounds == (3.0, 1.02, 1.02, 0.965) and bench.AGED_TARGET == 0.95
    assert (AGED.host_run, AGED.device_run) == (4, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefix-tokens", "100"], "--prefix-tokens 100: give whole pages of 64"),
        (["--prefix-tokens", "256", "--suffixes", "65"], r"--suffixes \[65\]: give 1 to 64"),
        (["--suffixes", "0", "8"], r"--suffixes \[0, 8\]: give 1 to 128"),
    ],
)
def test_sizes_that_do_not_fit_are_named(flags: list[str], message: str) -> None:
    """Part of a page, no new tokens, or more of them than there are free slots: BenchUnavailable with what would do."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(flags, argparse.Namespace(device=torch.device("cpu")))
    report = Report("overlap", "cpu", {}, "", "", "")
    with pytest.raises(BenchUnavailable, match=message):
        bench.run(args, report)
    assert report.cases == []
