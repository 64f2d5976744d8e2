"""What is run of the tests, of all that there are."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from unchanged import Unchanged

SERVERS = Path(__file__).resolve().parent.parent / ".ci" / "servers"


@pytest.fixture(scope="module")
def servers() -> ModuleType:
    spec = spec_from_loader("servers", SourceFileLoader("servers", str(SERVERS)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("files", "touched"),
    [
        ([], ""),
        (["README.md", "docs/vllm.md", "mkdocs.yml", "tests/flow/test_engine.py"], ""),
        (["tests/integrations/test_vllm_gate.py"], ""),  # of the default tests
        (["hicache/integrations/vllm/tier.py", "CHANGELOG.md"], "vllm"),
        (["bench/servers/sglang.py", "tests/integrations/vllm/test_vllm.py"], "vllm sglang"),
        (["tests/support/vllm_server.py", "tests/remote/test_redis.py", "tests/support/remote_case.py"], "vllm remote"),
        *(
            ([file], "vllm remote sglang")
            for file in (
                "hicache/integrations/server_store.py",
                "hicache/errors.py",
                "storage/resp.py",
                "tests/conftest.py",
                "tests/support/waiting.py",
                ".ci/environments/vllm.sh",
                "pyproject.toml",
            )
        ),
    ],
)
def test_a_server_is_left_out_where_nothing_changed_for_it(servers: ModuleType, files: list[str], touched: str) -> None:
    """Its plug-in, its tests and all that they share with others are as they were."""
    assert servers.touched_by(files) == touched.split()


def test_all_servers_are_tested_where_git_cannot_tell(servers: ModuleType) -> None:
    """On no branch of that name."""
    assert servers.changed_files("no-such-branch") is None


def test_kernels_are_left_out_where_all_that_they_run_is_as_when_they_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a failure, nor in CI, nor with another source, test or setting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CI", raising=False)
    files = ["kernels/one.py", "tests/kernels/test_one.py", "tests/support/cases.py", "tests/conftest.py"]
    files += ["pyproject.toml", "hicache/errors.py", "hicache/console.py", "hicache/process/init.py"]
    for file in (*files, "hicache/engine.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("before")

    def run(status: int = 1) -> int:
        """How many of two tests it has."""
        config = SimpleNamespace(rootpath=tmp_path, hook=SimpleNamespace(pytest_deselected=lambda items: None))
        items = [
            SimpleNamespace(path=tmp_path / file) for file in ("tests/kernels/test_one.py", "tests/flow/test_two.py")
        ]
        plugin = Unchanged(config)  # type: ignore[arg-type]
        plugin.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        plugin.pytest_sessionfinish(status)
        return len(items)

    assert [run(1), run(0), run(), run()] == [2, 2, 1, 1]
    (tmp_path / "hicache/engine.py").write_text("after")
    assert run() == 1
    for file in files:
        (tmp_path / file).write_text("after")
        assert run() == 2, file
        (tmp_path / file).write_text("before")
    monkeypatch.setenv("CI", "1")
    assert run() == 2


def test_tests_of_kernels_run_kernels_alone() -> None:
    """So that what they run is known without running them."""
    text = "".join(file.read_text() for file in (SERVERS.parents[1] / "tests" / "kernels").glob("*.py"))
    assert set(re.findall(r"^ *(?:from|import) (hicache\.?\w*)", text, re.M)) == {"hicache.kernels"}
