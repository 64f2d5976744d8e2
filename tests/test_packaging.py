"""The wheel contains the package and works without the repository. The sdist contains all files that its tests need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from hicache.integrations.versions import SGLANG, VLLM
from hicache.releases import TESTED

ROOT = Path(__file__).resolve().parent.parent
MADE = (".git", ".venv", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "shared")
DEVELOPERS = ("docs", "release", "test")  # extras for developers
SOURCES = {"hicache": "hicache", "kernels": "hicache/kernels", "storage": "hicache/storage", "bench": "hicache/bench"}
INSTALLED = """
import sys
site, *arguments = sys.argv[1:]
sys.path.insert(0, site)
sys.argv[1:] = arguments
import hicache, hicache.kernels, hicache.storage
assert all(module.__file__.startswith(site) for module in (hicache, hicache.kernels, hicache.storage))
from hicache.cli import main
sys.exit(main())
"""


class Built(NamedTuple):
    """The root folders of the unpacked distributions. `files`: the distributions."""

    sdist: Path
    wheel: Path
    files: list[Path]


def python(cwd: Path, *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel and the sdist, built by the project's own build backend from a copy of the tree, without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend of pyproject.toml is not installed")
    out = tmp_path_factory.mktemp("built")
    files = build(tmp_path_factory.mktemp("tree"), out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out / "sdist", filter="data")
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        archive.extractall(out / "wheel")
    return Built(next((out / "sdist").iterdir()), out / "wheel", files)


def build(tree: Path, out: Path) -> list[Path]:
    """The distributions that `.ci/build` builds from a copy of the tree."""
    shutil.copytree(ROOT, tree / "hicache", ignore=shutil.ignore_patterns(*MADE), copy_function=shutil.copy)
    python(tree, tree / "hicache/.ci/build", out)
    return sorted(out.iterdir())


@pytest.mark.skipif(not (Path(sys.prefix) / ".made-from").exists(), reason="the environment is not of .ci/setup")
def test_a_program_outside_of_the_clone_imports_the_package(tmp_path: Path) -> None:
    """A folder without `__init__.py`, such as a clone named hicache, is not imported instead of the package."""
    (tmp_path / "hicache" / "hicache").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("from hicache import EngineConfig\nimport hicache.kernels, hicache.storage\n")
    python(tmp_path, "mine.py")


def test_an_installation_replaces_no_package_with_an_older_one() -> None:
    """No requirement of users has an upper bound. The lower bound of a package whose releases are tested is the first
    tested release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: given for name, given in project["optional-dependencies"].items() if name not in DEVELOPERS}
    requirements = [Requirement(text) for given in (project["dependencies"], *extras.values()) for text in given]
    lowest = {each.name: [(bound.operator, bound.version) for bound in each.specifier] for each in requirements}
    first = {name: tested.first for name, tested in TESTED.items()} | {"vllm": VLLM[0], "sglang": SGLANG[0]}
    assert all(len(bounds) <= 1 and all(operator == ">=" for operator, _ in bounds) for bounds in lowest.values())
    assert {name: lowest[name] for name in first} == {name: [(">=", version)] for name, version in first.items()}


@pytest.mark.long
def test_two_builds_give_equal_bytes(built: Built, tmp_path: Path) -> None:
    """Two builds from copies whose files have different times give equal bytes."""
    (tmp_path / "tree").mkdir()
    again = build(tmp_path / "tree", tmp_path / "out")
    assert [path.name for path in again] == [path.name for path in built.files]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built.files]


@pytest.mark.long
def test_the_package_index_takes_the_distributions(built: Built) -> None:
    """`twine check --strict` finds no fault, and the description has no relative link."""
    pytest.importorskip("twine", reason="twine of the extra `release` is not installed")
    python(built.sdist, "-m", "twine", "check", "--strict", *built.files)
    description = (built.sdist / "PKG-INFO").read_text().partition("\n\n")[2]
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links)


@pytest.mark.long
def test_the_sdist_holds_what_its_tests_need(built: Built) -> None:
    """The sdist contains every file that git tracks, and tests that read the tree pass in it."""
    kept = {
        path.relative_to(ROOT).as_posix()
        for folder in (*SOURCES, "tests", "docs", ".ci", ".github", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kept |= {path.name for path in ROOT.iterdir() if path.is_file() and path.suffix in (".md", ".toml", ".in")}
    found = {path.relative_to(built.sdist).as_posix() for path in built.sdist.rglob("*") if path.is_file()}
    assert kept | {"Makefile", "LICENSE"} <= found, sorted(kept - found)
    tests = ["tests/test_layering.py", "tests/bench/test_common.py", "tests/test_surface.py"]
    python(built.sdist, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests)


@pytest.mark.long
def test_the_wheel_holds_the_package_under_one_name(built: Built) -> None:
    """The wheel has each source file and no result below hicache/, and nothing else at the top level. The wheel has the
    licence, the command and the classifiers."""
    names = {path.relative_to(built.wheel).as_posix() for path in built.wheel.rglob("*") if path.is_file()}
    modules = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hicache").rglob("*.*")}
    data = {path for path in data if not path.endswith((".py", ".pyc"))}
    assert {name for name in names if name.startswith("hicache/") and not name.endswith(".py")} == data
    (info,) = (path for path in built.wheel.iterdir() if path.name != "hicache")
    assert info.suffix == ".dist-info"
    assert (info / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "hicache = hicache.cli:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text().splitlines()
    assert {"License-Expression: Apache-2.0", "Requires-Python: >=3.11"} <= set(metadata)
    classifiers = [line for line in metadata if line.startswith("Classifier: ")]
    assert classifiers and not any("License ::" in line for line in classifiers)


@pytest.mark.long
def test_an_installed_wheel_has_the_benches(built: Built, tmp_path: Path) -> None:
    """Away from the repository, `hicache bench` of a wheel lists and runs benches, and compares their results."""

    def hicache(*arguments: object) -> list[str]:
        return python(tmp_path, "-c", INSTALLED, built.wheel, *arguments).splitlines()

    assert {"transfer", "disk"} <= {line.split()[0] for line in hicache("bench", "list")}
    result = tmp_path / hicache("bench", "run", "device", "--only", "slots", "--device", "cpu", "--samples", "1")[-1]
    assert result.parent == tmp_path / "bench-results" and json.loads(result.read_text())["commit"] == "unknown"
    assert "regressed" not in hicache("bench", "compare", result, result)[-1]
