"""Which servers .ci/servers tests after a change."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

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
        (["tests/support/vllm_server.py", "tests/remote/test_s3.py", "tests/support/remote_case.py"], "vllm remote"),
        *(
            ([file], "vllm remote sglang")
            for file in (
                "hicache/integrations/server_store.py",
                "hicache/errors.py",
                "storage/codec.py",
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
