"""The overlap bench: its forward against attention written out, its checks against damage, its figures and names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hicache.bench.common import Report, read_report
from hicache.bench.forward8b import TINY, Forward, Suffix
from hicache.bench.overlap import AGED, CONTIGUOUS, ORDERS, Overlap
from hicache.bench.stage import Stage, step_timer
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


@pytest.fixture(params=[CONTIGUOUS, AGED], ids=lambda layout: layout.name)
def stage(request: pytest.FixtureRequest, device: str) -> Iterator[Stage]:
    with closing(Stage(TINY, request.param, PREFIX, torch.device(device))) as stage:
        yield stage


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
