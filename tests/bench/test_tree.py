"""The replay through the prefix caches, and the loader of a peer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from hicache.bench import caches, replay
from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.peers import SGLang
from hicache.bench.policy import synthetic_trace
from hicache.bench.replay import Setup, add_replays, prompts_of

ROOT = Path(__file__).resolve().parent.parent.parent


def empty_report() -> Report:
    return Report("tree", "cpu", {}, "", "", "")


def test_prompts_are_those_of_the_trace() -> None:
    """Blocks become as many tokens each, equal blocks equal tokens, and the last block of a prompt is left out."""
    blocks = synthetic_trace(50)
    setup = Setup("full", 4, 8, 50, 10_000)
    prompts = prompts_of(blocks, setup)
    held = [ids[: max(1, len(ids) - 1)].tolist() for ids in blocks]
    assert [len(prompt) for prompt, _ in prompts] == [8 * len(ids) for ids in held]
    of_block: dict[int, list[int]] = {}
    for ids, (prompt, answer) in zip(held, prompts, strict=True):
        assert answer
        for at, block in enumerate(ids):
            assert of_block.setdefault(block, prompt[8 * at : 8 * at + 8]) == prompt[8 * at : 8 * at + 8]
    assert len({tuple(tokens) for tokens in of_block.values()}) == len(of_block)
    assert [prompt for prompt, _ in prompts_of(blocks, Setup("full", 1, 1, 50, 10_000))] == held
    assert len(prompts_of(blocks, Setup("full", 1, 1, 50, 100))) < 50


def test_each_replay_is_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache serves the trace from pools that are too small for it; without a peer there is nothing to compare."""
    setups = [
        Setup(kind, page, tokens, 40, 400)
        for kind, page, tokens in (("full", 4, 8), ("full", 1, 1), ("swa", 4, 8), ("swa", 1, 1), ("mamba", 1, 1))
    ]
    monkeypatch.setattr(replay, "SETUPS", setups)
    report = empty_report()
    add_replays(report, synthetic_trace(40), None, "synthetic trace")
    assert [case.name for case in report.cases] == [setup.name for setup in setups]
    assert all(case.value > 0 and case.ratio is None for case in report.cases)


def test_each_call_is_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Match and insert of both page sizes, of a key and of a list, and an eviction are timed."""
    monkeypatch.setattr(caches, "TOKENS", 1_000)
    monkeypatch.setattr(caches, "LEAVES", 50)
    report = empty_report()
    caches.add_calls(report, None, 3)
    calls = [
        f"{what}.page{page}.{form}" for page in (64, 1) for form in ("key", "list") for what in ("match", "insert")
    ]
    assert [case.name for case in report.cases] == [*(f"cache.{call}" for call in calls), "cache.evict.leaves50"]


PEER = {
    "radix_cache": """
        import sglang.metrics.collector
        from sglang.srt.absent import Base, decorate, get_tensor_model_parallel_rank
        class RadixCache(Base):
            rank = get_tensor_model_parallel_rank()
            @decorate(True)
            def run(self): ...
        """,
    "allocator": "class TokenToKVPoolAllocator: ...",
}
NAMES = "base_prefix_cache cache_init_params evict_policy mamba_radix_cache memory_pool swa_memory_pool swa_radix_cache"


@pytest.mark.parametrize("packed", [False, True])
def test_a_peer_is_loaded_without_what_it_imports(packed: bool, tmp_path: Path) -> None:
    """Its caches come from a folder or a wheel as they are, and every other module of it is a stub."""
    sources = {name: textwrap.dedent(PEER.get(name, "")) for name in (*PEER, *NAMES.split())}
    source = tmp_path / "peer.whl" if packed else tmp_path
    for name, text in sources.items():
        path = f"sglang/srt/mem_cache/{name}.py"
        if packed:
            with zipfile.ZipFile(source, "a") as wheel:
                wheel.writestr(path, text)
        else:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    program = f"""
        from pathlib import Path
        from bench.peers import SGLang
        peer = SGLang(Path({str(source)!r}))
        assert peer.RadixCache().rank == 0 and peer.RadixCache.__module__ == "sglang.srt.mem_cache.radix_cache"
        assert peer.TokenToKVPoolAllocator.__name__ == "TokenToKVPoolAllocator"
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_peer_is_told(tmp_path: Path) -> None:
    """Where no caches are found, one line says so, and the process can go on."""
    with pytest.raises(BenchUnavailable, match="cannot be loaded from"):
        SGLang(tmp_path)
    assert not any(name.split(".")[0] == "sglang" for name in sys.modules)
