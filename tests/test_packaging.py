"""The wheel holds the package as it is imported, and importing it needs no optional library; the sdist holds what its
tests need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MADE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "shared")
SOURCES = {"hicache": "hicache", "kernels": "hicache/kernels", "storage": "hicache/storage", "bench": "hicache/bench"}


def _python(code: str, cwd: Path, arguments: Sequence[str] = ()) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built by the project's own build backend from a copy of the tree, without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend of pyproject.toml is not installed")
    source = tmp_path_factory.mktemp("source")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    _python("import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])", source, [str(out)])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the tree without what git ignores, and unpacked: its root."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend of pyproject.toml is not installed")
    source, out = tmp_path_factory.mktemp("tree") / "hicache", tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*MADE))
    _python("import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])", source, [str(out)])
    (built,) = out.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.is_dir())


def test_the_sdist_holds_what_its_tests_need(sdist: Path) -> None:
    """Every file of the repository that git keeps is in it, and tests that read the tree pass from it."""
    kept = {
        path.relative_to(ROOT).as_posix()
        for folder in (*SOURCES, "tests", "docs", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kept |= {path.name for path in ROOT.iterdir() if path.is_file() and path.suffix in (".md", ".toml", ".in")}
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert kept | {"Makefile", "LICENSE"} <= found, sorted(kept - found)
    tests = ["tests/test_layering.py", "tests/bench/test_common.py", "tests/test_surface.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    run = subprocess.run(command, cwd=sdist, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout[-4000:]


def test_the_metadata_says_what_it_is_for(wheel: Path) -> None:
    """Whoever looks for it finds it: the metadata has classifiers, and none that contradicts the licence's field."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    classifiers = [line for line in lines if line.startswith("Classifier: ")]
    assert any("Artificial Intelligence" in line for line in classifiers)
    assert any("Typed" in line for line in classifiers)
    assert not any("License ::" in line for line in classifiers)


def _expected_files() -> set[str]:
    files = set()
    for folder, place in SOURCES.items():
        files |= {f"{place}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return files


def test_the_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    """Each source file is in the wheel below hicache/, and nothing else is at its top level."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == _expected_files()
    assert {"hicache/py.typed", "hicache/__init__.pyi", "hicache/serving/server/dashboard.html"} <= set(names)
    assert not [name for name in names if name.startswith("hicache/bench/") and not name.endswith(".py")]
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hicache", next(top for top in tops if top.endswith(".dist-info"))}


def test_the_wheel_names_its_licence_and_its_command(wheel: Path) -> None:
    """The metadata carries the licence text and the entry point of the command line."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "hicache = hicache.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_kernels_and_storage_import_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """An unpacked wheel serves hicache.kernels and hicache.storage from inside itself, not from the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hicache, hicache.kernels, hicache.storage;"
        "print(hicache.__file__, hicache.kernels.__file__, hicache.storage.__file__, sep='\\n')"
    )
    found = _python(code, tmp_path, [str(tmp_path)]).splitlines()
    places = ("hicache", "hicache/kernels", "hicache/storage")
    assert [Path(file) for file in found] == [tmp_path / place / "__init__.py" for place in places]


def test_an_installed_wheel_has_the_benches(wheel: Path, tmp_path: Path) -> None:
    """`hicache bench` of a wheel, away from the repository, lists and runs benches and compares what they wrote; what
    needs the repository says so in one line."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")

    def hicache(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hicache.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, str(tmp_path / "site"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    listed = hicache("bench", "list")
    assert listed.returncode == 0 and {"transfer", "disk"} <= {line.split()[0] for line in listed.stdout.splitlines()}
    done = hicache("bench", "run", "states", "--device", "cpu", "--samples", "1")
    assert done.returncode == 0, done.stderr
    result = tmp_path / done.stdout.splitlines()[-1]
    assert result.parent == tmp_path / "bench-results" and json.loads(result.read_text())["commit"] == "unknown"
    same = hicache("bench", "compare", str(result), str(result.parent / result.name))
    assert same.returncode == 0 and "regressed" not in same.stdout.splitlines()[-1]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from hicache.bench.common import repository\n"
        "try: repository('tests/support')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert _python(code, tmp_path, [str(tmp_path / "site")]).startswith("BenchUnavailable tests/support is in the repo")


def test_the_front_door_opens_without_triton(tmp_path: Path) -> None:
    """Every public name comes where Triton cannot be imported, which pip installs on Linux alone."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import hicache\n"
        "from hicache import *\n"
        "assert CacheEngine is hicache.CacheEngine and hicache.tree\n"
        "print(hicache.__name__)"
    )
    assert _python(code, tmp_path) == "hicache"
