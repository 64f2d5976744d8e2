"""`hicache demo` as a user meets it: its outcome, wrong input in one line, and death in the middle."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from family_case import save_model
from hicache.bench import common
from hicache.bench import demo as bench_demo
from hicache.cli import main

SMALL = ["--documents", "4", "--turns", "2", "--document-tokens", "600", "--chunk", "256", "--max-new-tokens", "4"]


def _demo(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Run a small demo that must succeed; returns its results."""
    out = tmp_path / "out.json"
    assert main(["demo", *SMALL, "--json", str(out), *flags]) == 0
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def _spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hicache.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _one_line(text: str) -> str:
    """The single line of an error message."""
    lines = text.splitlines()
    assert len(lines) == 1 and lines[0].startswith("hicache: error: "), text
    return lines[0]


def test_demo_figures(tmp_path: Path) -> None:
    """A demo is identical, hits every tier, accounts for every prompt token and writes every figure promised."""
    results = _demo(tmp_path)
    assert results["identical"] is True and results["compared_with_recompute"] is True
    assert results["requests"] == 8 == len(results["turns"])
    assert set(results["hit_tokens"]) == {"device", "host", "disk"}
    assert all(tokens > 0 for tokens in results["hit_tokens"].values()), results["hit_tokens"]
    assert sum(results["hit_tokens"].values()) + results["computed_tokens"] == results["prompt_tokens"]
    assert set(results["ttft_ms"]) == {"cached", "recompute"} and min(results["ttft_ms"].values()) > 0
    assert set(results["bytes_moved"]) == {"device_to_host", "host_to_device", "host_to_disk", "disk_to_host"}
    assert all(size > 0 for size in results["bytes_moved"].values())
    assert results["device"] == "cpu" and results["seconds"] > 0
    assert results["pages"]["mismatched"] == 0 and results["pages"]["compared"] > 0
    assert all(len(turn["tokens"]) == 4 for turn in results["turns"])
    # The tiers are as small as they claim: none of the upper two holds the working set.
    sizes = results["sizes"]
    assert (
        sizes["device_tokens"] < sizes["working_set_tokens"] / 2 and sizes["host_tokens"] < sizes["working_set_tokens"]
    )


def test_a_second_demo_finds_the_first_ones_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --disk, a second run finds all first turns on disk and verifies them; another model is refused."""
    store = str(tmp_path / "store")
    first = _demo(tmp_path, "--disk", store)
    second = _demo(tmp_path, "--disk", store)
    assert first["first_turns"]["hit_tokens"]["disk"] == 0
    assert all(turn["hit_tokens"]["disk"] > 0 for turn in second["turns"] if turn["turn"] == 1)
    assert second["identical"] and second["pages"]["unrecorded"] == 0 < second["pages"]["compared"]
    assert [turn["tokens"] for turn in first["turns"]] == [turn["tokens"] for turn in second["turns"]]
    capsys.readouterr()
    assert main(["demo", *SMALL, "--disk", store, "--seed", "1"]) == 2
    assert "made for something else" in _one_line(capsys.readouterr().err)
    assert main(["demo", *SMALL, "--disk", store, "--host-page-size", "32"]) == 2
    assert "page_tokens" in _one_line(capsys.readouterr().err)
    assert _demo(tmp_path, "--disk", store)["first_turns"]["hit_tokens"]["disk"] > 0


def test_sampled_concurrent_and_without_baseline(tmp_path: Path) -> None:
    """Sampling and several requests at a time keep the outcome identical; without a baseline none is claimed."""
    results = _demo(tmp_path, "--sample", "--top-p", "0.9", "--concurrency", "3")
    assert results["identical"] is True
    assert len({tuple(turn["tokens"]) for turn in results["turns"]}) > 1
    results = _demo(tmp_path, "--no-baseline")
    assert results["compared_with_recompute"] is False and results["ttft_ms"]["recompute"] is None


def test_own_documents_and_recorded_sessions(tmp_path: Path) -> None:
    """Files and sessions given together are served in turns, each its own conversation."""
    (tmp_path / "a.txt").write_text("All work and no play. " * 20)
    prompts = ["system: be brief. " * 20 + f"turn {i} " * (i + 1) for i in range(3)]
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in prompts))
    results = _demo(tmp_path, "--input", str(tmp_path / "a.txt"), "--session", str(tmp_path / "s.jsonl"))
    names = [turn["request"] for turn in results["turns"]]
    assert sorted(names) == ["1.1 s", "1.2 s", "2.1 a.txt", "2.2 a.txt"]  # --turns 2 holds for both
    assert results["identical"] is True and sum(results["hit_tokens"].values()) > 0


def test_flags_go_before_the_sizes_that_the_demo_chooses(tmp_path: Path) -> None:
    """--host-ratio replaces the demo's host_bytes; settings of the disk apply to the demo's own store; without a host
    tier it keeps no store of its own."""
    results = _demo(tmp_path, "--no-baseline", "--host-ratio", "1.5", "--disk-level", "0", "--dtype", "auto")
    sizes = results["sizes"]
    assert sizes["device_tokens"] < sizes["host_tokens"] <= 1.5 * sizes["device_tokens"] + 64
    moved = results["bytes_moved"]
    assert moved["host_to_disk"] > 0
    results = _demo(tmp_path, "--no-baseline", "--host-bytes", "0")
    assert results["sizes"]["host_tokens"] == 0 == results["bytes_moved"]["host_to_disk"]


BAD = {
    "unknown flag": (["--flavour", "mild"], "--flavour"),
    "no abbreviations": (["--docu", "4"], "--docu"),
    "a word for a number": (["--turns", "many"], "--turns"),
    "no turns": (["--turns", "0"], "--turns: 0 is below 1"),
    "nothing to generate": (["--max-new-tokens", "0"], "--max-new-tokens"),
    "negative temperature": (["--temperature", "-1"], "temperature"),
    "missing document": (["--input", "{tmp}/missing.txt"], "missing.txt"),
    "malformed session": (["--session", "{tmp}/bad.jsonl"], "bad.jsonl:2"),
    "missing model": (["--model", "{tmp}/missing"], "model"),
    "no model in the directory": (["--model", "{tmp}"], "model"),
    "unwritable results": (["--json", "{tmp}/no/such/dir.json"], "--json"),
    "device below a page": (["--device-tokens", "10"], "device_tokens"),
    "host below a page": (["--host-bytes", "4096"], "host_bytes"),
    "page that divides nothing": (["--page-size", "48"], "page_size"),
    "page of nothing": (["--host-page-size", "0"], "host_page_size"),
    "no size": (["--host-bytes", "12Q"], "12Q"),
    "no host for the disk": (["--host-bytes", "0", "--disk", "{tmp}/store"], "host_bytes"),
    "two sizes for the host": (["--host-bytes", "1MiB", "--host-ratio", "1"], "host_ratio"),
    "prompt longer than the device": (["--device-tokens", "448"], "device_tokens"),
    "prompt longer than the table": (["--max-context-len", "448"], "max_context_len"),
    "prompt longer than the model": (["--document-tokens", "400000"], "--document-tokens"),
    "unknown dtype": (["--dtype", "float7"], "dtype"),
    "unknown device": (["--device", "abacus"], "device"),
    "device that is not there": (["--device", "cuda:77"], "device"),
    "missing settings": (["--config", "{tmp}/missing.yaml"], "missing.yaml"),
    "disk that is a file": (["--disk", "{tmp}/bad.jsonl"], "disk path"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one line on stderr that names the culprit; nothing is served, nothing is left behind."""
    (tmp_path / "bad.jsonl").write_text('{"input": "fine"}\n{"output": "no input"}\n')
    flags, culprit = BAD[case]
    before = sorted(tmp_path.iterdir())
    try:
        status = main(["demo", *SMALL, *(flag.format(tmp=tmp_path) for flag in flags)])
    except SystemExit as exit:
        status = int(str(exit.code))
    out, err = capsys.readouterr()
    assert status == 2
    assert culprit in _one_line(err)
    assert "1.1" not in out
    assert sorted(tmp_path.iterdir()) == before


_SIZE = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_local_model_is_served(tmp_path: Path) -> None:
    """--model takes a directory with a model and its tokenizer, in its own geometry, and the outcome is identical."""
    save_model(tmp_path / "model", hf.Qwen2Config(**_SIZE, **_HEADS, initializer_range=0.2))
    results = _demo(tmp_path, "--model", str(tmp_path / "model"))
    assert results["model"] == "model" and results["identical"] is True
    assert all(tokens > 0 for tokens in results["hit_tokens"].values()), results["hit_tokens"]


def test_an_unsupported_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A local model that the runner cannot serve is refused with the reason, before anything is served."""
    save_model(tmp_path, hf.BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4))
    capsys.readouterr()
    assert main(["demo", *SMALL, "--model", str(tmp_path)]) == 2
    assert "has no way to be told positions" in _one_line(capsys.readouterr().err)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version and --help leave with 0; help shows the demo's own flags and the engine's."""
    for flags, words in (
        (["--version"], ["hicache 0."]),
        (["demo", "--help"], ["--session", "--device-tokens", "--disk"]),
    ):
        with pytest.raises(SystemExit) as exit:
            main(flags)
        assert not exit.value.code
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_the_command_exits_with_its_status() -> None:
    """Run as a process, wrong flags give status 2 and one line, without a traceback."""
    process = _spawn("demo", "--flavour", "mild")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and not out
    assert "--flavour" in _one_line(err) and "--help" in err


def test_without_the_serve_extra_it_says_what_to_install() -> None:
    """Where transformers is missing, the demo names the extra in one line, and the rest of the command still works."""
    code = "import sys; sys.modules['transformers'] = None; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "pip install 'hicache[serve]'" in _one_line(run.stderr)


def _run_into(number: signal.Signals, store: Path, num_pages: int) -> tuple[int, str]:
    """Start a demo over `store`, send the signal once it has computed `num_pages` pages more; status and stderr."""
    sidecar = store / "kv-audit.jsonl"
    before = len(sidecar.read_bytes().splitlines()) if sidecar.exists() else 0
    process = _spawn("demo", *SMALL, "--turns", "40", "--no-baseline", "--disk", str(store))
    deadline_s = time.monotonic() + 120
    while not sidecar.exists() or len(sidecar.read_bytes().splitlines()) < before + num_pages:
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_demo_that_dies_leaves_a_store_that_serves(number: signal.Signals, tmp_path: Path) -> None:
    """Killed or interrupted in the middle: the next run over the same directory opens it, hits it, and is identical."""
    status, err = _run_into(number, tmp_path / "store", 20)
    if number == signal.SIGINT:
        assert status == 130 and "Traceback" not in err and "interrupted" in err
    else:
        assert status == -number
    results = _demo(tmp_path, "--disk", str(tmp_path / "store"))
    assert results["identical"] is True
    assert results["first_turns"]["hit_tokens"]["disk"] > 0
    assert results["pages"]["mismatched"] == 0 < results["pages"]["compared"]


@pytest.mark.long
def test_killed_again_and_again(tmp_path: Path) -> None:
    """Many kills at different moments over one store: never an error, never a wrong byte or token, and nothing lost of
    what a run before had finished."""
    store = tmp_path / "store"
    for run, num_pages in enumerate((1, 2, 5, 9, 14, 3, 20, 1)):
        _run_into(signal.SIGKILL, store, num_pages)
        results = _demo(tmp_path, "--disk", str(store))
        assert results["identical"] is True
        # The first kill may come before the first page is on disk.
        assert not run or results["first_turns"]["hit_tokens"]["disk"] > 0


@pytest.mark.long
def test_the_default_demo(tmp_path: Path) -> None:
    """With its defaults the demo is identical, hits all tiers and reaches the first token 3 times sooner."""
    out = tmp_path / "out.json"
    assert main(["demo", "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["identical"] is True and all(results["hit_tokens"].values())
    assert results["ttft_ms"]["cached"] * 3 < results["ttft_ms"]["recompute"]


@pytest.mark.gpu
def test_the_demo_on_a_gpu(tmp_path: Path) -> None:
    """On CUDA the same demo is identical, hits all tiers, and a store filled there serves a second run."""
    flags = ["--device", "cuda", "--disk", str(tmp_path / "store")]
    first, second = _demo(tmp_path, *flags), _demo(tmp_path, *flags)
    for results in (first, second):
        assert results["identical"] is True and results["device"] == torch.cuda.get_device_name()
    assert all(first["hit_tokens"].values())
    assert second["first_turns"]["hit_tokens"]["disk"] > 0
    assert os.path.getsize(tmp_path / "store" / "index.mdb") > 0


def test_the_benchmark_records_the_demos_figures(tmp_path: Path) -> None:
    """The benchmark's cases are the demo's own results: shares of the tiers, ratio of the medians, identical."""
    report = common.Report.start("demo", torch.device("cpu"), "test", "test")
    size = ["--documents", "3", "--turns", "2", "--document-tokens", "600"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    bench_demo.add_arguments(parser)
    bench_demo.run(parser.parse_args(size), report)
    cases = {case.name: case for case in report.cases}
    assert cases["demo.identical"].met is True
    ttft = cases["demo.ttft"]
    assert ttft.samples == 3 and ttft.ratio == ttft.value / cases["demo.ttft.recompute"].value
    shares = [cases[f"demo.hit.{tier}"].value for tier in ("device", "host", "disk")]
    assert 0 < sum(shares) < 1
    assert common.read_report(report.write(tmp_path)).cases == report.cases
